"""Seconds per GRPO step of this engine and trainer, by phase, beside other ways to do the same.

A step: rollouts of fresh random prompts, a reward that is the share of tokens in the lower half of the vocabulary,
advantages, micro-batches forward and backward, the optimizer, and the new weights' announcement. Before the clock
starts, the trainer's log-probs have to be the generator's: in every bit if the engine says so, else about.

forward_s includes packing and the loss; s_per_step is the whole, the time between phases included.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
from rollout import RolloutEngine, RolloutGroup, SamplingParams
from rollout.forward.scoring import score_tokens
from trainer.algorithm.advantages import group_advantages
from trainer.algorithm.batch import TrainingBatch, micro_batches
from trainer.algorithm.losses import policy_loss
from trainer.config import AlgorithmConfig, OptimConfig
from trainer.optimizer import MasterAdamW
from trainer.run import PhaseTimer

KEY = "s_per_step"
SAMPLING = SamplingParams()
"""What log-probs are scored with: temperature 1, nothing cut."""


def rewards_of(groups: list[RolloutGroup], vocab_size: int) -> Tensor:
    """[groups, n], the share of each completion's ids in the lower half of the vocabulary."""
    half = vocab_size // 2
    shares = [[sum(i < half for i in r.completion_ids) / len(r.completion_ids) for r in g.rollouts] for g in groups]
    return torch.tensor(shares)


@dataclass
class Trainer:
    """What a step needs."""

    engine: RolloutEngine
    policy: PreTrainedModel
    optimizer: MasterAdamW
    workload: Workload
    micro_batch_tokens: int
    algorithm: AlgorithmConfig

    def rollouts(self, seed: int) -> list[RolloutGroup]:
        prompts = self.workload.prompts(self.engine, seed)
        return self.engine.generate_rollouts(
            prompts, self.workload.n, self.workload.sampling(seed), step=seed, progress=False
        )

    def batches(self, groups: list[RolloutGroup], advantages: Tensor) -> list[TrainingBatch]:
        batches = micro_batches(
            groups,
            advantages,
            self.engine.layer_group,
            self.engine.device,
            max_tokens=self.micro_batch_tokens,
            exact=self.engine.exact,
        )
        return list(batches)

    def loss(self, batch: TrainingBatch, num_tokens: int) -> Tensor:
        logprobs = score_tokens(self.policy, batch.pack, SAMPLING).logprobs
        return policy_loss(
            logprobs,
            batch.rollout_logprobs if self.engine.exact else logprobs.detach(),
            batch.advantages,
            batch.loss_mask,
            num_tokens,
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
        ).loss

    @torch.no_grad()
    def verify(self) -> None:
        """The trainer sees the generator's log-probs."""
        groups = self.rollouts(seed=0)
        check_groups(groups, self.workload.n, self.workload.counts)
        for batch in self.batches(groups, torch.zeros(len(groups), self.workload.n)):
            gaps = (score_tokens(self.policy, batch.pack, SAMPLING).logprobs - batch.rollout_logprobs).abs()
            limit = 0.0 if self.engine.exact else TOLERANCE[self.engine.dtype]
            if not float(gaps.mean()) <= limit:
                raise SystemExit(
                    f"verification failed: the trainer's log-probs are {float(gaps.mean()):.2g} nats from the"
                    f" generator's on average, and at most {limit:g} expected"
                )

    def step(self, repeat: int) -> Figures:
        """One step, timed."""
        timer, engine = PhaseTimer(), self.engine
        began = time.perf_counter()
        with self._phase(timer, "rollout"):
            groups = self.rollouts(seed=repeat + 1)
        with self._phase(timer, "reward"):
            advantages = group_advantages(
                rewards_of(groups, engine.module.config.vocab_size), self.algorithm.scale_rewards
            )
        with self._phase(timer, "forward"):
            batches = self.batches(groups, advantages)
            num_tokens = sum(len(batch.rollout_logprobs) for batch in batches)
        for batch in batches:
            with self._phase(timer, "forward"):
                loss = self.loss(batch, num_tokens)
            with self._phase(timer, "backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        with self._phase(timer, "optimizer"):
            self.optimizer.step(self.optimizer.config.lr)
        with self._phase(timer, "swap"):
            engine.weights_updated()
        seconds = time.perf_counter() - began
        if not advantages.any():
            raise SystemExit("error: in every group all rewards are equal, so nothing is learned: raise --new or --n")
        return {KEY: seconds} | {f"{phase}_s": spent for phase, spent in timer.step.items()}

    @contextmanager
    def _phase(self, timer: PhaseTimer, name: str) -> Iterator[None]:
        with timer.phase(name):
            yield
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize(self.engine.device)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_comparison(parser, repeats=3, key=KEY)
    default = AlgorithmConfig().micro_batch_tokens
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=default, metavar="TOKENS", help=f"per forward; default: {default}"
    )
    args = parser.parse_args(arguments)
    workload, options = read_workload(args)
    engine = open_engine(workload, options)
    trainer = Trainer(
        engine,
        engine.training_view(),
        MasterAdamW(engine.module.named_parameters(), OptimConfig()),
        workload,
        args.micro_batch_tokens,
        AlgorithmConfig(),
    )
    trainer.verify()
    sides = measure({"ours": trainer.step}, args.peer, KEY, args.repeats)
    report = {
        "benchmark": "step",
        "settings": settings(workload, engine)
        | {"micro_batch_tokens": args.micro_batch_tokens, "peers": dict(args.peer)},
        "machine": machine(engine),
        "completion_tokens": workload.completion_tokens,
        "exact": engine.exact,
        "exact_reason": engine.exact_reason,
        "sides": sides,
        "ratios": ratios(sides, KEY, more_is_better=False),
    }
    print_comparison(report, KEY)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
