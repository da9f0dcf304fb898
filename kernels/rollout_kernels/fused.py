"""Linear layers, row norms, gated activations, KV writes and draws on a CPU with compiled kernels.

A row's bits depend on that row only, not on the tensor's size or the number of threads. Values are those of torch's
operations, within rounding. The first three are differentiable, and keep only their inputs for the backward.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_kernels.native import DTYPES, kernels, supports


def _check(x: Tensor, other: Tensor) -> None:
    # once for every operation of a step, so without a loop
    assert x.dtype in DTYPES and x.dtype == other.dtype, (x.dtype, other.dtype)  # noqa: PT018
    assert (x.is_cpu and other.is_cpu) or (x.is_meta and other.is_meta), (x.device, other.device)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    _check(x, weight)
    assert weight.shape == (dim,)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    if not x.is_meta:
        places = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        kernels().row_rms_norm(*places, x.numel() // dim, dim, eps, torch.get_num_threads(), x.dtype == torch.bfloat16)
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
    _check(gate, up)
    assert gate.shape == up.shape
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if not gate.is_meta:
        places = gate.data_ptr(), up.data_ptr(), out.data_ptr()
        kernels().gated_silu(*places, gate.numel(), torch.get_num_threads(), gate.dtype == torch.bfloat16)
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


def fits_linear(weight: Tensor) -> bool:
    """Whether `linear` takes a weight [N, K]: rows are a whole number of 32-bit words."""
    return weight.shape[1] * weight.element_size() % 4 == 0


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, plain: bool = False) -> Tensor:
    """x [..., K] times weight [N, K] transposed, or a plain weight [K, N], plus bias [N]."""
    depth, columns = weight.shape if plain else weight.shape[::-1]
    _check(x, weight)
    assert x.shape[-1] == depth
    assert depth * x.element_size() % 4 == 0
    x, weight = x.contiguous(), weight.contiguous()
    if bias is not None:
        _check(x, bias)
        bias = bias.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    if not x.is_meta:
        places = [None if t is None else t.data_ptr() for t in (x, weight, bias, out)]
        sizes = x.numel() // depth, columns, depth
        kernels().linear(*places, *sizes, plain, torch.get_num_threads(), x.dtype == torch.bfloat16)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, rows = grads[0].reshape(-1, len(weight)), x.reshape(-1, weight.shape[1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # nothing here has to agree with the generator, and in bf16 torch is as fast
        product = partial(_product, plain=True) if x.dtype == torch.float32 else torch.matmul
        grad_weight = None
        if needs_weight:  # a copy is made of what is transposed: of the smaller one
            grad_weight = product(grad.T, rows) if grad.shape[1] <= rows.shape[1] else product(rows.T, grad).T
        return product(grad, weight).view_as(x) if needs_x else None, grad_weight, grad.sum(0) if needs_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype; sums run in fp32."""
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def write_rows(keys: Tensor, values: Tensor, key_pool: Tensor, value_pool: Tensor, rows: Tensor) -> None:
    """Rows of keys and values [R, D] go to `rows` [R] (int64) of contiguous pools [N, D], of one dtype."""
    if not supports(keys.device, keys.dtype):
        key_pool.index_copy_(0, rows, keys)
        value_pool.index_copy_(0, rows, values)
    elif not keys.is_meta:
        _check(keys, values)
        _check(key_pool, value_pool)
        _check(keys, key_pool)
        assert keys.shape == values.shape == (len(rows), key_pool.shape[1])
        assert key_pool.is_contiguous() and value_pool.is_contiguous()  # noqa: PT018
        assert rows.dtype == torch.int64
        keys, values, rows = keys.contiguous(), values.contiguous(), rows.contiguous()
        places = [x.data_ptr() for x in (keys, values, key_pool, value_pool, rows)]
        kernels().write_rows(*places, len(rows), keys.shape[1] * keys.element_size())


def draw_tokens(z: Tensor, uniform: Tensor) -> Tensor:
    """What `logprobs.sample_inverse_cdf` draws, from z [R, V] in fp32 and uniform [R] in fp64: int64 [R]."""
    z, uniform = z.contiguous(), uniform.contiguous()
    rows, vocab = z.shape
    assert (z.dtype, uniform.dtype, uniform.shape) == (torch.float32, torch.float64, (rows,))
    tokens = torch.empty(rows, dtype=torch.int64, device=z.device)
    if not z.is_meta:
        places = z.data_ptr(), uniform.data_ptr(), tokens.data_ptr()
        kernels().draw_tokens(*places, rows, vocab, torch.get_num_threads())
    return tokens
