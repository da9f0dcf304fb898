"""Seconds per GRPO step of this engine and trainer, by phase, beside other ways to do the same.

A step is the trainer's own: rollouts of fresh random prompts, a reward that is the share of tokens in the lower half of
the vocabulary, advantages, micro-batches forward and backward, the optimizer, and the new weights' announcement. Before
the clock starts, the trainer's log-probs have to be the generator's: in every bit if the engine says so, else about.

forward_s includes packing and the loss; s_per_step is the whole, the time between phases included.
"""

from dataclasses import dataclass

from bench_report import (
    TOLERANCE,
    Figures,
    Workload,
    add_comparison,
    check_groups,
    machine,
    make_parser,
    measure,
    open_engine,
    print_comparison,
    ratios,
    read_workload,
    settings,
    write_json,
)
from rollout import RolloutEngine
from trainer.config import ClippedConfig, OptimConfig, SamplingConfig, TrainerConfig
from trainer.data.rows import Row
from trainer.rewards.functions import weighted
from trainer.rewards.scorer import Scorer
from trainer.step import Trainer
from trainer.tracking.timing import PhaseTimer
from trainer.weights.optimizer import MasterAdamW

PHASES = ("rollout", "reward", "forward", "backward", "optimizer", "swap")
KEY = "s_per_step"


@dataclass(frozen=True)
class WorkloadRows:
    """The workload's prompts as rows, others for every step."""

    workload: Workload
    engine: RolloutEngine

    def take(self, start: int, count: int) -> list[Row]:
        return [Row("", None, prompt_ids=ids) for ids in self.workload.prompts(self.engine, seed=start // count)]


def scorer_of(vocab_size: int) -> Scorer:
    """The share of a completion's ids in the lower half of the vocabulary."""

    def lower_half(completion_ids: list[list[int]]) -> list[float]:
        return [sum(i < vocab_size // 2 for i in ids) / len(ids) for ids in completion_ids]

    return Scorer([weighted(lower_half)])


def make_trainer(engine: RolloutEngine, workload: Workload, micro_batch_tokens: int, lr: float) -> Trainer:
    """The trainer's own steps on the workload, without end tokens, at a constant learning rate."""
    config = TrainerConfig(
        algorithm=ClippedConfig(
            prompts_per_step=workload.num_prompts, group_size=workload.n, micro_batch_tokens=micro_batch_tokens
        ),
        rollout=engine.config,
        sampling=SamplingConfig(max_new_tokens=max(workload.counts), ignore_eos=True),
        optim=OptimConfig(lr=lr),
    )
    return Trainer(
        config,
        engine,
        MasterAdamW(engine.module.named_parameters(), config.optim),
        WorkloadRows(workload, engine),
        scorer_of(engine.module.config.vocab_size),
        max_new_tokens=workload.counts,
        timer=PhaseTimer(waits_for=engine.device),
    )


def verify(trainer: Trainer, workload: Workload) -> None:
    """Step 0, before the clock starts: the trainer sees the generator's log-probs."""
    engine = trainer.engine
    limit = 0.0 if engine.numerics.exact else TOLERANCE[engine.dtype]
    result = trainer.step(0)
    check_groups(result.groups, workload.n, workload.counts)
    gap = result.metrics["sampling/sampling_logp_difference/mean"]
    if not gap <= limit:
        raise SystemExit(
            f"verification failed: the trainer's log-probs are {gap:.2g} nats from the generator's on average, and at"
            f" most {limit:g} expected"
        )


def timed_step(trainer: Trainer, i: int) -> Figures:
    """Step i, by phase."""
    trainer.timer.step = {}
    result = trainer.step(i)
    if not result.advantages.any():
        raise SystemExit("error: in every group all rewards are equal, so nothing is learned: raise --new or --n")
    seconds = trainer.timer.step
    return {KEY: seconds["step"]} | {f"{phase}_s": seconds[phase] for phase in PHASES}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_comparison(parser, repeats=3, key=KEY)
    default = ClippedConfig().micro_batch_tokens
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=default, metavar="TOKENS", help=f"per forward; default: {default}"
    )
    args = parser.parse_args(arguments)
    workload, options = read_workload(args)
    engine = open_engine(workload, options)
    trainer = make_trainer(engine, workload, args.micro_batch_tokens, OptimConfig().lr)
    verify(trainer, workload)
    sides = measure({"ours": lambda repeat: timed_step(trainer, repeat + 1)}, args.peer, KEY, args.repeats)
    report = {
        "benchmark": "step",
        "settings": settings(workload, engine)
        | {"micro_batch_tokens": args.micro_batch_tokens, "peers": dict(args.peer)},
        "machine": machine(engine),
        "completion_tokens": workload.completion_tokens,
        "exact": engine.numerics.exact,
        "exact_reason": engine.numerics.reason,
        "sides": sides,
        "ratios": ratios(sides, KEY, more_is_better=False),
    }
    print_comparison(report, KEY)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
