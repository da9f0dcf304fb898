"""Segment attention through compiled kernels."""

import ctypes

import torch
from torch import Tensor

from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.cpu.bindings import Attention
from rollout_kernels.cpu.library import check_alike, kernels, launch
from rollout_kernels.shapes import SEGMENT_SIZE


def _arguments(plan: AttentionPlan) -> Attention:
    """What is the same in every layer of a forward."""
    if plan.arguments is None:
        tables, layout = plan.tables, plan.layout
        plan.arguments = Attention(
            rows=tables.rows.ctypes.data,
            lengths=tables.lengths.ctypes.data,
            units=tables.units.ctypes.data,
            spans=tables.spans.ctypes.data,
            num_spans=len(tables.spans),
            num_first=tables.num_first,
            kv_heads=layout.num_kv_heads,
            unit=layout.unit,
            head_stride=layout.head_stride,
        )
    arguments = plan.arguments
    assert isinstance(arguments, Attention)
    return arguments


def _call(kernel: str, plan: AttentionPlan, scale: float, window: int | None, **tensors: Tensor) -> None:
    q, layout = tensors["q"], plan.layout
    check_alike(q, tensors["keys"])
    check_alike(q, tensors["values"])
    assert all(tensor.device == q.device and tensor.is_contiguous() for tensor in tensors.values())
    assert q.shape[2] % 16 == 0 == SEGMENT_SIZE % layout.unit
    assert q.shape[1] == layout.num_kv_heads * layout.num_groups
    arguments = _arguments(plan)
    for name, tensor in tensors.items():
        setattr(arguments, name, tensor.data_ptr())
    arguments.heads, arguments.dim = q.shape[1:]
    arguments.scale, arguments.window = scale, window or 0
    arguments.num_threads, arguments.bf16 = torch.get_num_threads(), q.dtype == torch.bfloat16
    launch(kernel, q, ctypes.byref(arguments))


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """As the reference's, for contiguous tensors; a row's bits depend on its query and its KV only."""
    num_rows, heads, dim = q.shape
    out, lse = torch.zeros_like(q), q.new_full((num_rows, heads), -torch.inf, dtype=torch.float32)
    state = dim + kernels().interface.lanes + 1
    states = q.new_empty(num_rows if plan.tables.chained else 0, heads, state, dtype=torch.float32)
    _call("segment_attention", plan, scale, window, q=q, keys=k, values=v, out=out, lse=lse, states=states)
    return out, lse


def segment_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's, for contiguous tensors; the same bits under any number of threads."""
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    tensors = {"q": q, "keys": k, "values": v, "lse": lse, "grad_out": grad_out, "delta": delta}
    tensors |= dict(zip(("grad_q", "grad_keys", "grad_values"), grads, strict=True))
    _call("segment_attention_backward", plan, scale, window, **tensors)
    return grads[0], grads[1], grads[2]
