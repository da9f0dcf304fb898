"""Linear layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype. Differentiable."""
    return F.linear(x, weight, bias)


def fits_linear(weight: Tensor) -> bool:
    """Whether `linear` takes a weight [N, K]: any."""
    return True


def _narrow(x: Tensor, weight: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return F.linear(x.float(), weight.float()).to(x.dtype)
    finally:
        torch.set_num_threads(threads)


class _NarrowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _narrow(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        rows = grads[0].reshape(-1, len(weight))
        return (
            torch.matmul(grads[0], weight) if needs_x else None,
            torch.matmul(rows.T, x.reshape(-1, x.shape[-1])) if needs_weight else None,
        )


def narrow_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` for a weight [N, K] of few rows, such as an adapter's first matrix. Differentiable.

    Where N is small libraries split K among threads, and bf16 products split it by their size, so that a row's bits
    depend on the number of rows. One thread in fp32 does not, for row counts that are multiples of 16.
    """
    if not torch.is_grad_enabled():
        return _narrow(x, weight)
    out: Tensor = _NarrowLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out
