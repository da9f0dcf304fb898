"""What the engine has to say of itself."""

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from weakref import WeakSet

import numpy as np

from rollout.forward.runner import ModelRunner
from rollout.model.numerics import Numerics
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Sequence

_LATENCIES_KEPT = 4096


@dataclass(frozen=True)
class EngineStats:
    """Sizes and gauges of now, peaks and latencies since the last call began, counters since the engine started.

    A call that begins while others are in progress shares their window: peaks and latencies are then of all of them,
    since the first of them began. Counters only grow, so that what a span of time brought is a difference.
    """

    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence holds; cached ones are free."""
    num_cached_blocks: int
    """Free blocks whose KV can still be found by its tokens."""
    block_size: int
    pool_bytes: int
    num_running: int
    num_waiting: int
    """Requests that have not begun, and sequences that were preempted."""
    peak_blocks_used: int
    peak_blocks_shared: int
    """Blocks held by two or more sequences at once."""
    peak_running: int
    peak_waiting: int
    """Longest queue of requests and preempted sequences."""
    kv_waste: float
    """Mean share of the slots in blocks in use that hold no token (the unfilled ends of last blocks), 0 to 1."""
    prompt_tokens: int
    completion_tokens: int
    forward_steps: int
    seconds: float
    """Time spent in steps."""
    preemptions: int
    recomputed_tokens: int
    forks: int
    cow_copies: int
    """Partly filled blocks copied because a fork had to write to them."""
    prefix_tokens_saved: int
    """Prompt tokens that forks did not have to prefill."""
    cache_queried_tokens: int
    cache_hit_tokens: int
    """Prompt tokens found in the prefix cache, of those looked up."""
    time_to_first_token: tuple[float, float]
    """Seconds from submission to a completion's first token: median and 99th percentile since the last call began."""
    time_per_token: tuple[float, float]
    """Seconds per further token of a completion: median and 99th percentile since the last call began."""
    policy_version: int
    exact: bool
    exact_reason: str

    @property
    def kv_cache_usage(self) -> float:
        """Peak share of the pool in use, 0 to 1."""
        return self.peak_blocks_used / self.num_blocks

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found, 0 to 1."""
        return self.cache_hit_tokens / self.cache_queried_tokens if self.cache_queried_tokens else 0.0


def _percentiles(values: deque[float]) -> tuple[float, float]:
    seen = values.copy()  # another thread may be stepping
    if not seen:
        return (0.0, 0.0)
    median, late = np.percentile(np.array(seen), [50, 99])
    return (float(median), float(late))


@dataclass
class Window:
    """Peaks, means and latencies from some moment on."""

    peak_used: int = 0
    peak_shared: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    _waste_sum: float = 0.0
    _waste_count: int = 0
    first: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES_KEPT))
    """Seconds from submission to the first token, of the last completions."""
    per_token: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES_KEPT))
    """Seconds per further token, of the last completions."""

    def planned(self, scheduler: Scheduler) -> None:
        pool = scheduler.pool
        used = pool.num_blocks - pool.num_free_blocks
        self.peak_used = max(self.peak_used, used)
        self.peak_shared = max(self.peak_shared, pool.num_shared_blocks)
        self.peak_running = max(self.peak_running, len(scheduler.running))
        self.peak_waiting = max(self.peak_waiting, len(scheduler.waiting) + len(scheduler.preempted))
        if used:
            unfilled = sum(max(0, len(s.table.blocks) * pool.block_size - s.num_tokens) for s in scheduler.running)
            self._waste_sum += unfilled / (used * pool.block_size)
            self._waste_count += 1

    @property
    def kv_waste(self) -> float:
        return self._waste_sum / self._waste_count if self._waste_count else 0.0


class Meter:
    """Observes the engine's steps: counters that only grow, and a window of the calls in progress."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.forward_steps = 0
        self.seconds = 0.0
        self.window = Window()
        self._calls: WeakSet[object] = WeakSet()
        self._lock = threading.RLock()

    def begin_call(self, call: object) -> None:
        """A call begins, in any thread, and with it a window, unless others are in progress: then it shares theirs."""
        with self._lock:
            if not self._calls:
                self.window = Window()
            self._calls.add(call)

    def end_call(self, call: object) -> None:
        """However it ended; one that is gone has ended, too."""
        with self._lock:
            self._calls.discard(call)

    def planned(self, scheduler: Scheduler) -> None:
        """An iteration has been planned; its blocks are allocated."""
        self.window.planned(scheduler)

    def drew(self, sequence: Sequence) -> None:
        """A sequence has drawn a token."""
        self.completion_tokens += 1
        if len(sequence.logprobs) == 1:
            sequence.first_token_at = time.perf_counter()
            self.window.first.append(sequence.first_token_at - sequence.request.submitted_at)

    def finished(self, sequence: Sequence) -> None:
        further = sum(sequence.loss_mask) - 1  # forced tokens take no steps of their own
        if further > 0:
            self.window.per_token.append((time.perf_counter() - sequence.first_token_at) / further)


def collect(
    scheduler: Scheduler, meter: Meter, numerics: Numerics, runner: ModelRunner | None, num_waiting: int
) -> EngineStats:
    """Everything that can be said of an engine now; one that is closed has no runner."""
    pool, window = scheduler.pool, meter.window
    return EngineStats(
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.cache.num_idle,
        block_size=pool.block_size,
        pool_bytes=0 if runner is None else runner.cache.held_bytes,
        num_running=len(scheduler.running),
        num_waiting=num_waiting,
        peak_blocks_used=window.peak_used,
        peak_blocks_shared=window.peak_shared,
        peak_running=window.peak_running,
        peak_waiting=window.peak_waiting,
        kv_waste=window.kv_waste,
        prompt_tokens=meter.prompt_tokens,
        completion_tokens=meter.completion_tokens,
        forward_steps=meter.forward_steps,
        seconds=meter.seconds,
        cache_queried_tokens=pool.cache.num_queried_tokens,
        cache_hit_tokens=pool.cache.num_hit_tokens,
        time_to_first_token=_percentiles(window.first),
        time_per_token=_percentiles(window.per_token),
        policy_version=scheduler.policy_version,
        exact=numerics.exact,
        exact_reason=numerics.reason,
        **asdict(scheduler.stats),
    )
