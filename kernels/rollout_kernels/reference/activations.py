"""Elementwise functions whose bits do not depend on the tensor's size or on the number of threads.

torch cuts an elementwise operation into one share per thread and computes the last few elements of each share, those
that fill no vector, in scalar code that rounds otherwise. So an element's bits would depend on where it lies. Here
every share is made of whole vectors. Elsewhere than on a CPU that is not needed and changes nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollout_kernels.shapes import round_up

_GRAIN = 32768
"""torch leaves this many elements, and fewer, to one thread."""
_VECTORS = 64
"""A multiple of what any instruction set computes in one turn: two vectors of 32 bf16."""


def in_whole_vectors(op: Callable[[Tensor, Tensor], object], x: Tensor, out: Tensor) -> None:
    """op(x, out) for contiguous x and out of one shape, in pieces whose shares are whole vectors; out may be x."""
    flat, result = x.view(-1), out.view(-1)
    size = flat.numel()
    head = _whole_shares(size)
    if head:
        op(flat[:head], result[:head])
    if head < size:
        rest = flat.new_zeros(round_up(size - head, _VECTORS))
        rest[: size - head] = flat[head:]
        op(rest, rest)
        result[head:] = rest[: size - head]


def _whole_shares(size: int) -> int:
    """How many leading elements torch would cut into shares of whole vectors, by its rule of one share per grain."""
    shares = min(torch.get_num_threads(), -(-size // _GRAIN))
    while shares:
        head = size // (_VECTORS * shares) * _VECTORS * shares
        of_head = min(torch.get_num_threads(), -(-head // _GRAIN))
        if of_head == shares:
            return head
        shares = of_head
    return 0


def exp2_(x: Tensor) -> Tensor:
    """2 ** x in place, for contiguous x of any shape. On a CPU four times as fast as torch.exp."""
    in_whole_vectors(lambda piece, target: torch.exp2(piece, out=target), x, x)
    return x


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        in_whole_vectors(lambda piece, target: torch.ops.aten.silu.out(piece, out=target), x.contiguous(), out)
        return out

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
