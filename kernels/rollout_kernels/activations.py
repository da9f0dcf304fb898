"""Activations whose bits do not depend on the tensor's size or on the number of threads.

torch's vectorised SiLU computes the last few elements of every thread's share in scalar code that rounds otherwise, so
an element's bits depend on where it lies. The forms here are made of operations that round alike everywhere.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        z = x.float()
        return (z / (z.neg().exp_().add_(1.0))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        z = x.float()
        sigmoid = z.neg().exp_().add_(1.0).reciprocal_()
        grad: Tensor = (grads[0].float() * sigmoid * (1.0 + z * (1.0 - sigmoid))).to(x.dtype)
        return grad


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), computed in fp32 and rounded once to x's dtype. Any shape."""
    out: Tensor = _SiLU.apply(x)  # type: ignore[no-untyped-call]
    return out


class SiLU(nn.Module):
    """Module form of `silu`, to stand in for a model's own activation."""

    def forward(self, x: Tensor) -> Tensor:
        return silu(x)
