"""What the engine has to say of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Sizes, and counters since the engine started; peaks are those of the last generate_rollouts call."""

    num_blocks: int
    num_free_blocks: int
    block_size: int
    pool_bytes: int
    peak_blocks_used: int
    peak_blocks_shared: int
    """Blocks held by two or more sequences at once."""
    peak_running: int
    prompt_tokens: int
    completion_tokens: int
    forward_steps: int
    seconds: float
    """Time spent generating."""
    preemptions: int
    recomputed_tokens: int
    forks: int
    cow_copies: int
    """Partly filled blocks copied because a fork had to write to them."""
    prefix_tokens_saved: int
    """Prompt tokens that forks did not have to prefill."""
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
