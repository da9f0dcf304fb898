"""Attention within one pack of training, differentiable, over whatever backend runs segment attention."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.ops import Ops


class _TrainingAttention(torch.autograd.Function):
    """Segment attention over the rows of one pack, whose backward recomputes from the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, ops: Ops, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
    ) -> Tensor:
        # each pack row of each kv head is a unit of one position
        flat_k, flat_v = k.reshape(-1, 1, k.shape[-1]), v.reshape(-1, 1, v.shape[-1])
        out, lse = ops.segment_attention(q, flat_k, flat_v, plan, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ops, ctx.plan, ctx.scale, ctx.window = ops, plan, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        delta = (grad_out.float() * out.float()).sum(-1)
        flat_k, flat_v = k.reshape(-1, 1, k.shape[-1]), v.reshape(-1, 1, v.shape[-1])
        given = q, flat_k, flat_v, lse, grad_out, delta, ctx.plan, ctx.scale, ctx.window
        grad_q, grad_k, grad_v = ctx.ops.segment_attention_backward(*given)
        gradients = grad_q.to(q.dtype), grad_k.view_as(k).to(k.dtype), grad_v.view_as(v).to(v.dtype)
        return None, *gradients, None, None, None


def training_attention(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Attention within one pack: q [T, H, D], k and v [K, T, D] (unit j * T + t is row t of kv head j).

    Differentiable. Same bits as decoding the same rows one by one. Returns [T, H, D].
    """
    out: Tensor = _TrainingAttention.apply(ops, q, k, v, plan, scale, window)  # type: ignore[no-untyped-call]
    return out
