"""Advantages from rewards."""

import statistics
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

_EPSILON = 1e-4


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """GRPO (arXiv 2402.03300): a reward's distance from its group's mean.

    rewards: fp64 [groups, n]. scale "group" divides by the group's standard deviation (n - 1 in the denominator) plus
    1e-4; "none" does not (arXiv 2503.20783). Mean and deviation are exactly those of the given values, whatever their
    offset, and a group of equal rewards gets exact zeros. Returns fp32 [groups, n], rounded at the end.
    """
    advantages = [_advantages(group, scale) for group in rewards.tolist()]
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device).view(rewards.shape)


def _advantages(group: Sequence[float], scale: str) -> list[float]:
    values = [Fraction(value) for value in group]
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean = statistics.mean(values)
    divisor = float(statistics.stdev(values)) + _EPSILON if scale == "group" else 1.0
    return [float(value - mean) / divisor for value in values]
