"""The configuration: its schema, and what is refused of it before anything loads."""

from trainer.config.algorithm_options import AlgorithmConfig, CispoConfig, ClippedConfig, SapoConfig
from trainer.config.checks import parse_config, sampling_params, text_keys, trajectory_keys
from trainer.config.model_options import AdapterConfig, HFModelConfig, LoraConfig, ModelConfig, TinyModelConfig
from trainer.config.reward_options import (
    CustomRewardConfig,
    FunctionEntry,
    FunctionsRewardConfig,
    MathRewardConfig,
    RegexRewardConfig,
    RewardConfig,
    function_entries,
    score_for,
)
from trainer.config.schema import EvalConfig, OptimConfig, SamplingConfig, TrainerConfig
from trainer.config.setting import ConfigError
from trainer.config.stop_options import StopConfig
from trainer.config.task_options import (
    ArithmeticConfig,
    DatasetConfig,
    PromptedTaskConfig,
    ReasoningGymConfig,
    TaskConfig,
)
from trainer.config.tracking_options import TensorboardConfig, TrackingConfig, WandbConfig

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "ArithmeticConfig",
    "CispoConfig",
    "ClippedConfig",
    "ConfigError",
    "CustomRewardConfig",
    "DatasetConfig",
    "EvalConfig",
    "FunctionEntry",
    "FunctionsRewardConfig",
    "HFModelConfig",
    "LoraConfig",
    "MathRewardConfig",
    "ModelConfig",
    "OptimConfig",
    "PromptedTaskConfig",
    "ReasoningGymConfig",
    "RegexRewardConfig",
    "RewardConfig",
    "SamplingConfig",
    "SapoConfig",
    "StopConfig",
    "TaskConfig",
    "TensorboardConfig",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainerConfig",
    "WandbConfig",
    "function_entries",
    "parse_config",
    "sampling_params",
    "score_for",
    "text_keys",
    "trajectory_keys",
]
