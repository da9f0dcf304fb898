"""The engine: prompts in, groups of completions out, over the caller's own weights."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.block_pool import BlockPool
from rollout.config import RolloutConfig, SamplingParams
from rollout.core import EngineCore, WhileRunning
from rollout.errors import RolloutError
from rollout.exactness import decide_exactness
from rollout.kv_cache import KVCache, LayerGroup
from rollout.loading import check_matches, check_module, load_model, load_tokenizer, longest_sequence, resolve_device
from rollout.memory import device_bytes, pool_size
from rollout.model_runner import ModelRunner
from rollout.prompts import Prompt, check_tokenizer, end_token_ids
from rollout.requests import BadPrompt, Limits, OnError, RequestOptions, RolloutHandle, make_requests
from rollout.sampler import TRAIN
from rollout.scheduler import Scheduler
from rollout.sequence import Request
from rollout.stats import EngineStats, collect
from rollout.types import Rollout, RolloutGroup
from rollout.views import check_shared, identify, make_view, training_view
from rollout.weights import WeightWatch, check_update

_BAR_DELAY = 5.0  # seconds before a progress bar shows


class RolloutEngine:
    """Generates groups of rollouts from a model directory or from the caller's module.

    A module is read through a view and never changed; after its weights changed in place, call weights_updated().
    One thread steps (generate_rollouts and stream_rollouts do); any thread may submit and abort. close() it after use.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: RolloutConfig | None = None,
    ) -> None:
        self.config = config = config or RolloutConfig()
        if isinstance(model, str | Path):
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            self.module = load_model(model, config.dtype, resolve_device(config.device))
        else:
            self.module = check_module(model)
        check_tokenizer(tokenizer, self.module.config.vocab_size)
        self.tokenizer = tokenizer
        parameter = next(self.module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        check_matches(config, self.device, self.dtype)
        self.max_model_len = longest_sequence(config, self.module.config)
        self.end_token_ids = end_token_ids(self.module, tokenizer)
        self.layer_group = LayerGroup.of(self.module.config, self.dtype)
        num_blocks = pool_size(config, self.layer_group, self.max_model_len, device_bytes(self.device))
        self.exact, self.exact_reason = decide_exactness(self.module, self.layer_group, config, self.max_model_len)

        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.prefill_chunk_size,
            prefix_cache=config.prefix_cache,
        )
        self._limits = Limits(self.module.config.vocab_size, self.max_model_len, num_blocks, config.block_size)
        self._make_requests = partial(make_requests, tokenizer=tokenizer, limits=self._limits)
        self._identity = identify(self.module)
        self._watch = WeightWatch(self.module)
        cache = KVCache(self.layer_group, num_blocks, config.block_size, self.device)
        view = make_view(self.module, exact=self.exact)
        self._runner: ModelRunner | None = ModelRunner(view, cache, config.max_num_seqs, exact=self.exact)
        self._core = EngineCore(self.scheduler, self._runner, tokenizer, self.end_token_ids, config.skip_special_tokens)

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
        self._accept()
        requests = self._make_requests(
            prompts, n, sampling, step=step, keys=keys, purpose=purpose, salt=salt, on_error=on_error
        )
        total = sum(request.n for request in requests if isinstance(request, Request))
        entries: list[RolloutHandle | BadPrompt] = []
        hidden = None if progress is None else not progress
        with tqdm(total=total, unit="rollout", delay=_BAR_DELAY, disable=hidden, leave=False) as bar:
            for _ in self._stream(requests, entries):
                bar.update()
        return [entry.group() for entry in entries]

    def stream_rollouts(
        self,
        prompts: Seq[Prompt],
        n: int = 16,
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[tuple[int, Rollout]]:
        """Like generate_rollouts, but yields (place of the prompt, rollout) as soon as each rollout has ended.

        Inputs are checked at once. Dropping the iterator aborts what is left and gives its blocks back.
        """
        self._accept()
        return self._stream(self._make_requests(prompts, n, sampling, **options), [])

    def _stream(
        self, requests: Seq[Request | BadPrompt], entries: list[RolloutHandle | BadPrompt]
    ) -> Iterator[tuple[int, Rollout]]:
        self._core.refuse_nesting()
        self._core.meter.begin_call()
        places: dict[RolloutHandle, int] = {}
        try:
            for place, request in enumerate(requests):
                if isinstance(request, BadPrompt):
                    request.policy_version = self.policy_version
                    entries.append(request)
                    yield place, request.group().rollouts[0]
                    continue
                handle = self._core.submit(request)
                places[handle] = place
                entries.append(handle)
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
        self._accept()
        (request,) = self._make_requests([prompt], n, sampling, step=step, keys=[key], purpose=purpose, salt=salt)
        assert isinstance(request, Request)
        return self._core.submit(request)

    def _open(self) -> ModelRunner:
        if self._runner is None:
            raise RolloutError("this engine is closed: make a new one")
        return self._runner

    def _ready(self) -> ModelRunner:
        runner = self._open()
        if runner.cache.released:
            missing = runner.cache.num_bytes
            raise RolloutError(f"the KV pool has been released ({missing} bytes are missing): call restore_memory()")
        return runner

    def _accept(self) -> None:
        """Before new requests: the pool is there, and the weights are the caller's."""
        self._ready()
        check_shared(self.module, self._identity)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._core.has_work

    def step(self) -> list[tuple[RolloutHandle, Rollout]]:
        """One iteration: plan, run, append. Returns the completions that ended, whoever submitted them.

        An error or an interrupt in it aborts every request, gives every block back and leaves the engine usable.
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
        self._watch.acknowledge()
        self.scheduler.set_policy_version(version)

    def weights_updated(self, running: WhileRunning = "refuse") -> None:
        """The shared weights changed in place: from now on rollouts carry the next policy_version. Moves no bytes.

        KV of earlier versions cannot be found any more. Requests that wait run under the new weights. If some have
        begun: "refuse" raises, "abort" ends them; "drain" is refused, since their weights are gone (drain() before).
        """
        self._open()
        self._core.refuse_nesting()
        check_shared(self.module, self._identity)
        if running == "drain" and self.scheduler.has_begun:
            raise RolloutError('running="drain": the old weights are gone already; call drain() before changing them')
        self._core.settle(running, self.step)
        self.policy_version += 1

    def update_weights(self, tensors: Mapping[str, Tensor], running: WhileRunning = "refuse") -> None:
        """Copy new weights, by state-dict name, into the tensors that the engine reads (the caller's, if it shares).

        All or nothing: names and shapes are checked first. `running`: what to do with requests that have begun;
        "drain" lets them end under the old weights.
        """
        self._open()
        copies = check_update(self.module, tensors)
        self._core.settle(running, self.step)
        with torch.no_grad():
            for target, given in copies.items():
                target.copy_(given)
        self.policy_version += 1

    def drain(self) -> None:
        """Step until every request that has begun has ended; those that wait stay where they are."""
        self._core.drain(self.step)

    def _notice_changed_weights(self) -> None:
        """Somebody changed the weights without a word: count it as an update, unless requests have begun."""
        begun = self.scheduler.has_begun
        # a look at the values costs a little, so it is taken only before a first request, and if KV could be stale
        if not self._watch.changed(look=not begun and bool(self.pool.cache)):
            return
        if begun:
            raise RolloutError("the weights changed while requests were running; they have been aborted")
        self.policy_version += 1

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
        if self._open().cache.released:
            self._open().cache.restore()

    def training_view(self, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
        """The module that a loss runs through to see this engine's log-probs bit for bit; same parameters."""
        return training_view(self.module, exact=self.exact, gradient_checkpointing=gradient_checkpointing)

    def stats(self) -> EngineStats:
        """Sizes, gauges, peaks and counters of now."""
        pool = self._runner.cache if self._runner is not None else None
        return collect(
            self.scheduler,
            self._core.meter,
            pool_bytes=0 if pool is None or pool.released else pool.num_bytes,
            num_waiting=self._core.num_waiting,
            exact=self.exact,
            exact_reason=self.exact_reason,
        )

    def close(self) -> None:
        """Free the KV pool and the view. Closing twice is fine; generating afterwards is an error."""
        self._core.abort_all()
        self._core.runner = self._runner = None  # type: ignore[assignment]

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
