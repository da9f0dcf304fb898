"""Row norms."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)) for x [..., D] and weight [D] of one dtype, to which the quotient is rounded first.

    The mean of squares is taken in fp32 at least. Differentiable.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
