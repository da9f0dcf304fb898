"""The engine: prompts in, groups of completions out, over the caller's own weights."""

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.config import RolloutConfig, SamplingParams
from rollout.engine.calls import Call, OnGroup
from rollout.engine.exactness import decide_numerics
from rollout.engine.handles import RolloutHandle
from rollout.engine.loop import EngineCore, WhileRunning
from rollout.engine.prompts import Prompt
from rollout.engine.requests import Limits, OnError, RequestOptions, make_requests
from rollout.engine.stats import EngineStats, collect
from rollout.engine.steering import fork
from rollout.errors import RolloutError
from rollout.forward.runner import ModelRunner
from rollout.forward.sampler import TRAIN
from rollout.memory.device import device_bytes, pool_size
from rollout.model.kv_cache import KVCache, layer_groups
from rollout.model.loading import longest_sequence, open_model
from rollout.model.tokenizers import end_token_ids
from rollout.model.views import Views
from rollout.model.weights import WeightWatch, check_update
from rollout.schedule.block_pool import BlockPool
from rollout.schedule.scheduler import Scheduler
from rollout.torch_state import own_torch_state
from rollout.types import Rollout, RolloutGroup
from rollout_kernels.pace import warn_if_slow

logger = logging.getLogger(__name__)

_BAR_DELAY = 5.0  # seconds before a progress bar shows


