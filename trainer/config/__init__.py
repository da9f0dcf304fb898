"""The configuration: its schema, and what is refused of it before anything loads."""

from trainer.config.checks import parse_config, sampling_params, text_keys, trajectory_keys
from trainer.config.schema import (
    AlgorithmConfig,
    ArithmeticConfig,
    ConfigError,
    CustomRewardConfig,
    HFModelConfig,
    JsonlConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    SamplingConfig,
    TaskConfig,
    TinyModelConfig,
    TrackingConfig,
    TrainerConfig,
    WandbConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ArithmeticConfig",
    "ConfigError",
    "CustomRewardConfig",
    "HFModelConfig",
    "JsonlConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "SamplingConfig",
    "TaskConfig",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainerConfig",
    "WandbConfig",
    "parse_config",
    "sampling_params",
    "text_keys",
    "trajectory_keys",
]
