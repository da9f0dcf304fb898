"""What the benchmark scripts share: the workload, sides that run in turn, peers, and how results are written."""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout import RolloutConfig, RolloutEngine, RolloutError, RolloutGroup, SamplingParams

FIRST_ID = 5  # the ids below are often special tokens
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""How far log-probs of two ways to compute them may lie apart, in nats."""

Figures = dict[str, float]
"""What one run measured."""

Side = Callable[[int], Figures]
"""Runs once; its argument says which repeat it is, 0 for the warm-up."""


@dataclass(frozen=True)
class Workload:
    """`num_prompts` random prompts, n completions each; new_tokens, one after the other, are the prompts' lengths."""

    model: Path
    num_prompts: int
    n: int
    prompt_len: int
    new_tokens: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Tokens per completion of each prompt."""
        return [self.new_tokens[i % len(self.new_tokens)] for i in range(self.num_prompts)]

    @property
    def completion_tokens(self) -> int:
        return self.n * sum(self.counts)

    def prompts(self, engine: RolloutEngine, seed: int) -> list[list[int]]:
        """Uniform ids, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_prompts, self.prompt_len)
        return torch.randint(FIRST_ID, engine.module.config.vocab_size, shape, generator=generator).tolist()

    def sampling(self, seed: int) -> list[SamplingParams]:
        """Temperature 1, and no end before the count is full."""
        return [SamplingParams(max_new_tokens=count, ignore_eos=True, seed=seed) for count in self.counts]

    def config(self, options: Mapping[str, Any]) -> RolloutConfig:
        """Everything runs at once on a pool that just holds it; `options` come on top."""
        num_seqs = self.num_prompts * self.n
        size = int(options.get("block_size", RolloutConfig.block_size))
        full = self.prompt_len // size
        held = sum(full + 1 + self.n * (math.ceil((self.prompt_len + count) / size) - full) for count in self.counts)
        # the scheduler admits a prompt only beside one free block per running sequence, and one per sibling to come
        sizes = {"num_blocks": held + num_seqs + self.n, "max_num_seqs": num_seqs}
        return RolloutConfig(**{**sizes, "max_num_batched_tokens": max(2048, num_seqs), **options})


