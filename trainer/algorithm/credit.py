"""From rewards of rollouts to advantages of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithm.advantages import AdvantageFunction, whiten
from trainer.algorithm.batch import StepTokens
from trainer.algorithm.ratios import log_ratio


def token_advantages(
    step: StepTokens,
    rewards: Tensor,
    scored: Tensor,
    baseline: AdvantageFunction,
    *,
    penalty: Callable[[Tensor], Tensor] | None = None,
    penalise: str = "reward",
    whitened: bool = False,
) -> Tensor:
    """Advantages fp32 [T] of rewards fp64 [groups, n], of which `scored` bool [groups, n] are there.

    penalty: of a token's log-ratio to the reference. penalise "reward" takes a rollout's sum of it from its reward
    before the baseline sees that (RLOO, arXiv 2402.14740); "return" takes from a token's advantage what it and those
    behind it are penalised by (REINFORCE++, arXiv 2501.03262). whitened: over all tokens that count.
    """
    penalties = None
    if penalty is not None:
        assert step.ref_logprobs is not None
        old = step.rollout_logprobs if step.old_logprobs is None else step.old_logprobs
        penalties = penalty(log_ratio(old, step.ref_logprobs, step.loss_mask)).double()
    if penalties is not None and penalise == "reward":
        rewards = rewards - _sums(step, penalties).view(rewards.shape)
    values = step.spread(baseline(rewards, scored)).double()
    if penalties is not None and penalise == "return":
        values = values - step.spread(_sums(step, penalties)) + _before(step, penalties)
    return (whiten(values, step.loss_mask) if whitened else values).float()


def _sums(step: StepTokens, values: Tensor) -> Tensor:
    """Of each rollout's tokens: fp64 [rollouts]."""
    places = torch.arange(len(step.lengths)).repeat_interleave(step.lengths)
    return torch.zeros(len(step.lengths), dtype=torch.float64).index_add_(0, places, values)


def _before(step: StepTokens, values: Tensor) -> Tensor:
    """Of the tokens before each in its rollout: fp64 [T]."""
    running = values.cumsum(0) - values
    firsts = torch.tensor(step.starts[:-1], dtype=torch.int64).clamp(max=max(len(values) - 1, 0))
    return running - running[firsts].repeat_interleave(step.lengths)
