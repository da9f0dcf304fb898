"""One training step: sample, score, compare, update, swap."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout import ExactnessError, RolloutEngine, RolloutError, RolloutGroup
from rollout.forward import TokenScores, score_tokens
from trainer.algorithm.advantages import group_advantages
from trainer.algorithm.batch import StepTotals, TrainingBatch, micro_batches
from trainer.algorithm.losses import LossFunction, PolicyLoss, policy_loss
from trainer.config import TrainerConfig, sampling_params
from trainer.data.rows import Row
from trainer.data.tasks import RewardFunction
from trainer.optimizer import MasterAdamW, learning_rate
from trainer.rewards.rewards import score, shuffled
from trainer.signals import interrupts
from trainer.tracking.metrics import UpdateMetrics, completion_metrics, engine_metrics
from trainer.tracking.timing import PhaseTimer
from trainer.tracking.tracking import Metrics

logger = logging.getLogger(__name__)

AdvantageFunction = Callable[[Tensor], Tensor]
"""Rewards, fp64 [groups, n] -> advantages, fp32 [groups, n]."""


class RowSource(Protocol):
    """Where the rows of a step come from; trainer.data.rows.RowStream is one."""

    def take(self, start: int, count: int) -> list[Row]: ...


@dataclass(frozen=True)
class StepResult:
    """What one step did, of G groups of n rollouts: rows that the engine could not take are not among them."""

    rows: list[Row]
    groups: list[RolloutGroup]
    rewards: Tensor
    """fp64 [G, n]"""
    advantages: Tensor
    """fp32 [G, n]"""
    metrics: Metrics


class Trainer:
    """The steps of a run, one at a time; it keeps no record of them.

    The optimizer holds engine.module's parameters. rows, reward: what is sampled and what it is worth. reference: a
    training view of frozen weights, whose log-probs batches then carry. advantages, loss: how rewards become a loss;
    None: as config.algorithm says. max_new_tokens: one for each of a step's rows; None: config.sampling's for all.
    """

    def __init__(
        self,
        config: TrainerConfig,
        engine: RolloutEngine,
        optimizer: MasterAdamW,
        rows: RowSource,
        reward: RewardFunction,
        *,
        reference: PreTrainedModel | None = None,
        advantages: AdvantageFunction | None = None,
        loss: LossFunction | None = None,
        max_new_tokens: Sequence[int] | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        algorithm = config.algorithm
        self.config, self.engine, self.optimizer = config, engine, optimizer
        self.rows, self.reward, self.reference = rows, reward, reference
        self.policy = engine.training_view(gradient_checkpointing=config.model.gradient_checkpointing)
        self.sampling = sampling_params(config)
        self.max_new_tokens = max_new_tokens
        self.timer = timer or PhaseTimer()
        self.advantages = advantages or partial(group_advantages, scale=algorithm.scale_rewards)
        self.loss = loss or partial(
            policy_loss, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl_coef=algorithm.kl_coef
        )

    def step(self, i: int) -> StepResult:
        """Step i, counted from 0: its rollouts, one optimizer step in place, and the engine told of the new weights.

        Signals are held from the optimizer step on: whoever has written the step down lets them go, by
        trainer.signals.interrupts.release(). Raises RolloutError if no row could be run, or for what a reward does
        wrong, and ExactnessError if config.rollout.exact requires exactness and the step shows a difference.
        """
        with self.timer.phase("step"):
            before = self.engine.stats()
            rows, groups = self.rollouts(i)
            metrics = engine_metrics(before, self.engine.stats())
            with self.timer.phase("reward"):
                rewards = self.score(rows, groups, i)
                advantages = self.advantages(rewards)
            with self.timer.phase("update"):
                metrics |= self.update(groups, advantages, i)
                with self.timer.phase("swap"):
                    self.engine.weights_updated()
        return StepResult(rows, groups, rewards, advantages, metrics | completion_metrics(groups, rewards))

    def rollouts(self, i: int) -> tuple[list[Row], list[RolloutGroup]]:
        """The step's rows and their groups; a row whose prompt the engine cannot take is skipped and logged."""
        algorithm, sampling = self.config.algorithm, self.sampling
        first = i * algorithm.prompts_per_step
        rows = self.rows.take(first, algorithm.prompts_per_step)
        keys = [place % 2**32 for place in range(first, first + len(rows))]
        limits = self.max_new_tokens
        with self.timer.phase("rollout"):
            groups = self.engine.generate_rollouts(
                [row.engine_prompt for row in rows],
                algorithm.group_size,
                sampling if limits is None else [replace(sampling, max_new_tokens=limit) for limit in limits],
                step=i,
                keys=keys,
                on_error="return",
            )
        for place, group in zip(keys, groups, strict=True):
            if group.error is not None:
                logger.warning("row at place %d of the data stream skipped: %s", place, group.error)
        good = [(row, group) for row, group in zip(rows, groups, strict=True) if group.error is None]
        if not good:
            raise RolloutError(f"step {i + 1}: none of its {len(rows)} prompts could be run; {groups[0].error}")
        return [row for row, _ in good], [group for _, group in good]

    def score(self, rows: list[Row], groups: list[RolloutGroup], i: int) -> Tensor:
        """Rewards of the groups' rollouts, fp64 [groups, n]."""
        rewards = score(self.reward, rows, groups)
        if self.config.reward.shuffle:
            rewards = shuffled(rewards, self.config.seed, i)
        return torch.tensor(rewards, dtype=torch.float64).view(len(groups), self.config.algorithm.group_size)

    def update(self, groups: list[RolloutGroup], advantages: Tensor, i: int) -> Metrics:
        """Accumulate the loss of all micro-batches (advantages: [groups, n]), then one optimizer step, in place."""
        engine, optim = self.engine, self.config.optim
        batches = micro_batches(
            groups,
            advantages,
            engine.layer_group,
            engine.device,
            max_tokens=self.config.algorithm.micro_batch_tokens,
            row_multiple=engine.numerics.row_multiple,
        )
        totals = StepTotals.of(groups)
        metrics = UpdateMetrics(totals.num_tokens)
        for batch in self._timed(batches):
            with self.timer.phase("forward"):
                scores, loss = self._forward(batch, totals)
            with self.timer.phase("backward"):
                loss.loss.backward()  # type: ignore[no-untyped-call]
            metrics.add(batch, scores, loss)
        self._hold_exactness(metrics.gap_max)
        # from here on the step is finished, or the weights would be ahead of what is written down
        interrupts.hold()
        lr = learning_rate(optim, i, self.config.steps)
        with self.timer.phase("optimizer"):
            grad_norm = self.optimizer.step(lr)
        return metrics.result() | {"grad_norm": grad_norm, "learning_rate": lr}

    def _timed(self, batches: Iterator[TrainingBatch]) -> Iterator[TrainingBatch]:
        """Packing counts for the forward."""
        while True:
            with self.timer.phase("forward"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _forward(self, batch: TrainingBatch, totals: StepTotals) -> tuple[TokenScores, PolicyLoss]:
        scores = score_tokens(self.policy, batch.pack, self.sampling)
        if not self.engine.numerics.exact:
            # where the generator's log-probs are not the trainer's in every bit, the trainer's own take their place
            batch = replace(batch, old_logprobs=scores.logprobs.detach())
        if self.reference is not None:
            with torch.no_grad():
                batch = replace(batch, ref_logprobs=score_tokens(self.reference, batch.pack, self.sampling).logprobs)
        return scores, self.loss(scores.logprobs, batch, totals)

    def _hold_exactness(self, gap_max: float) -> None:
        """The probe is a sample: if a step shows a difference after all, refuse or fall back, and say so."""
        if gap_max == 0.0 or not self.engine.numerics.exact:
            return
        reason = f"generator's and trainer's log-probs differ by up to {gap_max:.2g}"
        if self.config.rollout.exact == "require":
            raise ExactnessError(f"exact='require', but {reason}: use exact=auto to recompute log-probs")
        logger.warning("%s; from now on the trainer's own are used", reason)
        self.engine.fall_back(reason)
        self.policy.numerics = self.engine.numerics
