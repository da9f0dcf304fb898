"""Compiled CPU kernels: built on first use with the machine's C++ compiler, kept in a cache, called through ctypes.

Without a compiler the torch operations do the same work, slower, and a warning says so. COWROLL_KERNELS=torch chooses
them, COWROLL_KERNELS=native refuses to do without the kernels; CXX names the compiler. What is chosen holds for the
process, since the two round otherwise.
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
from rollout_kernels.tiles import SEGMENT_SIZE

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
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
    # scaled logits, uniform numbers, tokens, rows, vocabulary, threads
    "draw_tokens": [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_int],
    # keys, values, their pools, rows, how many rows, bytes of a row
    "write_rows": [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2,
}


def cache_directory() -> Path:
    """Where what was made here is kept, kernels and models: $COWROLL_CACHE, else ~/.cache/cowroll."""
    return Path(os.environ.get("COWROLL_CACHE") or Path.home() / ".cache" / "cowroll")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where torch operations are to do their work.

    Raises ValueError if COWROLL_KERNELS has another value, or is "native" and the kernels cannot be built.
    """
    wanted = os.environ.get("COWROLL_KERNELS", "")
    if wanted not in ("", "native", "torch"):
        raise ValueError(f"COWROLL_KERNELS={wanted!r}: set it to native or torch, or leave it out")
    if wanted == "torch":
        return None
    try:
        loaded = _load()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home directory
        problem = f"the CPU's kernels could not be built: {error}\n{getattr(error, 'stderr', '') or ''}".rstrip()
        if wanted == "native":
            raise ValueError(f"COWROLL_KERNELS=native, but {problem}") from error
        logger.warning("the model runs in torch operations, which takes longer, since %s", problem)
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


def identity(device: torch.device) -> str:
    """What computes on a device, since bits may differ by it: its type, "torch", or the compiled kernels' name."""
    if device.type != "cpu":
        return device.type
    loaded = library()
    return "torch" if loaded is None else Path(loaded._name).stem


def kernels() -> ctypes.CDLL:
    """The compiled kernels, where `supports` says that they are there."""
    loaded = library()
    assert loaded is not None
    return loaded


def _load() -> ctypes.CDLL:
    """The library for these sources, this compiler and this kind of CPU; built if it is not there, or not whole."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if platform.system() != "Linux" or shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler on Linux ({compiler[0]}; CXX names another)")
    # what the compiler makes of the flags tells the CPU's instruction set and the compiler's version
    seen = [*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(seen, capture_output=True, text=True, check=True).stdout
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256("\0".join((*texts, *_FLAGS, *compiler, macros)).encode()).hexdigest()[:16]
    folder = cache_directory() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} is another user's, or others may write there")
    target = folder / f"{digest}.so"
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError:
            logger.warning("%s cannot be loaded and is built anew", target)
    _build(compiler, sources, target)
    return ctypes.CDLL(str(target))


def _build(compiler: list[str], sources: list[Path], target: Path) -> None:
    logger.info("compiling the CPU's kernels, once: %s", target)
    # under another name first: several processes may build at once
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:

        def run(*arguments: str | Path) -> None:
            subprocess.run([*compiler, *arguments], cwd=scratch, capture_output=True, text=True, check=True)

        run(*_FLAGS, "-c", *sources)
        # linked without OpenMP's library: its symbols are those of the one that torch has loaded, so that there is one
        # pool of threads and not two
        run("-shared", "-o", target.name, *(f"{path.stem}.o" for path in sources))
        linked = Path(scratch) / target.name
        ctypes.CDLL(str(linked))  # what cannot be loaded is not kept
        linked.replace(target)


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
    return kind == "cpu" and dtype in DTYPES and library() is not None


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
        arguments = plan.arguments = _Attention(
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
    states = q.new_empty(num_rows if plan.tables.chained else 0, heads, dim + 17, dtype=torch.float32)
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
