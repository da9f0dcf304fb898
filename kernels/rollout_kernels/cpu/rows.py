"""Row norms, gated activations, KV writes and draws through compiled kernels.

A row's bits depend on that row only, not on the tensor's size or the number of threads. Norms and activations are
differentiable, and keep only their inputs for the backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_kernels.cpu.library import check_alike, launch


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    check_alike(x, weight)
    assert weight.shape == (dim,)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    sizes = x.numel() // dim, dim, eps, torch.get_num_threads(), x.dtype == torch.bfloat16
    launch("row_rms_norm", out, x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normal = wide.mul_(inverse) if x.dtype != torch.float32 else wide * inverse
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grads[0] * normal.to(x.dtype)).reshape(-1, len(weight)).sum(0)
        grad = grads[0].float() * weight.float()
        along = (grad * normal).mean(-1, keepdim=True)
        return (grad - normal * along).mul_(inverse).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)) for x [..., D] and weight [D] of one dtype, to which the quotient is rounded first."""
    if not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    check_alike(gate, up)
    assert gate.shape == up.shape
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    sizes = gate.numel(), torch.get_num_threads(), gate.dtype == torch.bfloat16
    launch("gated_silu", out, gate.data_ptr(), up.data_ptr(), out.data_ptr(), *sizes)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        z, grad = gate.float(), grads[0].float()
        sigmoid = z.sigmoid()
        silu = z * sigmoid
        grad_up = (grad * silu).to(up.dtype)
        # the derivative of silu: sigmoid + silu * (1 - sigmoid)
        slope = silu.mul_(1.0 - sigmoid).add_(sigmoid)
        return (grad * up.float()).mul_(slope).to(gate.dtype), grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for tensors of one shape and dtype, to which silu(gate) is rounded first."""
    if not torch.is_grad_enabled():
        return _swiglu(gate, up)
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def write_rows(keys: Tensor, values: Tensor, key_pool: Tensor, value_pool: Tensor, rows: Tensor) -> None:
    """Rows of keys and values [R, D] go to `rows` [R] (int64) of contiguous pools [N, D], of one dtype."""
    check_alike(keys, values)
    check_alike(key_pool, value_pool)
    check_alike(keys, key_pool)
    assert keys.shape == values.shape == (len(rows), key_pool.shape[1])
    assert key_pool.is_contiguous() and value_pool.is_contiguous()  # noqa: PT018
    assert rows.dtype == torch.int64
    assert rows.device == keys.device
    keys, values, rows = keys.contiguous(), values.contiguous(), rows.contiguous()
    places = [x.data_ptr() for x in (keys, values, key_pool, value_pool, rows)]
    launch("write_rows", keys, *places, len(rows), keys.shape[1] * keys.element_size())


def draw_tokens(z: Tensor, uniform: Tensor) -> Tensor:
    """What the reference draws from z [R, V] in fp32 and uniform [R] in fp64: int64 [R]."""
    z, uniform = z.contiguous(), uniform.contiguous()
    rows, vocab = z.shape
    assert (z.dtype, uniform.dtype, uniform.shape) == (torch.float32, torch.float64, (rows,))
    assert z.device == uniform.device
    tokens = torch.empty(rows, dtype=torch.int64, device=z.device)
    places = z.data_ptr(), uniform.data_ptr(), tokens.data_ptr()
    launch("draw_tokens", tokens, *places, rows, vocab, torch.get_num_threads())
    return tokens
