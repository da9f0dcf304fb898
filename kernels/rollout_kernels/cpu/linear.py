"""Linear layers through compiled kernels.

A row's bits depend on that row only, not on the tensor's size or the number of threads.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_kernels.cpu.library import check_alike, launch


def fits_linear(weight: Tensor) -> bool:
    """Whether `linear` takes a weight [N, K]: rows are a whole number of 32-bit words."""
    return weight.shape[1] * weight.element_size() % 4 == 0


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, plain: bool = False) -> Tensor:
    """x [..., K] times weight [N, K] transposed, or a plain weight [K, N], plus bias [N]."""
    depth, columns = weight.shape if plain else weight.shape[::-1]
    check_alike(x, weight)
    assert x.shape[-1] == depth
    assert depth * x.element_size() % 4 == 0
    x, weight = x.contiguous(), weight.contiguous()
    if bias is not None:
        check_alike(x, bias)
        bias = bias.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    places = [None if t is None else t.data_ptr() for t in (x, weight, bias, out)]
    sizes = x.numel() // depth, columns, depth
    launch("linear", out, *places, *sizes, plain, torch.get_num_threads(), x.dtype == torch.bfloat16)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # a frozen weight's gradient is not wanted, and x for nothing else
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # nothing here has to agree with the generator, and in bf16 torch is as fast
        product = partial(_product, plain=True) if weight.dtype == torch.float32 else torch.matmul
        grad_weight = None
        if needs_weight:  # a copy is made of what is transposed: of the smaller one
            rows = x.reshape(-1, weight.shape[1])
            grad_weight = product(grad.T, rows) if grad.shape[1] <= rows.shape[1] else product(rows.T, grad).T
        grad_x = product(grad, weight).view(*grads[0].shape[:-1], -1) if needs_x else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype; sums run in fp32."""
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out
