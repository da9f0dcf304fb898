"""The configuration: its schema, and what is refused of it before anything loads."""

from trainer.config.checks import parse_config, sampling_params, text_keys, trajectory_keys
from trainer.config.schema import (
    AlgorithmConfig,
    ConfigError,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    SamplingConfig,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "SamplingConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "parse_config",
    "sampling_params",
    "text_keys",
    "trajectory_keys",
]
