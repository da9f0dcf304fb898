"""A step's rollouts and what they are worth; where asked for, groups that teach nothing are replaced."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from rollout import RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from trainer.algorithm.advantages import equal_groups
from trainer.config import TrainerConfig
from trainer.data.rows import Row
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores
from trainer.tracking.metrics import completion_metrics, engine_metrics
from trainer.tracking.timing import PhaseTimer
from trainer.tracking.tracking import Metrics

logger = logging.getLogger(__name__)


class RowSource(Protocol):
    """Where the rows of a step come from; trainer.data.rows.RowStream is one."""

    def take(self, start: int, count: int) -> list[Row]: ...


@dataclass(frozen=True)
class Collected:
    """G groups of n rollouts."""

    rows: list[Row]
    groups: list[RolloutGroup]
    scores: Scores
    metrics: Metrics

    def chosen(self, groups: Tensor) -> "Collected":
        """groups: bool [G]"""
        places = groups.nonzero().flatten().tolist()
        rows, drawn = [self.rows[g] for g in places], [self.groups[g] for g in places]
        return replace(self, rows=rows, groups=drawn, scores=self.scores.chosen(places))

    def joined(self, other: "Collected") -> "Collected":
        scores = self.scores.joined(other.scores)
        return Collected(self.rows + other.rows, self.groups + other.groups, scores, self.metrics)


class Collector:
    """Samples and scores. `num_refilled`: prompts beyond prompts_per_step that its steps have taken so far."""

    def __init__(
        self,
        config: TrainerConfig,
        engine: RolloutEngine,
        rows: RowSource,
        scorer: Scorer,
        sampling: SamplingParams,
        max_new_tokens: Sequence[int] | None,
        timer: PhaseTimer,
    ) -> None:
        self.config, self.engine, self.rows, self.scorer = config, engine, rows, scorer
        self.sampling, self.max_new_tokens, self.timer = sampling, max_new_tokens, timer
        self.num_refilled = 0
        self._refused = ""

    def collect(self, i: int) -> Collected:
        """Rollouts of step i with their rewards. Raises RolloutError if none of its rows could be run.

        With dynamic sampling (DAPO, arXiv 2503.14476) groups whose rewards are all equal are left out, and further
        prompts sampled, until prompts_per_step groups are there or max_refills is reached; metrics are of them all.
        """
        algorithm, before = self.config.algorithm, self.engine.stats()
        wanted = algorithm.prompts_per_step
        place = i * wanted + self.num_refilled
        sampled = self._round(place, wanted, i)
        place += wanted
        kept, refills = self._teaching(sampled), 0
        while len(kept.groups) < wanted and algorithm.dynamic_sampling and refills < algorithm.max_refills:
            missing, refills = wanted - len(kept.groups), refills + 1
            more = self._round(place, missing, i)
            place, self.num_refilled = place + missing, self.num_refilled + missing
            sampled, kept = sampled.joined(more), kept.joined(self._teaching(more))
        if not sampled.groups:
            raise RolloutError(f"step {i + 1}: none of its {wanted} prompts could be run; {self._refused}")
        # a metric of a reward function's own gives way to the trainer's of that name
        metrics = sampled.scores.metrics() | engine_metrics(before, self.engine.stats())
        metrics |= completion_metrics(sampled.groups, sampled.scores.totals, sampled.scores.scored)
        if algorithm.dynamic_sampling:
            metrics |= {"refills": float(refills), "dropped_groups": float(len(sampled.groups) - len(kept.groups))}
        return replace(kept, metrics=metrics)

    def _teaching(self, sampled: Collected) -> Collected:
        if not self.config.algorithm.dynamic_sampling:
            return sampled
        return sampled.chosen(~equal_groups(sampled.scores.totals, sampled.scores.scored))

    def _round(self, first: int, count: int, i: int) -> Collected:
        """Rollouts of the rows at places first .. first + count - 1; those that cannot be run are logged.

        The scorer is given each group as soon as it is whole.
        """
        algorithm, limits = self.config.algorithm, self.max_new_tokens
        rows, progress = self.rows.take(first, count), TrainingProgress(i, self.config.steps)
        keys = [place % 2**32 for place in range(first, first + count)]
        sampling: SamplingParams | list[SamplingParams] = self.sampling
        if limits is not None:
            sampling = [replace(self.sampling, max_new_tokens=limit) for limit in limits]
        with self.timer.phase("rollout"):
            prompts = [row.engine_prompt for row in rows]
            groups = self.engine.generate_rollouts(
                prompts,
                algorithm.group_size,
                sampling,
                step=i,
                keys=keys,
                on_error="return",
                on_group=lambda place, group: self.scorer.submit(rows[place], group, progress),
            )
        for place, group in zip(keys, groups, strict=True):
            if group.error is not None:
                self._refused = group.error
                logger.warning("row at place %d of the data stream skipped: %s", place, group.error)
        good = [(row, group) for row, group in zip(rows, groups, strict=True) if group.error is None]
        run, groups = [row for row, _ in good], [group for _, group in good]
        with self.timer.phase("reward"):
            scores = self.scorer.collect(run, groups, progress)
        if self.config.reward.shuffle:
            scores = scores.shuffled(self.config.seed, i)
        return Collected(run, groups, scores, {})