# -- the command line ---------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def split_name(text: str) -> tuple[str, str]:
    """NAME=REST."""
    name, _, rest = text.partition("=")
    if not name or not rest or name == "ours":
        raise argparse.ArgumentTypeError(f'{text!r} must be NAME=..., with a name other than "ours"')
    return name, rest


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With the options of the workload and the engine."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model directory with a tokenizer")
    parser.add_argument("--prompts", type=_positive, required=True, metavar="P", help="random prompts per call")
    parser.add_argument("--n", type=_positive, required=True, help="completions per prompt")
    parser.add_argument("--prompt-len", type=_positive, required=True, metavar="L", help="tokens per prompt")
    parser.add_argument(
        "--new",
        type=lambda text: tuple(map(_positive, text.split(","))),
        required=True,
        metavar="K[,K...]",
        help="tokens per completion; several lengths are dealt out to the prompts in turn",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--exact", default="auto", choices=["auto", "off"])
    parser.add_argument("--max-num-batched-tokens", type=_positive, metavar="TOKENS", help="default: 2048, or P * N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line's JSON here, too")
    return parser


def add_comparison(parser: argparse.ArgumentParser, repeats: int, key: str) -> None:
    """The options of a comparison with peers."""
    parser.add_argument("--repeats", type=_positive, default=repeats, metavar="R", help=f"default: {repeats}")
    parser.add_argument(
        "--peer",
        type=split_name,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help=f"a command that runs the same work and prints JSON with {key} as its last line; it runs once per repeat,"
        " after ours, and warms itself up",
    )


def read_workload(args: argparse.Namespace) -> tuple[Workload, dict[str, Any]]:
    """The workload, and the engine's options."""
    options = {"dtype": args.dtype, "exact": args.exact}
    if args.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = args.max_num_batched_tokens
    return Workload(args.model, args.prompts, args.n, args.prompt_len, args.new), options


def open_engine(workload: Workload, options: Mapping[str, Any], module: PreTrainedModel | None = None) -> RolloutEngine:
    """An engine for the workload, on `module` if it is given; what cannot be run ends the script."""
    try:
        engine = RolloutEngine(workload.model if module is None else module, None, workload.config(options))
    except (RolloutError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    longest = workload.prompt_len + max(workload.new_tokens)
    if longest > engine.max_model_len:
        raise SystemExit(f"error: {longest} tokens are more than the model's {engine.max_model_len}")
    return engine


# -- what must hold -----------------------------------------------------------------------------------------------


def check_groups(groups: Sequence[RolloutGroup], n: int, counts: Sequence[int]) -> None:
    """Every completion has its number of tokens, and a log-prob for each: finite and at most 0."""
    for group, count in zip(groups, counts, strict=True):
        if len(group.rollouts) != n:
            raise SystemExit(f"verification failed: {len(group.rollouts)} completions instead of {n}")
        for rollout in group.rollouts:
            if not len(rollout.completion_ids) == len(rollout.logprobs) == count:
                raise SystemExit(f"verification failed: {len(rollout.completion_ids)} tokens instead of {count}")
            if not all(math.isfinite(x) and x <= 0.0 for x in (*rollout.logprobs, *rollout.raw_logprobs)):
                raise SystemExit("verification failed: a log-prob is above 0 or not finite")


# -- running and writing ------------------------------------------------------------------------------------------


def make_peer(name: str, command: str, key: str) -> Side:
    """Runs the command as a process of its own; one that fails ends the script."""

    def run(_repeat: int) -> Figures:
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
        except (OSError, ValueError) as error:
            raise SystemExit(f"peer {name}: {command}: {error}") from error
        stderr = done.stderr.strip()
        if done.returncode:
            raise SystemExit(f"peer {name}: {command}: ended with status {done.returncode}\n{stderr}")
        last = (done.stdout.strip().splitlines() or [""])[-1]
        try:
            printed = json.loads(last)
            return {key: float(printed[key])} | {k: float(v) for k, v in printed.items() if isinstance(v, int | float)}
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"peer {name}: {command}: its last line is not JSON with a number {key}: {last!r}\n{stderr}"
            ) from error

    return run


def measure(ours: Mapping[str, Side], peers: Sequence[tuple[str, str]], key: str, repeats: int) -> dict[str, Any]:
    """Run all sides once per repeat, in turn, after a warm-up of ours: what each measured, by name."""
    commands = {name: make_peer(name, command, key) for name, command in peers}
    sides = {**ours, **commands}
    if len(sides) < len(ours) + len(peers):
        raise SystemExit("error: two sides have the same name")
    for side in ours.values():
        side(0)
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for repeat in range(1, repeats + 1):
        for name, side in sides.items():
            runs[name].append(side(repeat))
    return {name: _summary(figures) for name, figures in runs.items()}


def _summary(runs: list[Figures]) -> dict[str, Any]:
    columns = {key: [run[key] for run in runs if key in run] for key in runs[0]}
    return {
        "runs": runs,
        "median": {key: statistics.median(values) for key, values in columns.items()},
        "min": {key: min(values) for key, values in columns.items()},
        "max": {key: max(values) for key, values in columns.items()},
    }


def ratios(sides: Mapping[str, Any], key: str, *, more_is_better: bool) -> dict[str, float]:
    """How many times as fast as each other side ours is, by medians."""
    medians = {name: float(side["median"][key]) for name, side in sides.items()}
    ours = medians.pop("ours")
    return {name: ours / other if more_is_better else other / ours for name, other in medians.items()}


def machine(engine: RolloutEngine) -> dict[str, Any]:
    """Where it ran."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def settings(workload: Workload, engine: RolloutEngine) -> dict[str, Any]:
    """What ran."""
    return asdict(workload) | {"dtype": str(engine.dtype).removeprefix("torch."), "config": asdict(engine.config)}


def print_comparison(report: Mapping[str, Any], key: str) -> None:
    """A table with a line per side and figure."""
    print(f"{'side':<16} {'figure':<14} {'median':>12} {'min':>12} {'max':>12}   ours is")
    for name, side in report["sides"].items():
        for figure, median in side["median"].items():
            ratio = report["ratios"].get(name) if figure == key else None
            shown = "" if ratio is None else f"   {ratio:.2f} times as fast"
            low, high = side["min"][figure], side["max"][figure]
            print(f"{name:<16} {figure:<14} {median:>12.4g} {low:>12.4g} {high:>12.4g}{shown}")


def write_json(report: Mapping[str, Any], path: Path | None) -> None:
    """The report as the last line, and in a file."""
    line = json.dumps(report, default=str)
    print(line)
    if path is not None:
        path.write_text(line + "\n")
