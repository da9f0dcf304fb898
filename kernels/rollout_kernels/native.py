"""Compiled CPU kernels: which there are, and attention through them.

Without a compiler the torch operations do the same work, slower, and a warning says so. COWROLL_KERNELS=torch chooses
them, COWROLL_KERNELS=native refuses to do without the kernels; CXX names the compiler, COWROLL_KERNELS_MARCH the target
instead of this very CPU. What is chosen holds for the process, since bits differ by it.
"""

import ctypes
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.cpu.bindings import Attention, Interface, bind
from rollout_kernels.cpu.build import load_library
from rollout_kernels.errors import RolloutError
from rollout_kernels.shapes import SEGMENT_SIZE

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels and what they say of themselves."""

    library: ctypes.CDLL
    interface: Interface

    @property
    def identity(self) -> str:
        """What was compiled from what, for which vectors."""
        pairs = "-bf16" if self.interface.bf16_pairs else ""
        return f"cpu{32 * self.interface.lanes}{pairs}-{Path(self.library._name).stem.partition('-')[0]}"


@cache
def compiled() -> Kernels | None:
    """The compiled kernels, or None where torch operations are to do their work.

    Raises RolloutError if a setting has a value that cannot be, or is "native" and the kernels cannot be built.
    """
    wanted = os.environ.get("COWROLL_KERNELS", "")
    if wanted not in ("", "native", "torch"):
        raise RolloutError(f"COWROLL_KERNELS={wanted!r}: set it to native or torch, or leave it out")
    if wanted == "torch":
        return None
    try:
        loaded = load_library()
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"the CPU's kernels could not be built: {error}\n{getattr(error, 'stderr', '') or ''}".rstrip()
        if wanted == "native":
            raise RolloutError(f"COWROLL_KERNELS=native, but {problem}") from error
        logger.warning("the model runs in torch operations, which takes longer, since %s", problem)
        return None
    return Kernels(loaded, bind(loaded))


def identity(device: torch.device) -> str:
    """What computes on a device, since bits may differ by it: its type, "torch", or the compiled kernels' identity."""
    if device.type != "cpu":
        return device.type
    found = compiled()
    return "torch" if found is None else found.identity


def _there() -> Kernels:
    found = compiled()
    assert found is not None
    return found


def kernels() -> ctypes.CDLL:
    """The compiled kernels' library, where `supports` says that it is there."""
    return _there().library


_meta_stands_for: ContextVar[str] = ContextVar("_meta_stands_for", default="cpu")


@contextmanager
def meta_stands_for(device: torch.device) -> Iterator[None]:
    """Within, what runs on the meta device takes the memory that it would take on `device`; without, on a CPU."""
    token = _meta_stands_for.set(device.type)
    try:
        yield
    finally:
        _meta_stands_for.reset(token)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled kernels are there for tensors of this kind."""
    kind = _meta_stands_for.get() if device.type == "meta" else device.type
    return kind == "cpu" and dtype in DTYPES and compiled() is not None


def _call(kernel: str, plan: AttentionPlan, scale: float, window: int | None, **tensors: Tensor) -> None:
    q, tables, layout = tensors["q"], plan.tables, plan.layout
    if q.is_meta:
        return
    assert all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors.values())
    assert q.dtype == tensors["keys"].dtype == tensors["values"].dtype
    assert q.shape[2] % 16 == 0 == SEGMENT_SIZE % layout.unit
    assert q.shape[1] == layout.num_kv_heads * layout.num_groups
    arguments = plan.arguments
    if arguments is None:
        arguments = plan.arguments = Attention(
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
    for name, tensor in tensors.items():
        setattr(arguments, name, tensor.data_ptr())
    arguments.heads, arguments.dim = q.shape[1:]
    arguments.scale, arguments.window = scale, window or 0
    arguments.num_threads, arguments.bf16 = torch.get_num_threads(), q.dtype == torch.bfloat16
    getattr(kernels(), kernel)(ctypes.byref(arguments))


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over flat k and v [units, unit, D], all contiguous.

    Returns out [T, H, D] and the log-sum-exp [T, H] in units of ln 2, fp32.
    """
    num_rows, heads, dim = q.shape
    out, lse = torch.zeros_like(q), q.new_full((num_rows, heads), -torch.inf, dtype=torch.float32)
    state = dim + _there().interface.lanes + 1
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
    """Gradients of q, k and v in fp32, from what `segment_attention` took and gave; the same bits for any threads.

    delta: [T, H] fp32, sum over D of the output times its gradient.
    """
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    tensors = {"q": q, "keys": k, "values": v, "lse": lse, "grad_out": grad_out, "delta": delta}
    tensors |= dict(zip(("grad_q", "grad_keys", "grad_values"), grads, strict=True))
    _call("segment_attention_backward", plan, scale, window, **tensors)
    return grads[0], grads[1], grads[2]
