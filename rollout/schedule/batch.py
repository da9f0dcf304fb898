"""What the scheduler plans for one iteration, and what it counts."""

from dataclasses import dataclass, field

from rollout.schedule.block_pool import BlockCopy
from rollout.schedule.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count - 1 of a sequence, whose KV is to be computed."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether logits follow: all known tokens are computed after it."""
        return self.start + self.count == self.sequence.num_tokens


@dataclass
class ScheduledBatch:
    """One iteration: block copies, then a forward over chunks, then a draw for completed chunks and forks."""

    copies: list[BlockCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    """Completions that draw their first token from their prompt's stored logits."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.forks)


@dataclass
class SchedulerStats:
    """Counters since the engine started."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    forks: int = 0
    cow_copies: int = 0
    prefix_tokens_saved: int = 0
