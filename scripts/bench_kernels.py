"""Each CPU kernel against torch operations, in turn, and what share of the machine's own rates it reaches.

    python scripts/bench_kernels.py [--threads 2] [--march x86-64-v3] [--only linear] [--json FILE]

For each kernel and shape: GF/s (GB/s where it moves data rather than multiplies) of the compiled kernel and of torch,
their ratio, the compiled one's share of the matrix rate (multiply-adds in registers, in the kernel's own dtype) or of
the read bandwidth, and its rate in bfloat16 as a part of that in float32. Everything is run in turn; rates are medians,
and ratios medians of each turn's. --march builds the kernels for another target, and holds torch to AVX2 where that is
a lesser one, so that other CPUs can be seen from here. Run nothing beside it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from rollout_kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from rollout_kernels.cpu.attention import segment_attention
from rollout_kernels.cpu.library import identity, kernels
from rollout_kernels.cpu.linear import linear
from rollout_kernels.cpu.rows import draw_tokens, rms_norm, swiglu, write_rows
from rollout_kernels.pace import best_seconds, seconds_in_turn
from rollout_kernels.reference import OPERATIONS as REFERENCE

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TURNS = 2_000_000
"""Of multiply-adds in registers: some milliseconds."""
AVX2_ONLY = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@dataclass(frozen=True)
class Case:
    """A kernel at a shape: both ways to compute it, and what it takes at least."""

    name: str
    dtype: torch.dtype
    native: Callable[[], object]
    torch: Callable[[], object]
    flops: float = 0.0
    num_bytes: float = 0.0
    in_float32: Callable[[], object] | None = None


@dataclass(frozen=True)
class Figure:
    """What one case measured. rate: GF/s, or GB/s where no flops count. share: of the machine's rate of that kind."""

    name: str
    dtype: str
    unit: str
    native_rate: float
    torch_rate: float
    ratio: float
    share: float
    of_float32: float | None

    def __str__(self) -> str:
        of_float32 = "" if self.of_float32 is None else f"{self.of_float32:8.2f}"
        rates = f"{self.native_rate:8.1f} {self.torch_rate:8.1f} {self.unit}"
        return f"{self.name:<42} {self.dtype:<9} {rates} {self.ratio:6.2f} {self.share:6.2f}{of_float32}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="of torch and of the kernels; default: torch's")
    parser.add_argument("--march", help="target of the kernels, as COWROLL_KERNELS_MARCH")
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    parser.add_argument("--tries", type=int, default=15, help="turns")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def hold_to(march: str) -> None:
    """Start again with kernels of this target, and with torch's own held to AVX2 if it is a lesser one of x86-64."""
    lesser = AVX2_ONLY if march in ("x86-64", "x86-64-v2", "x86-64-v3") else {}
    environment = os.environ | lesser | {"COWROLL_KERNELS_MARCH": march}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in ((1536, 512), (512, 1536), (512, 512)):
        weight = torch.randn(columns, depth).to(dtype)
        for rows in (1, 8, 16, 32, 128, 256, 512, 2048):
            x = torch.randn(rows, depth).to(dtype)
            wide_x, wide_weight = x.float(), weight.float()
            yield Case(
                f"linear {rows} x {depth} -> {columns}",
                dtype,
                partial(linear, x, weight),
                partial(F.linear, x, weight),
                flops=2.0 * rows * columns * depth,
                in_float32=None if dtype == torch.float32 else partial(linear, wide_x, wide_weight),
            )


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Of 8 heads on 4 kv heads of size 64: decodes, each for itself and behind a shared prompt, and a prefill."""
    heads, kv_heads, dim, block = 8, 4, 64, 16
    for name, rows, prompt in (("decode", 32, 128), ("decode", 32, 2048), ("shared decode", 32, 2048)):
        own = prompt // block + 1
        spans = []
        for i in range(rows):
            first = prompt // 64 if name != "decode" else 0
            units = np.arange(i * own, (i + 1) * own) * kv_heads
            lengths = np.array([prompt + 1])
            spans.append(QuerySpan(np.array([i]), lengths, units[first * 64 // block :], first))
        if name != "decode":
            units = np.arange(prompt // block) * kv_heads
            spans.append(QuerySpan(np.arange(rows), np.full(rows, prompt + 1), units, 0, prompt // 64))
        plan = AttentionPlan(spans, KVLayout(kv_heads, heads // kv_heads, block, 1), CPU)
        kv = torch.randn(2, rows * own * kv_heads, block, dim).to(dtype)
        q = torch.randn(rows, heads, dim).to(dtype)
        label = f"{name}, {rows} rows behind {prompt}"
        yield attention_case(label, q, kv, plan, flops=4.0 * rows * heads * dim * (prompt + 1))
    size = 2048
    span = QuerySpan(np.arange(size), np.arange(1, size + 1), np.arange(size // block) * kv_heads)
    plan = AttentionPlan([span], KVLayout(kv_heads, heads // kv_heads, block, 1), CPU)
    kv = torch.randn(2, size // block * kv_heads, block, dim).to(dtype)
    q = torch.randn(size, heads, dim).to(dtype)
    yield attention_case(f"prefill of {size}", q, kv, plan, flops=2.0 * size * (size + 1) * heads * dim)


def attention_case(name: str, q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, flops: float) -> Case:
    scale = q.shape[-1] ** -0.5
    return Case(
        f"attention, {name}",
        q.dtype,
        lambda: segment_attention(q, kv[0], kv[1], plan, scale, None),
        lambda: REFERENCE["segment_attention"](q, kv[0], kv[1], plan, scale, None),
        flops=flops,
    )


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def torch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def torch_write_rows(
    keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, places: torch.Tensor
) -> None:
    key_pool.index_copy_(0, places, keys)
    value_pool.index_copy_(0, places, values)


def row_cases(dtype: torch.dtype) -> Iterator[Case]:
    size = torch.finfo(dtype).bits // 8
    for rows in (32, 2048):
        x, up, weight = torch.randn(rows, 512).to(dtype), torch.randn(rows, 512).to(dtype), torch.ones(512, dtype=dtype)
        yield Case(
            f"rms_norm {rows} x 512",
            dtype,
            partial(rms_norm, x, weight, 1e-6),
            partial(torch_rms_norm, x, weight, 1e-6),
            num_bytes=2.0 * x.numel() * size,
        )
        yield Case(
            f"swiglu {rows} x 512",
            dtype,
            partial(swiglu, x, up),
            partial(torch_swiglu, x, up),
            num_bytes=3.0 * x.numel() * size,
        )
        pools = torch.zeros(2, 4096, 256, dtype=dtype)
        keys, places = torch.randn(rows, 256).to(dtype), torch.randperm(4096)[:rows]
        yield Case(
            f"write_rows {rows} x 256",
            dtype,
            partial(write_rows, keys, keys, pools[0], pools[1], places),
            partial(torch_write_rows, keys, keys, pools[0], pools[1], places),
            num_bytes=4.0 * keys.numel() * size,
        )
    if dtype == torch.float32:
        z, uniform = torch.randn(32, 8192), torch.rand(32, dtype=torch.float64)
        runs = (lambda: draw_tokens(z, uniform), lambda: REFERENCE["draw_tokens"](z, uniform))
        yield Case("draw 32 of 8192", dtype, *runs, num_bytes=4.0 * z.numel())


def multiply_in_registers(dtype: torch.dtype, turns: int = TURNS) -> float:
    """Computes as fast as the machine can; returns how many flops that were."""
    return float(kernels().library.multiply_in_registers(turns, torch.get_num_threads(), dtype == torch.bfloat16))


def register_flops(dtype: torch.dtype) -> float:
    """What `multiply_in_registers` returns, without its work."""
    return TURNS * multiply_in_registers(dtype, turns=1)


def matrix_rate(dtype: torch.dtype, tries: int) -> float:
    """GF/s of multiply-adds in registers, at best."""
    (seconds,) = best_seconds(partial(multiply_in_registers, dtype), tries=tries)
    return register_flops(dtype) / seconds / 1e9


def read_bandwidth(megabytes: int, tries: int) -> float:
    """GB/s that this process reads of a tensor too big for the caches, by the faster of two reads."""
    x = torch.ones(megabytes * (1 << 20) // 4)
    return x.nbytes / min(best_seconds(x.sum, lambda: torch.dot(x, x), tries=tries)) / 1e9


def measure(case: Case, bandwidth: float, tries: int) -> Figure:
    """Every side of a case in turn, beside the machine's matrix rate where it multiplies."""
    runs = [case.native, case.torch]
    if case.flops:
        runs.append(partial(multiply_in_registers, case.dtype))
    if case.in_float32 is not None:
        runs.append(case.in_float32)
    ours, torchs, *others = np.array(seconds_in_turn(*runs, tries=tries)).T
    work = (case.flops or case.num_bytes) / 1e9
    machine = register_flops(case.dtype) / others[0] / 1e9 if case.flops else bandwidth
    return Figure(
        name=case.name,
        dtype=str(case.dtype).removeprefix("torch."),
        unit="GF/s" if case.flops else "GB/s",
        native_rate=float(np.median(work / ours)),
        torch_rate=float(np.median(work / torchs)),
        ratio=float(np.median(torchs / ours)),
        share=float(np.median(work / ours / machine)),
        of_float32=float(np.median(others[1] / ours)) if case.in_float32 else None,
    )


def main(args: argparse.Namespace) -> None:
    if args.march and os.environ.get("COWROLL_KERNELS_MARCH") != args.march:
        hold_to(args.march)  # the libraries read their settings when they are loaded
    if args.threads:
        torch.set_num_threads(args.threads)
    bandwidth = read_bandwidth(256, args.tries)
    print(f"{identity()}, {torch.get_num_threads()} threads, {bandwidth:.0f} GB/s read")
    print(f"{'kernel':<42} {'dtype':<9} {'native':>8} {'torch':>8}      {'ratio':>6} {'share':>6} {'of fp32':>7}")
    figures = []
    for dtype in DTYPES:
        for case in (*linear_cases(dtype), *attention_cases(dtype), *row_cases(dtype)):
            if case.name.startswith(args.only):
                figures.append(measure(case, bandwidth, args.tries))
                print(figures[-1], flush=True)
    if args.json:
        machine = {"identity": identity(), "threads": torch.get_num_threads(), "bandwidth_gb_s": bandwidth}
        report = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    with torch.no_grad():
        main(parse())
