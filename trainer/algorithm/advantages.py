"""Advantages: what a rollout's reward is worth beside others', in fp64 statistics that are exact where it matters.

G groups of n rollouts. `scored` says which rollouts have a reward; the others are in no mean and have advantage 0.
"""

import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""(rewards fp64 [G, n], scored bool [G, n]) -> advantages fp32 [G, n]."""

_EPSILON = 1e-4


def group_advantages(rewards: Tensor, scored: Tensor, *, scale: str = "group") -> Tensor:
    """A reward's distance from its group's mean (GRPO, arXiv 2402.03300).

    scale: "group" divides by the group's standard deviation (n - 1 in the denominator) plus 1e-4, "batch" by that of
    all rewards, "none" by nothing (Dr. GRPO, arXiv 2503.20783). Statistics are exactly those of the given values,
    whatever their offset, and a group of equal rewards gets exact zeros, as does a rollout without another one.
    """
    return _by_group(rewards, scored, lambda values, i: values[i] - statistics.mean(values), scale)


def leave_one_out_advantages(rewards: Tensor, scored: Tensor, *, scale: str = "none") -> Tensor:
    """A reward's distance from the mean of the others of its group (RLOO, arXiv 2402.14740)."""

    def distance(values: Sequence[Fraction], i: int) -> Fraction:
        return values[i] - (sum(values) - values[i]) / (len(values) - 1)

    return _by_group(rewards, scored, distance, scale)


def batch_advantages(rewards: Tensor, scored: Tensor, *, scale: str = "none") -> Tensor:
    """A reward's distance from the mean of all rewards of the step (REINFORCE with a baseline, Williams 1992)."""
    values = [Fraction(value) for value in rewards[scored].tolist()]
    mean = statistics.mean(values) if values else Fraction(0)
    divisors = _divisors(rewards, scored, scale)
    out = [
        [float(Fraction(reward) - mean) / divisor if counts else 0.0 for reward, counts in zip(*group, strict=True)]
        for *group, divisor in zip(rewards.tolist(), scored.tolist(), divisors, strict=True)
    ]
    return torch.tensor(out, dtype=torch.float32).view(rewards.shape)


def plain_rewards(rewards: Tensor, scored: Tensor, *, scale: str = "none") -> Tensor:
    """The rewards themselves (REINFORCE++, arXiv 2501.03262, which whitens them over the step's tokens)."""
    divisors = torch.tensor(_divisors(rewards, scored, scale), dtype=torch.float64)
    return torch.where(scored, rewards / divisors[:, None], 0.0).float()


BASELINES: dict[str, Callable[..., Tensor]] = {
    "group": group_advantages,
    "leave_one_out": leave_one_out_advantages,
    "batch": batch_advantages,
    "none": plain_rewards,
}


def equal_groups(rewards: Tensor, scored: Tensor) -> Tensor:
    """bool [G]: groups whose scored rollouts all have the very same reward, so that they teach nothing."""
    pairs = zip(rewards.tolist(), scored.tolist(), strict=True)
    return torch.tensor([len({r for r, s in zip(*pair, strict=True) if s}) < 2 for pair in pairs], dtype=torch.bool)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / (std + 1e-8) over the mask, in fp64 [T]; 0 elsewhere, and where all are equal."""
    values = values.double()
    chosen = values[mask]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return torch.where(mask, (values - chosen.mean()) / (chosen.std() + 1e-8), 0.0)


def _by_group(
    rewards: Tensor, scored: Tensor, distance: Callable[[Sequence[Fraction], int], Fraction], scale: str
) -> Tensor:
    out = []
    for group, counts, divisor in zip(
        rewards.tolist(), scored.tolist(), _divisors(rewards, scored, scale), strict=True
    ):
        values = [Fraction(value) for value, s in zip(group, counts, strict=True) if s]
        teaches = len(set(values)) > 1
        places = iter(range(len(values)))
        out.append([float(distance(values, next(places))) / divisor if s and teaches else 0.0 for s in counts])
    return torch.tensor(out, dtype=torch.float32).view(rewards.shape)


def _divisors(rewards: Tensor, scored: Tensor, scale: str) -> list[float]:
    """What each group's distances are divided by."""

    def deviation(values: list[float]) -> float:
        exact = [Fraction(value) for value in values]
        return float(statistics.stdev(exact)) + _EPSILON if len(set(exact)) > 1 else 1.0

    if scale == "batch":
        return [deviation(rewards[scored].tolist())] * len(rewards)
    if scale == "group":
        return [deviation(group[s].tolist()) for group, s in zip(rewards, scored, strict=True)]
    return [1.0] * len(rewards)
