"""Draws of tokens."""

import torch
from torch import Tensor


def draw_tokens(z: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of scaled logits z [R, V] in fp32, by inverse CDF from uniform [R] (fp64 in [0, 1)): int64 [R].

    Sums run in fp64, since fp32 ones leave tens of thousands of a large vocabulary's tokens unreachable. A token of
    probability 0 is never drawn.
    """
    probs = (z - z.amax(-1, keepdim=True)).exp().double()
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    # a product that rounds up to the total would point behind the last token
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # a row of nan points behind its end, too; its log-prob will tell
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_max_(z.shape[-1] - 1)
