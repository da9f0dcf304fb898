"""Where a step's time goes, and what share of this CPU's memory bandwidth and matrix rate it reaches.

A decode step computes one token each of completions that run; every other step is a prefill step, that which draws the
first tokens among them. Steps are timed in a call without the profiler; a second call on other prompts is profiled for
the shares of the categories:

  products     linear layers            attention    scores, weights and sums of the segments
  kv           KV writes and copies     elementwise  norms, rotary embedding, activations, copies and the like
  sampling     log-probs and the draw   scheduler    schedule(), and who attends what
  host         what is left of the step: Python between operations, in transformers and in this engine

Bytes: the weights that are multiplied, once, and the KV of each block once, however many completions share it. Flops: 2
per weight and token, 4 * heads * head size per query and position that it sees; padding does not count.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read by torch: two lines per profiled step otherwise

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import bench_kernels
from bench_report import Workload, machine, make_parser, open_engine, read_workload, settings, write_json
from rollout import RolloutEngine
from rollout.forward import runner
from rollout.model import views
from rollout.model.kv_cache import KVCache
from rollout.model.substitutions import FusedLinear, FusedMLP, FusedRMSNorm
from rollout.schedule.batch import ScheduledBatch
from rollout.schedule.scheduler import Scheduler
from rollout_kernels.ops import choose
from rollout_kernels.pace import best_seconds

TRIES = 5
STEP, UNCOUNTED = "step", "uncounted"
RANGES: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "scheduler"),
    (runner.ModelRunner, "prepare", "scheduler"),
    (runner, "sample", "sampling"),
    (views, "_cached_attention", "attention"),
    (FusedLinear, "forward", "products"),
    (FusedRMSNorm, "forward", "elementwise"),
    (FusedMLP, "forward", "elementwise"),
    (KVCache, "write", "kv"),
    (KVCache, "copy_blocks", "kv"),
]
"""(owner, function, the category of what it does)."""
LABELS = {label for _, _, label in RANGES} | {UNCOUNTED}
GATHERS = {"aten::index_select", "aten::index_copy_", "aten::index", "aten::gather"}
PRODUCTS = {"aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm"}
CATEGORIES = ("products", "attention", "kv", "elementwise", "sampling", "scheduler", "host")


# -- the machine --------------------------------------------------------------------------------------------------


def matrix_rate(size: int, dtype: torch.dtype) -> float:
    """Flops per second: multiply-adds in registers, or a square product of torch's without compiled kernels."""
    if choose(torch.device("cpu"), dtype).own:
        return 1e9 * bench_kernels.matrix_rate(dtype, TRIES)
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2.0 * size**3 / best_seconds(lambda: a @ b, tries=TRIES)[0]


# -- what a step has to do ----------------------------------------------------------------------------------------


@dataclass
class Step:
    """One iteration: what it was, what it had to move and compute, and how long it took."""

    phase: str
    tokens: int
    bytes: int
    flops: int
    seconds: float = 0.0
    categories: Counter[str] = field(default_factory=Counter)
    """Seconds, if it was profiled."""


