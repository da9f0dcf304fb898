"""The typed configuration. conf/ holds the values and says what each means; here is what a value may be.

A field's metadata gives its range, what one without a default needs, and whether a change of it alters the trajectory
of a run that is resumed. An option of a group has its own keys only: OPTIONS has the schema of each, from a module for
each group.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING

from rollout import RolloutConfig
from trainer.config.algorithm_options import ALGORITHMS, AlgorithmConfig, ClippedConfig
from trainer.config.model_options import AdapterConfig, HFModelConfig, LoraConfig, ModelConfig, TinyModelConfig
from trainer.config.reward_options import (
    CustomRewardConfig,
    FunctionsRewardConfig,
    MathRewardConfig,
    RegexRewardConfig,
    RewardConfig,
)
from trainer.config.setting import setting
from trainer.config.stop_options import StopConfig
from trainer.config.task_options import ArithmeticConfig, DatasetConfig, ReasoningGymConfig, TaskConfig
from trainer.config.tracking_options import TensorboardConfig, TrackingConfig, WandbConfig


@dataclass
class SamplingConfig:
    temperature: float = setting(1.0, at_least=0)
    top_k: int = setting(0, at_least=0)
    top_p: float = setting(1.0, above=0, at_most=1)
    min_p: float = setting(0.0, at_least=0, at_most=1)
    max_new_tokens: int = setting(64, at_least=1)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = setting(False)


@dataclass
class OptimConfig:
    lr: float = setting(1e-6, at_least=0)
    beta1: float = setting(0.9, at_least=0, at_most=1)
    beta2: float = setting(0.95, at_least=0, at_most=1)
    eps: float = setting(1e-8, above=0)
    weight_decay: float = setting(0.0, at_least=0)
    max_grad_norm: float = setting(1.0, above=0)
    warmup_steps: int = setting(0, at_least=0)
    schedule: str = setting("constant", choices=("constant", "linear", "cosine"))


@dataclass
class EvalConfig:
    every: int = setting(0, at_least=0, trajectory=False)
    samples: int = setting(1, at_least=1, trajectory=False)
    temperature: float = setting(0.0, at_least=0, trajectory=False)
    top_k: int = setting(0, at_least=0, trajectory=False)
    top_p: float = setting(1.0, above=0, at_most=1, trajectory=False)
    min_p: float = setting(0.0, at_least=0, at_most=1, trajectory=False)
    max_new_tokens: int | None = setting(None, at_least=1, trajectory=False)
    pass_reward: float = setting(1.0, trajectory=False)
    by: str | None = setting(None, trajectory=False)


@dataclass
class CheckpointConfig:
    every: int = setting(0, at_least=0, trajectory=False)
    keep: int = setting(2, at_least=1, trajectory=False)
    keep_best: str | None = setting(None, trajectory=False)


@dataclass
class TrainerConfig:
    name: str = setting(MISSING, trajectory=False)
    run_dir: str = setting(MISSING, trajectory=False)
    seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    steps: int = setting(100, at_least=1, trajectory=False)
    resume: str | None = setting(None, trajectory=False)
    resume_changed: list[str] = setting([], trajectory=False)  # noqa: RUF009  it is no default, but makes one
    model: ModelConfig = field(default_factory=TinyModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=ArithmeticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=ClippedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


OPTIONS: dict[str, dict[str, type]] = {
    "model": {"tiny": TinyModelConfig, "hf": HFModelConfig},
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "task": {
        "arithmetic": ArithmeticConfig,
        "dataset": DatasetConfig,
        "gsm8k": DatasetConfig,
        "jsonl": DatasetConfig,
        "reasoning_gym": ReasoningGymConfig,
    },
    "reward": {
        "task": RewardConfig,
        "exact_match": RewardConfig,
        "numeric": RewardConfig,
        "regex": RegexRewardConfig,
        "math": MathRewardConfig,
        "custom": CustomRewardConfig,
        "functions": FunctionsRewardConfig,
    },
    "algorithm": dict(ALGORITHMS),
    "tracking": {"none": TrackingConfig, "tensorboard": TensorboardConfig, "wandb": WandbConfig},
}
"""The groups whose options have keys of their own: what an option's keys are, by the group's `kind`."""


def default_option(group: str) -> str:
    """The option that a group has where none is named."""
    kind: str = getattr(TrainerConfig(), group).kind
    return kind


def every_key(node: type = TrainerConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that some option has, by its full name, with its type; the same key once for each option."""
    for name, kind in get_type_hints(node).items():
        if not is_dataclass(kind):
            yield prefix + name, kind
            continue
        assert isinstance(kind, type)
        for schema in OPTIONS.get(name, {name: kind}).values():
            yield from every_key(schema, f"{prefix}{name}.")


def options_with(group: str, key: str) -> list[str]:
    """The options of a group that have a key; empty if none has, or the group has no keys by option."""
    return [kind for kind, schema in OPTIONS.get(group, {}).items() if key in {f.name for f in fields(schema)}]
