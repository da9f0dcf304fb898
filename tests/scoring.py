"""Rewards without a trainer: groups of completions from texts, and their scores."""

from collections.abc import Callable, Sequence
from typing import Any

from rollout import Rollout, RolloutGroup
from trainer.config import RewardConfig
from trainer.data.rows import Row
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.functions import weighted
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores

PROGRESS = TrainingProgress(3, 10)


def group(texts: Sequence[str], key: int = 0) -> RolloutGroup:
    """Completions of two tokens each."""
    rollouts = [Rollout(i, [key, i], [-1.0] * 2, [-1.0] * 2, text, "stop", 0) for i, text in enumerate(texts)]
    return RolloutGroup([key], rollouts, key, 0)


def scores(function: Callable[..., Any], rows: Sequence[Row], groups: Sequence[RolloutGroup], **options: Any) -> Scores:
    """By one function; options: of RewardConfig."""
    with Scorer([weighted(function)], RewardConfig(**options)) as scorer:
        return scorer.collect(rows, groups, PROGRESS)


def score(
    function: Callable[..., Any], rows: Sequence[Row], groups: Sequence[RolloutGroup], **options: Any
) -> list[list[float]]:
    """The totals."""
    totals: list[list[float]] = scores(function, rows, groups, **options).totals.tolist()
    return totals
