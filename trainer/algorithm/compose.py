"""From an algorithm's configuration to its parts."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trainer.algorithm.advantages import BASELINES, AdvantageFunction
from trainer.algorithm.aggregation import AGGREGATIONS
from trainer.algorithm.batch import TrainingBatch
from trainer.algorithm.corrections import CORRECTIONS
from trainer.algorithm.divergences import DIVERGENCES
from trainer.algorithm.losses import LossFunction, policy_loss
from trainer.algorithm.objectives import (
    ObjectiveFunction,
    clipped,
    likelihood,
    soft_gate,
    truncated_likelihood,
)
from trainer.algorithm.ratios import RATIOS, token_ratio
from trainer.config import AlgorithmConfig, CispoConfig, ClippedConfig, SapoConfig


def make_advantages(config: AlgorithmConfig) -> AdvantageFunction:
    """What a rollout's reward is worth beside others'."""
    return partial(BASELINES[config.baseline], scale=config.scale_rewards)


def make_objective(config: AlgorithmConfig) -> ObjectiveFunction:
    """What a token is worth."""
    if isinstance(config, ClippedConfig):
        return partial(clipped, low=config.clip_low, high=config.clip_high, dual=config.dual_clip)
    if isinstance(config, CispoConfig):
        return partial(truncated_likelihood, cap=config.ratio_cap)
    if isinstance(config, SapoConfig):
        return partial(soft_gate, tau_positive=config.tau_positive, tau_negative=config.tau_negative)
    return likelihood


def make_loss(config: AlgorithmConfig) -> LossFunction:
    """The loss that the configuration names, of the parts that it names."""
    correct: Callable[[TrainingBatch], Tensor] | None = None
    if config.correction != "none":
        weigh, low, high = CORRECTIONS[config.correction], config.correction_low, config.correction_high
        correct = lambda batch: weigh(batch, low, high)  # noqa: E731
    return partial(
        policy_loss,
        objective=make_objective(config),
        ratio=RATIOS[config.ratio] if isinstance(config, ClippedConfig) else token_ratio,
        aggregate=AGGREGATIONS[config.aggregation],
        correct=correct,
        divergence=DIVERGENCES[config.kl_estimator],
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        entropy_coef=config.entropy_coef,
    )