class RolloutEngine:
    """Generates groups of rollouts from a model directory or from the caller's module.

    A module is read through a view, and only use_adapter() changes it; after its weights changed in place, call
    weights_updated(). Any thread may call anything: steps, forks, new weights, releases and close() happen one at a
    time, in the order in which they were asked for, and what a request brings goes to whoever made it. The caller's
    autocast, inference mode, default device and dtype, and later numbers of threads, change nothing. close() it.
    """

    @own_torch_state()
    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: RolloutConfig | None = None,
    ) -> None:
        self.config = config = config or RolloutConfig()
        self.module, self.tokenizer = open_model(model, tokenizer, config)
        self.device, self.dtype = self.module.device, self.module.dtype
        self.max_model_len = longest_sequence(config, self.module.config)
        self.end_token_ids = end_token_ids(self.module, self.tokenizer)
        self.layer_groups = layer_groups(self.module.config, self.dtype)
        (self.layer_group,) = self.layer_groups
        num_blocks = pool_size(config, self.layer_groups, self.max_model_len, device_bytes(self.device))
        self._limits = Limits(self.module.config.vocab_size, self.max_model_len, num_blocks, config.block_size)
        self.numerics = decide_numerics(self.module, self.layer_group, config, self.max_model_len)
        self.pool = BlockPool(num_blocks, config.block_size)
        sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.prefill_chunk_size)
        self.scheduler = Scheduler(self.pool, *sizes, prefix_cache=config.prefix_cache)
        self._warned = False
        self._views = Views(self.module)
        warn_if_slow(self.numerics.ops, self.device, self.dtype, self.numerics.num_threads)
        cache = KVCache(self.layer_group, num_blocks, config.block_size, self.device)
        runner = ModelRunner(self._views.rollout(self.numerics), cache, config.max_num_seqs, self._limits.max_len)
        watch, special = WeightWatch(self.module), config.skip_special_tokens
        self._core = EngineCore(self.scheduler, runner, watch, self.tokenizer, self.end_token_ids, special)

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
        on_group: OnGroup | None = None,
    ) -> list[RolloutGroup]:
        """n completions of each prompt: groups in prompt order, rollouts in index order.

        A completion depends on the weights, its prompt's ids, its sampling parameters (seed included), `step`, its
        key, its index and `purpose`, and on nothing else. keys: one per prompt, 0 .. 2**32 - 1; None: the prompt's
        place in this call. salt: prompts share cached KV only with those of the same salt. Raises RolloutError before
        any work if an input is bad; with on_error="return" a bad prompt (not a bad option) gets a group with `error`
        and one rollout of finish_reason "error". progress: show a bar; None: in a long call on a terminal. on_group is
        told (place of the prompt, group) when a prompt's last completion has ended.
        """
        call = self._call(prompts, n, sampling, RequestOptions(step, keys, purpose, salt, on_error))
        hidden = None if progress is None else not progress
        with tqdm(total=call.num_rollouts, unit="rollout", delay=_BAR_DELAY, disable=hidden, leave=False) as bar:
            for _ in call.rollouts(on_group):
                bar.update()
        return [entry.group() for entry in call.entries]

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

        Inputs are checked at once. Dropping the iterator aborts what is left of its own and gives the blocks back. Any
        number of iterators and calls may be in progress, nested or in threads: each gets its own, as without company.
        """
        return self._call(prompts, n, sampling, RequestOptions(step, keys, purpose, salt, on_error)).rollouts()

    def _call(
        self,
        prompts: Seq[Prompt],
        n: int,
        sampling: SamplingParams | Seq[SamplingParams] | None,
        options: RequestOptions,
    ) -> Call:
        """Everything is checked; nothing is submitted yet."""
        self._core.ready()
        self._views.check()
        requests = make_requests(prompts, n, sampling, options, self.tokenizer, self._limits)
        shortage = self._limits.shortage(requests)
        if shortage and not self._warned:
            self._warned = True
            logger.warning("%s", shortage)
        return Call(self._core, requests)

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
        (handle,) = self._call([prompt], n, sampling, RequestOptions(step, [key], purpose, salt)).entries
        assert isinstance(handle, RolloutHandle)
        self._core.submit([handle])
        return handle

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._core.has_work

    def step(self) -> list[tuple[RolloutHandle, Rollout]]:
        """One iteration: plan, run, append. Waits while another thread steps or changes something.

        What happens goes to the handles and iterators that it belongs to. Returns, for convenience, all completions
        that ended in this very step. An error or an interrupt in it ends every request, gives every block back and
        leaves the engine usable; owners of requests, in whatever thread, get a RolloutError with it as the cause, and
        so does whoever calls it inside a step (in a hook of the model).
        """
        return self._core.step()

    def abort(self, handle: RolloutHandle) -> None:
        """Stop a request, from any thread, without waiting: by the end of a step that runs its blocks are free.

        Its completions that have not ended end with "abort" and what they have drawn so far, begun or not.
        """
        handle.check_owner(self._core.turns)
        self._core.abort(handle)

    def fork(
        self, handle: RolloutHandle, index: int, sampling: SamplingParams | None = None, *, key: int | None = None
    ) -> RolloutHandle:
        """Fork a running completion where it stands, between steps; the fork goes on by itself.

        It shares every block until either writes to it. Its completion holds what the parent had drawn; `sampling`
        (None: the parent's; max_new_tokens counts from the prompt on) and `key` (None: the parent's) govern what comes.
        A request's forks, and theirs, have rollout indices n, n + 1, ..., which their random numbers depend on.
        """
        return fork(self._core, handle, index, sampling, key, self._limits.max_len)

    # -- weights and state --------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """How often the weights have changed; every rollout carries the version that made it."""
        return self.scheduler.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        with self._core.turn():
            self._core.watch.check_version(version, self.policy_version)
            self._core.set_policy_version(version)

    def weights_updated(self, running: WhileRunning = "refuse") -> None:
        """The shared weights changed in place: from now on rollouts carry the next policy_version. Moves no bytes.

        KV of earlier versions cannot be found any more. Requests that wait run under the new weights. If some have
        begun: "refuse" raises, "abort" ends them; "drain" is refused, since their weights are gone (drain() before).
        A write by an optimizer or a torch operation while requests have begun, or another thread steps, is noticed
        after and before every step, and ends them with an error. update_weights() waits for its turn instead.
        """
        with self._core.turn():
            self._core.opened()
            self._core.watch.refuse_mixed()
            self._views.check()
            if running == "drain" and self.scheduler.has_begun:
                raise RolloutError(
                    'running="drain": the old weights are gone already; call drain() before changing them'
                )
            self._core.settle(running)
            self._core.set_policy_version(self.policy_version + 1)

    @own_torch_state()
    def update_weights(self, tensors: Mapping[str, Tensor], running: WhileRunning = "refuse") -> None:
        """Copy new weights, by state-dict name, into the tensors that the engine reads (the caller's, if it shares).

        From any thread. All or nothing: names, shapes and values are checked first. After an interrupt in the copying,
        requests are refused until an update has succeeded. `running`: "drain" lets those that have begun end before it.
        """
        with self._core.turn():
            self._core.opened()
            copies = check_update(self.module, tensors)
            self._core.settle(running)
            self._core.watch.replace(copies)
            self._core.set_policy_version(self.policy_version + 1)

    def use_adapter(self, name: str | None, running: WhileRunning = "refuse") -> None:
        """Compute with the module's adapter of this name alone, or, None, without any: a weight change like others.

        Module and views follow; requires_grad stays. Adapters are peft's, injected before the engine was made.
        `running`: as in update_weights().
        """
        with self._core.turn():
            self._core.opened()
            self._views.check_adapter(name)
            self._core.settle(running)
            self._views.switch_adapter(name)
            self._core.set_policy_version(self.policy_version + 1)

    def drain(self) -> None:
        """Step until every request that has begun has ended; those that wait stay where they are."""
        with self._core.turn():
            self._core.drain()

    def release_memory(self) -> int:
        """Free the KV pool (on a CPU, to the system); returns its bytes."""
        with self._core.turn():
            cache = self._core.ready().cache
            if self.scheduler.has_begun:
                raise RolloutError("requests are running on the KV pool: end them before release_memory()")
            self.pool.forget_cached()
            cache.release()
            return cache.num_bytes

    def restore_memory(self) -> None:
        """Allocate the KV pool again after release_memory()."""
        with self._core.turn():
            self._core.opened().cache.restore()

    @own_torch_state()
    def training_view(self, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
        """The module that a loss runs through to see this engine's log-probs bit for bit; same parameters."""
        return self._views.training(self.numerics, gradient_checkpointing=gradient_checkpointing)

    def fall_back(self, reason: str) -> None:
        """From now on generator and trainer are not taken to agree in every bit."""
        with self._core.turn():
            self.numerics = self._core.opened().view.numerics = self.numerics.judged(False, reason)

    def stats(self) -> EngineStats:
        """Sizes, gauges, peaks and counters of now."""
        core = self._core
        return collect(self.scheduler, core.meter, self.numerics, core.runner, core.num_waiting)

    def close(self) -> None:
        """Free the KV pool and the view, once or twice; calls and iterators in other threads end with an error."""
        with self._core.turn():
            self._core.close()

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
