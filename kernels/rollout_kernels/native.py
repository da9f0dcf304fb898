"""Compiled CPU kernels: built on first use with the machine's C++ compiler, kept in a cache, called through ctypes.

Without a compiler the torch operations do the same work, slower, and a warning says so. `COWROLL_KERNELS=torch` chooses
them; whatever is chosen holds for the process, since the two round otherwise.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rollout_kernels.plan import AttentionPlan

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("cpu")
_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-fopenmp", "-fPIC"]


class _Attention(ctypes.Structure):
    """The arguments of segment attention, as cpu/attention.h has them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "lse", "states", "grad_out", "delta")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_keys", "grad_values")),
        *((name, ctypes.c_void_p) for name in ("rows", "lengths", "units", "spans")),
        *((name, ctypes.c_int64) for name in ("num_spans", "num_first", "heads", "kv_heads", "dim", "unit")),
        *((name, ctypes.c_int64) for name in ("head_stride", "window", "num_threads", "bf16")),
        ("scale", ctypes.c_float),
    ]


_ARGUMENTS = {
    "segment_attention": [ctypes.POINTER(_Attention)],
    "segment_attention_backward": [ctypes.POINTER(_Attention)],
    # x, weight, bias, out, rows, columns, depth, whether the weight is [depth, columns], threads, whether bf16
    "linear": [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 3,
    # x, weight, out, rows, columns, eps, threads, whether bf16
    "row_rms_norm": [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float] + [ctypes.c_int] * 2,
    # gate, up, out, elements, threads, whether bf16
    "gated_silu": [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_int] * 2,
    # keys, values, their pools, rows, how many rows, bytes of a row
    "write_rows": [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2,
}


def cache_directory() -> Path:
    """Where what was made here is kept, kernels and models: $COWROLL_CACHE, else ~/.cache/cowroll."""
    return Path(os.environ.get("COWROLL_CACHE") or Path.home() / ".cache" / "cowroll")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where torch operations are to do their work."""
    wanted = os.environ.get("COWROLL_KERNELS", "native")
    if wanted not in ("native", "torch"):
        raise ValueError(f"COWROLL_KERNELS={wanted!r}: set it to native or torch, or leave it out")
    if wanted == "torch" or platform.system() != "Linux":
        return None
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        logger.warning(
            "no C++ compiler (%s; CXX names another): the model runs in torch operations, which takes longer",
            compiler[0],
        )
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home directory
        output = getattr(error, "stderr", "") or ""
        logger.warning(
            "the kernels could not be built, so the model runs in torch operations, which takes longer: %s\n%s",
            error,
            output,
        )
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


def identity() -> str:
    """What computes on this CPU, by which results may differ in bits: "torch", or the name of the compiled kernels."""
    loaded = library()
    return "torch" if loaded is None else Path(loaded._name).stem


def kernels() -> ctypes.CDLL:
    """The compiled kernels, where `supports` says that they are there."""
    loaded = library()
    assert loaded is not None
    return loaded


def _built(compiler: list[str]) -> Path:
    """Path of the compiled library for this source, compiler and kind of CPU; compiled if it is not there yet."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256(
        "\0".join((*texts, *_FLAGS, *compiler, version, cpu, platform.machine())).encode()
    ).hexdigest()[:16]
    target = cache_directory() / "kernels" / f"{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # under another name first: several processes may build at once
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:

            def run(*arguments: str | Path) -> None:
                subprocess.run([*compiler, *arguments], cwd=scratch, capture_output=True, text=True, check=True)

            run(*_FLAGS, "-c", *sources)
            # linked without OpenMP's library: its symbols are those of the one that torch has loaded, so that there is
            # one pool of threads and not two
            run("-shared", "-o", target.name, *(f"{path.stem}.o" for path in sources))
            linked = Path(scratch) / target.name
            ctypes.CDLL(str(linked))  # what cannot be loaded is not kept
            linked.replace(target)
    return target


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
    return kind == "cpu" and dtype in (torch.float32, torch.bfloat16) and library() is not None


def _call(kernel: str, plan: AttentionPlan, scale: float, window: int | None, **tensors: Tensor) -> None:
    q, tables, layout = tensors["q"], plan.tables, plan.layout
    if q.is_meta:
        return
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    arguments = _Attention(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        rows=tables.rows.ctypes.data,
        lengths=tables.lengths.ctypes.data,
        units=tables.units.ctypes.data,
        spans=tables.spans.ctypes.data,
        num_spans=len(tables.spans),
        num_first=tables.num_first,
        heads=q.shape[1],
        kv_heads=layout.num_kv_heads,
        dim=q.shape[2],
        unit=layout.unit,
        head_stride=layout.head_stride,
        window=window or 0,
        num_threads=torch.get_num_threads(),
        bf16=q.dtype == torch.bfloat16,
        scale=scale,
    )
    getattr(kernels(), kernel)(ctypes.byref(arguments))


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over flat k and v [units, unit, D], all contiguous.

    Returns out [T, H, D] and the log-sum-exp [T, H] in units of ln 2, fp32.
    """
    num_rows, heads, dim = q.shape
    out, lse = torch.zeros_like(q), q.new_full((num_rows, heads), -torch.inf, dtype=torch.float32)
    chained = plan.tables.num_first < len(plan.tables.spans)
    states = q.new_empty(num_rows if chained else 0, heads, dim + 17, dtype=torch.float32)
    _call("segment_attention", plan, scale, window, q=q, keys=k, values=v, out=out, lse=lse, states=states)
    return out, lse


def segment_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in fp32, from what `segment_attention` took and gave; the same bits for any threads."""
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    tensors = {"q": q, "keys": k, "values": v, "lse": lse, "grad_out": grad_out}
    tensors |= {"delta": (grad_out.float() * out.float()).sum(-1)}
    tensors |= dict(zip(("grad_q", "grad_keys", "grad_values"), grads, strict=True))
    _call("segment_attention_backward", plan, scale, window, **tensors)
    return grads[0], grads[1], grads[2]