class Costs:
    """What the steps of a model cost."""

    def __init__(self, engine: RolloutEngine) -> None:
        module, layer = engine.module, engine.layer_group
        head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
        parameters = list(module.parameters())
        others = [p for p in parameters if p is not embedding and p is not head]
        self.block_size = engine.config.block_size
        self.weight_bytes = head.nbytes + sum(p.nbytes for p in others)
        self.linear_weights = sum(p.numel() for p in others if p.ndim > 1)
        self.head_weights = head.numel()
        self.kv_bytes_per_token = layer.bytes_per_token()
        self.flops_per_position = 4 * layer.num_layers * layer.num_heads * layer.head_dim

    def of(self, batch: ScheduledBatch) -> Step:
        """A planned step's cost, while its tables are as they will be read."""
        filled: dict[int, int] = {}
        positions = 0
        for chunk in batch.chunks:
            end = chunk.start + chunk.count
            positions += sum(range(chunk.start + 1, end + 1))
            for i, block in enumerate(chunk.sequence.table.blocks[: -(-end // self.block_size)]):
                filled[block] = max(filled.get(block, 0), min(self.block_size, end - i * self.block_size))
        tokens = sum(chunk.count for chunk in batch.chunks)
        rows = sum(chunk.completes for chunk in batch.chunks)
        decodes = (
            bool(tokens) and not batch.forks and all(c.count == 1 and not c.sequence.is_prompt for c in batch.chunks)
        )
        return Step(
            phase="decode" if decodes else "prefill",
            tokens=tokens,
            bytes=bool(tokens) * self.weight_bytes + sum(filled.values()) * self.kv_bytes_per_token,
            flops=2 * (self.linear_weights * tokens + self.head_weights * rows) + self.flops_per_position * positions,
        )


# -- running ------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is wrap(owner.name) for a while."""
    own, inner = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(inner))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, inner)
        else:  # an instance's, which hid its class's
            delattr(owner, name)


def _labelled(label: str) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def ranged(*args: Any, **options: Any) -> Any:
            with record_function(label):
                return inner(*args, **options)

        return ranged

    return wrap


def run_steps(engine: RolloutEngine, workload: Workload, seed: int, *, profiled: bool = False) -> list[Step]:
    """One call, step by step."""
    costs, steps, counting = Costs(engine), list[Step](), [0.0]

    def watched(schedule: Callable[[], ScheduledBatch]) -> Callable[[], ScheduledBatch]:
        def plan() -> ScheduledBatch:
            batch = schedule()
            with record_function(UNCOUNTED):
                began = time.perf_counter()
                steps.append(costs.of(batch))
                counting[0] = time.perf_counter() - began
            return batch

        return plan

    prompts = workload.prompts(engine, seed)
    for key, (prompt, sampling) in enumerate(zip(prompts, workload.sampling(seed), strict=True)):
        engine.submit(prompt, workload.n, sampling, key=key)
    with replaced(engine.scheduler, "schedule", watched):
        while engine.has_work:
            with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext() as profiler:
                began = time.perf_counter()
                with record_function(STEP):
                    engine.step()
                seconds = time.perf_counter() - began
            steps[-1].seconds = seconds - counting[0]
            if profiler is not None:
                steps[-1].categories = categorise(profiler.events() or [])
    return steps


def categorise(events: Sequence[Any]) -> Counter[str]:
    """Seconds per category: every event's own time, without that of the events inside it."""
    seconds: Counter[str] = Counter()
    for event in events:
        names, outer = [], event
        while outer is not None and outer.name != STEP:
            names.append(outer.name)
            outer = outer.cpu_parent
        if outer is not None:
            seconds[_category(names)] += event.self_cpu_time_total * 1e-6
    del seconds[UNCOUNTED]
    return seconds


def _category(names: Sequence[str]) -> str:
    """Of an operation, given its name and those of what it happened in."""
    label = next((name for name in names if name in LABELS), None)
    if label == "attention" and not GATHERS.isdisjoint(names):
        return "kv"
    if label is not None:
        return label
    if not PRODUCTS.isdisjoint(names):
        return "products"
    return "elementwise" if names else "host"


# -- reporting ----------------------------------------------------------------------------------------------------


def summarise(timed: list[Step], profiled: list[Step], bandwidth: float, rate: float) -> dict[str, Any]:
    """Means per step of one phase."""
    count, seconds = len(timed), sum(step.seconds for step in timed)
    num_bytes, flops = sum(step.bytes for step in timed), sum(step.flops for step in timed)
    spent = sum((step.categories for step in profiled), Counter[str]())
    return {
        "steps": count,
        "tokens": sum(step.tokens for step in timed),
        "ms_per_step": seconds / count * 1e3,
        "bytes_per_step": num_bytes / count,
        "flops_per_step": flops / count,
        "bandwidth_share": num_bytes / seconds / bandwidth,
        "matrix_share": flops / seconds / rate,
        "profiled_ms_per_step": sum(step.seconds for step in profiled) / len(profiled) * 1e3,
        "profiled_ms_by_category": {name: spent[name] / len(profiled) * 1e3 for name in CATEGORIES},
    }


def print_phases(phases: dict[str, Any], bandwidth: float, rate: float) -> None:
    print(f"this machine reads {bandwidth / 1e9:.1f} GB/s and multiplies {rate / 1e9:.0f} GFLOP/s")
    for phase, figures in phases.items():
        print(f"\n{phase}: {figures['steps']} steps of {figures['ms_per_step']:.2f} ms, {figures['tokens']} tokens")
        print(f"  {figures['bandwidth_share']:.1%} of the bandwidth, {figures['matrix_share']:.1%} of the matrix rate")
        whole = sum(figures["profiled_ms_by_category"].values())
        for name, spent in figures["profiled_ms_by_category"].items():
            print(f"  {name:<12} {spent:>9.3f} ms {spent / whole:>7.1%}")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="read to measure the bandwidth; default: 512")
    parser.add_argument("--matrix", type=int, default=2048, help="size of the measured product; default: 2048")
    args = parser.parse_args(arguments)
    workload, options = read_workload(args)
    engine = open_engine(workload, options | {"device": "cpu"})
    bandwidth, rate = 1e9 * bench_kernels.read_bandwidth(args.megabytes, TRIES), matrix_rate(args.matrix, engine.dtype)
    run_steps(engine, workload, seed=0)
    timed = run_steps(engine, workload, seed=1)
    with ExitStack() as labels:
        for owner, name, label in RANGES:
            labels.enter_context(replaced(owner, name, _labelled(label)))
        profiled = run_steps(engine, workload, seed=2, profiled=True)
    phases = {}
    for phase in ("prefill", "decode"):
        steps, seen = ([step for step in run if step.phase == phase] for run in (timed, profiled))
        if steps and seen:
            phases[phase] = summarise(steps, seen, bandwidth, rate)
    report = {
        "benchmark": "profile",
        "settings": settings(workload, engine),
        "machine": machine(engine) | {"bytes_per_second": bandwidth, "flops_per_second": rate},
        "exact": engine.numerics.exact,
        "phases": phases,
    }
    print_phases(phases, bandwidth, rate)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
