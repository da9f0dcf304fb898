"""The engine: prompts in, groups of completions out, over the caller's own weights."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.block_pool import BlockPool
from rollout.config import RolloutConfig, SamplingParams
from rollout.core import EngineCore
from rollout.errors import ExactnessError, RolloutError
from rollout.exactness import check_parity, probe
from rollout.kv_cache import KVCache, LayerGroup
from rollout.loading import check_module, load_model, load_tokenizer, resolve_device
from rollout.memory import pool_size
from rollout.model_runner import ModelRunner
from rollout.prompts import Prompt, end_token_ids
from rollout.requests import BadPrompt, Limits, OnError, RolloutHandle, make_requests
from rollout.sampler import TRAIN
from rollout.scheduler import Scheduler
from rollout.sequence import Request
from rollout.stats import EngineStats
from rollout.types import Rollout, RolloutGroup
from rollout.views import check_shared, identify, make_view, training_view
from rollout.weights import WeightWatch, check_update

logger = logging.getLogger(__name__)

WhileRunning = Literal["refuse", "drain", "abort"]
"""What a weight update does with requests that have begun under the old weights."""

_BAR_DELAY = 5.0  # seconds before a progress bar shows


class RolloutEngine:
    """Generates groups of rollouts from a model directory or from the caller's module.

    A module is read through a view and never changed; after its weights changed in place, call weights_updated().
    One thread steps (generate_rollouts and stream_rollouts do); any thread may submit and abort. Use it as a context
    manager, or close() it.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: RolloutConfig | None = None,
    ) -> None:
        self.config = config = config or RolloutConfig()
        if isinstance(model, str | Path):
            tokenizer = tokenizer or load_tokenizer(model)
            self.module = load_model(model, config.dtype, resolve_device(config.device))
        else:
            self.module = check_module(model)
        self.tokenizer = tokenizer
        parameter = next(self.module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._check_module_matches()
        self.max_model_len = self._resolve_max_model_len()
        self.end_token_ids = end_token_ids(self.module, tokenizer)
        self.layer_group = LayerGroup.of(self.module.config, self.dtype)
        num_blocks = pool_size(config, self.layer_group, self.max_model_len, self.device)
        self.exact, self.exact_reason = self._resolve_exact()

        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.prefill_chunk_size,
            prefix_cache=config.prefix_cache,
        )
        self._limits = Limits(self.module.config.vocab_size, self.max_model_len, num_blocks, config.block_size)
        self._identity = identify(self.module)
        self._watch = WeightWatch(self.module)
        cache = KVCache(self.layer_group, num_blocks, config.block_size, self.device)
        view = make_view(self.module, exact=self.exact)
        self._runner: ModelRunner | None = ModelRunner(view, cache, config.max_num_seqs, exact=self.exact)
        self._core = EngineCore(self.scheduler, self._runner, tokenizer, self.end_token_ids)

    def _check_module_matches(self) -> None:
        config = self.config
        if config.dtype != "auto" and getattr(torch, config.dtype) != self.dtype:
            raise RolloutError(f"dtype={config.dtype!r}, but the module is in {self.dtype}: convert it, or use auto")
        if config.device != "auto" and resolve_device(config.device).type != self.device.type:
            raise RolloutError(f"device={config.device!r}, but the module is on {self.device}: move it, or use auto")

    def _resolve_max_model_len(self) -> int:
        limit = int(self.module.config.max_position_embeddings)
        wanted = self.config.max_model_len
        if wanted is not None and wanted > limit:
            raise RolloutError(f"max_model_len={wanted} is more than the model's max_position_embeddings of {limit}")
        return wanted or limit

    def _resolve_exact(self) -> tuple[bool, str]:
        mode = self.config.exact
        report = probe(self.module, self.layer_group, self.config.block_size, self.max_model_len, exact=mode != "off")
        check_parity(report, self.dtype)
        if mode == "off":
            return False, "exact=off"
        if not report.exact:
            if mode == "require":
                raise ExactnessError(f"exact='require', but {report.reason}: use exact=auto to recompute log-probs")
            logger.warning("exact=auto: %s; the trainer will recompute log-probs", report.reason)
        return report.exact, report.reason

    # -- generating ---------------------------------------------------------------------------------------------

    def generate_rollouts(
        self,
        prompts: Seq[Prompt],
        n: int = 16,
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        step: int = 0,
        keys: Seq[int] | None = None,
        purpose: int = TRAIN,
        salt: str | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
    ) -> list[RolloutGroup]:
        """n completions of each prompt: groups in prompt order, rollouts in index order.

        A completion depends on the weights, its prompt's ids, its sampling parameters (seed included), `step`, its
        key, its index and `purpose`, and on nothing else. keys: one per prompt, 0 .. 2**32 - 1; None: the prompt's
        place in this call. salt: prompts share cached KV only with those of the same salt. Raises RolloutError before
        any work if an input is bad; with on_error="return" a bad prompt gets a group with `error` set and one rollout
        of finish_reason "error", and the others run. progress: show a bar; None: on a terminal, in long calls.
        """
        requests = self._make_requests(prompts, n, sampling, step, keys, purpose, salt, on_error)
        total = sum(request.n for request in requests if isinstance(request, Request))
        entries: list[RolloutHandle | BadPrompt] = []
        shown = {None: None, True: False, False: True}[progress]
        with tqdm(total=total, unit="rollout", delay=_BAR_DELAY, disable=shown, leave=False) as bar:
            for _ in self._stream(requests, entries):
                bar.update()
        return [
            entry.group(self.policy_version) if isinstance(entry, BadPrompt) else entry.group() for entry in entries
        ]

    def stream_rollouts(
        self,
        prompts: Seq[Prompt],
        n: int = 16,
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        step: int = 0,
        keys: Seq[int] | None = None,
        purpose: int = TRAIN,
        salt: str | None = None,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, Rollout]]:
        """Like generate_rollouts, but yields (place of the prompt, rollout) as soon as each rollout has ended.

        Inputs are checked at once. Dropping or closing the iterator, or an exception in its consumer, aborts what is
        left and gives its blocks back.
        """
        requests = self._make_requests(prompts, n, sampling, step, keys, purpose, salt, on_error)
        return self._stream(requests, [])

    def _stream(
        self, requests: Seq[Request | BadPrompt], entries: list[RolloutHandle | BadPrompt]
    ) -> Iterator[tuple[int, Rollout]]:
        self._core.refuse_nesting()
        self._core.meter.begin_call()
        places: dict[RolloutHandle, int] = {}
        try:
            for place, request in enumerate(requests):
                entries.append(request if isinstance(request, BadPrompt) else self._core.submit(request))
                entry = entries[-1]
                if isinstance(entry, RolloutHandle):
                    places[entry] = place
                else:
                    yield place, entry.group(self.policy_version).rollouts[0]
            while not all(handle.done for handle in places):
                for handle, rollout in self.step():
                    if handle in places:
                        yield places[handle], rollout
        except KeyboardInterrupt:  # between two steps, perhaps between submitting and noting the handle
            self._core.abort_all()
            raise
        finally:
            for handle in places:
                if not handle.done:
                    self.abort(handle)

    def submit(
        self,
        prompt: Prompt,
        n: int = 1,
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
        key: int = 0,
        purpose: int = TRAIN,
        salt: str | None = None,
    ) -> RolloutHandle:
        """Queue a prompt, from any thread; step() runs it. Raises RolloutError if it is bad."""
        (request,) = self._make_requests([prompt], n, sampling, step, [key], purpose, salt, "raise")
        assert isinstance(request, Request)
        return self._core.submit(request)

    def _make_requests(
        self,
        prompts: Seq[Prompt],
        n: int,
        sampling: SamplingParams | Seq[SamplingParams] | None,
        step: int,
        keys: Seq[int] | None,
        purpose: int,
        salt: str | None,
        on_error: OnError,
    ) -> list[Request | BadPrompt]:
        self._ready()
        return make_requests(
            prompts,
            n,
            sampling,
            self.tokenizer,
            self._limits,
            step=step,
            keys=keys,
            purpose=purpose,
            salt=salt,
            on_error=on_error,
        )

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise RolloutError("this engine is closed: make a new one")
        if self._runner.cache.released:
            missing = self._runner.cache.num_bytes
            raise RolloutError(f"the KV pool has been released ({missing} bytes are missing): call restore_memory()")
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._core.has_work

    def step(self) -> list[tuple[RolloutHandle, Rollout]]:
        """One iteration: plan, run, append. Returns the completions that ended, whoever submitted them.

        An error or an interrupt in the middle aborts every request, gives every block back and leaves the engine
        usable.
        """
        self._ready()
        return self._core.step(before=self._notice_changed_weights)

    def abort(self, handle: RolloutHandle) -> None:
        """Stop a request, from any thread: its blocks are free by the next step; begun completions end with "abort"."""
        self._core.abort(handle)

    def fork(
        self, handle: RolloutHandle, index: int, sampling: SamplingParams | None = None, *, key: int | None = None
    ) -> RolloutHandle:
        """Fork a running completion where it stands, between steps; the fork goes on by itself.

        It shares every block until either writes to it. Its completion holds what the parent had drawn; `sampling`
        (None: the parent's; max_new_tokens counts from the prompt on) and `key` (None: the parent's) govern what
        comes. Its rollout index, a part of its random numbers' counter, is n for a request's first fork, then n + 1,
        and so on, forks of forks included.
        """
        self._ready()
        return self._core.fork(handle, index, sampling, key, self._limits.max_len)

    # -- weights and state --------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """How often the weights have changed; every rollout carries the version that made it."""
        return self.scheduler.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.scheduler.set_policy_version(version)

    def weights_updated(self, running: WhileRunning = "refuse") -> None:
        """The shared weights changed in place: from now on rollouts carry the next policy_version. Moves no bytes.

        KV of earlier versions cannot be found any more. Requests that wait run under the new weights. If some have
        begun: "refuse" raises, "abort" ends them; "drain" is refused, since their weights are gone (drain() before).
        """
        self._ready()
        self._core.refuse_nesting()
        check_shared(self.module, self._identity)
        if running == "drain" and self.scheduler.has_begun:
            raise RolloutError('running="drain": the old weights are gone already; call drain() before changing them')
        self._settle(running)
        self._new_version()

    def update_weights(self, tensors: Mapping[str, Tensor], running: WhileRunning = "refuse") -> None:
        """Copy new weights, by state-dict name, into the tensors that the engine reads (the caller's, if it shares).

        All or nothing: names and shapes are checked first. `running`: what to do with requests that have begun;
        "drain" lets them end under the old weights.
        """
        self._ready()
        copies = check_update(self.module, tensors)
        self._settle(running)
        with torch.no_grad():
            for target, given in copies.items():
                target.copy_(given)
        self._new_version()

    def _settle(self, running: WhileRunning) -> None:
        if running not in ("refuse", "drain", "abort"):
            raise RolloutError(f"running={running!r}: use refuse, drain or abort")
        if not self.scheduler.has_begun:
            return
        if running == "refuse":
            raise RolloutError(
                'requests have begun under the old weights: end them, or say running="abort" (or "drain")'
            )
        if running == "drain":
            self.drain()
        else:
            self._core.abort_begun()

    def drain(self) -> None:
        """Step until every request that has begun has ended; those that wait stay where they are."""
        self.scheduler.admits = False
        try:
            while self.scheduler.has_begun:
                self.step()
        finally:
            self.scheduler.admits = True

    def _new_version(self) -> None:
        self._watch.acknowledge()
        self.scheduler.set_policy_version(self.policy_version + 1)

    def _notice_changed_weights(self) -> None:
        """Somebody changed the weights without a word: count it as an update, unless requests have begun."""
        begun = self.scheduler.has_begun
        # a look at the values costs a little, so it is taken only before a first request, and if KV could be stale
        if not self._watch.changed(look=not begun and bool(self.pool.cache)):
            return
        if begun:
            raise RolloutError("the weights changed while requests were running; they have been aborted")
        self._new_version()

    def release_memory(self) -> int:
        """Give the KV pool back to the device's allocator (to the system, on a CPU); returns its bytes."""
        cache = self._ready().cache
        if self.scheduler.has_begun:
            raise RolloutError("requests are running on the KV pool: end them before release_memory()")
        self.pool.forget_cached()
        cache.release()
        return cache.num_bytes

    def restore_memory(self) -> None:
        """Take the KV pool again after release_memory()."""
        if self._runner is None:
            raise RolloutError("this engine is closed: make a new one")
        if self._runner.cache.released:
            self._runner.cache.restore()

    def training_view(self, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
        """The module that a loss runs through to see this engine's log-probs bit for bit; same parameters."""
        return training_view(self.module, exact=self.exact, gradient_checkpointing=gradient_checkpointing)

    def stats(self) -> EngineStats:
        scheduler, meter, cache = self.scheduler, self._core.meter, self.pool.cache
        held = self._runner is not None and not self._runner.cache.released
        return EngineStats(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_cached_blocks=cache.num_idle,
            block_size=self.config.block_size,
            pool_bytes=self._runner.cache.num_bytes if self._runner is not None and held else 0,
            num_running=len(scheduler.running),
            num_waiting=self._core.num_waiting,
            peak_blocks_used=meter.peak_used,
            peak_blocks_shared=meter.peak_shared,
            peak_running=meter.peak_running,
            kv_waste=meter.kv_waste,
            prompt_tokens=meter.prompt_tokens,
            completion_tokens=meter.completion_tokens,
            forward_steps=meter.forward_steps,
            seconds=meter.seconds,
            cache_queried_tokens=cache.num_queried_tokens,
            cache_hit_tokens=cache.num_hit_tokens,
            time_to_first_token=meter.time_to_first_token,
            time_per_token=meter.time_per_token,
            policy_version=self.policy_version,
            exact=self.exact,
            exact_reason=self.exact_reason,
            **dataclasses.asdict(scheduler.stats),
        )

    def close(self) -> None:
        """Free the KV pool and the view. Closing twice is fine; generating afterwards is an error."""
        self._core.abort_all()
        self._core.runner = self._runner = None  # type: ignore[assignment]

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
