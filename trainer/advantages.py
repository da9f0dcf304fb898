"""Advantages from rewards."""

import torch
from torch import Tensor

_EPSILON = 1e-4


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """GRPO (arXiv 2402.03300): a reward's distance from its group's mean.

    rewards: fp32 [groups, n]. scale "group" divides by the group's standard deviation (n - 1 in the denominator) plus
    1e-4; "none" does not (arXiv 2503.20783). A group of equal rewards gets exact zeros. Returns fp32 [groups, n].
    """
    if not rewards.numel():
        return rewards
    centred = rewards - rewards.mean(-1, keepdim=True)
    if scale == "group":
        centred = centred / (rewards.std(-1, keepdim=True) + _EPSILON)
    # in fp32 the mean of equal numbers may differ from them by a rounding error, which a tiny deviation would blow up
    equal = (rewards == rewards[:, :1]).all(-1, keepdim=True)
    return torch.where(equal, 0.0, centred)
