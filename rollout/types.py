"""What the engine returns."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt."""

    index: int
    """Place in its group, 0 .. n - 1."""
    completion_ids: list[int]
    """Sampled ids, and forced ones where tokens were put between them; a completion that ended at an end token contains
    it. The only truth: text is derived from it."""
    logprobs: list[float]
    """Per id, the log-prob it was drawn with (fp32): temperature applied, over the tokens that sampling kept. The
    completion's exact behaviour policy. Greedy ones are scored at temperature 1. A forced id, which was not drawn, has
    0.0."""
    raw_logprobs: list[float]
    """Per id, the log-prob at temperature 1 over the whole vocabulary (fp32); 0.0 for a forced id."""
    text: str | None
    """Completion as text, without special tokens unless skip_special_tokens is off; None if there is no tokenizer."""
    finish_reason: FinishReason
    """"stop" (an end token), "length" (max_new_tokens, the model's or the pool's length), "abort" or "error"."""
    policy_version: int
    """Weight version that made it, every token of it: the number of weight changes before."""
    loss_mask: list[bool] = field(default_factory=list)
    """Per id, whether it counts in a loss: True for sampled ids, False for forced ones. Left out: all count."""

    def __post_init__(self) -> None:
        if not self.loss_mask:
            object.__setattr__(self, "loss_mask", [True] * len(self.completion_ids))


@dataclass(frozen=True)
class TokenEvent:
    """A completion has drawn a token, or has been given one."""

    index: int
    """The completion's place in its group."""
    place: int
    """The token's place in the completion, from 0."""
    token_id: int
    logprob: float
    """As in Rollout.logprobs."""
    raw_logprob: float
    loss_mask: bool = True
    """As in Rollout.loss_mask: False for a forced token."""


Event = TokenEvent | Rollout
"""What happens to a request: a token drawn or forced, or a completion ended."""


@dataclass(frozen=True)
class RolloutGroup:
    """All completions of one prompt."""

    prompt_ids: list[int]
    rollouts: list[Rollout]
    """In index order; n of them, or one with finish_reason "error"."""
    key: int
    """Prompt key its random numbers came from."""
    seed: int
    """Seed its random numbers came from."""
    error: str | None = field(default=None)
    """What was wrong with the prompt, if on_error="return" let the others run."""
