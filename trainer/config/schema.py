"""The typed configuration. conf/ holds the values and says what each means; here is what a value may be.

A field's metadata gives its range, what one without a default needs, and whether a change of it alters the trajectory
of a run that is resumed. An option of a group has its own keys only: OPTIONS has the schema of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING

from rollout import RolloutConfig

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message begins with the key."""


def _setting(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    trajectory: bool = True,
    needs: str | None = None,
) -> T:
    limits = {
        "at_least": at_least, "above": above, "at_most": at_most, "choices": choices, "trajectory": trajectory,
        "needs": needs,
    }  # fmt: skip
    # OmegaConf wants a default for every field; a factory keeps lists apart
    made: T = field(default_factory=lambda: default, metadata=limits)
    return made


@dataclass
class ModelConfig:
    """What all models have."""

    kind: str = _setting("tiny")
    gradient_checkpointing: bool = _setting(False)


@dataclass
class TinyModelConfig(ModelConfig):
    """model=tiny"""

    warm_start_steps: int = _setting(0, at_least=0)
    warm_start_batch_size: int = _setting(64, at_least=1)
    warm_start_lr: float = _setting(1e-3, above=0)


@dataclass
class HFModelConfig(ModelConfig):
    """model=hf"""

    kind: str = _setting("hf")
    path: str = _setting(MISSING, needs="a directory, as in model.path=DIR")


@dataclass
class TaskConfig:
    """What all tasks have."""

    kind: str = _setting("arithmetic")
    eval_rows: int = _setting(256, at_least=0)


@dataclass
class ArithmeticConfig(TaskConfig):
    """task=arithmetic"""

    finished_fraction: float = _setting(0.35, at_least=0, at_most=1)


@dataclass
class JsonlConfig(TaskConfig):
    """task=jsonl"""

    kind: str = _setting("jsonl")
    eval_rows: int = _setting(0, at_least=0)
    path: str = _setting(MISSING, needs="a file, as in task.path=FILE")
    eval_path: str | None = _setting(None)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    """What all rewards have; reward=task, exact_match and numeric have no more."""

    kind: str = _setting("task")
    shuffle: bool = _setting(False)


@dataclass
class CustomRewardConfig(RewardConfig):
    """reward=custom"""

    kind: str = _setting("custom")
    path: str = _setting(MISSING, needs="package.module:function or FILE.py:function")


@dataclass
class AlgorithmConfig:
    prompts_per_step: int = _setting(32, at_least=1)
    group_size: int = _setting(8, at_least=2)
    clip_low: float = _setting(0.2, above=0, at_most=1)
    clip_high: float = _setting(0.2, above=0)
    scale_rewards: str = _setting("group", choices=("group", "none"))
    kl_coef: float = _setting(0.0, at_least=0)
    micro_batch_tokens: int = _setting(4096, at_least=1)


@dataclass
class SamplingConfig:
    temperature: float = _setting(1.0, at_least=0)
    top_k: int = _setting(0, at_least=0)
    top_p: float = _setting(1.0, above=0, at_most=1)
    min_p: float = _setting(0.0, at_least=0, at_most=1)
    max_new_tokens: int = _setting(64, at_least=1)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = _setting(False)


@dataclass
class OptimConfig:
    lr: float = _setting(1e-6, at_least=0)
    beta1: float = _setting(0.9, at_least=0, at_most=1)
    beta2: float = _setting(0.95, at_least=0, at_most=1)
    eps: float = _setting(1e-8, above=0)
    weight_decay: float = _setting(0.0, at_least=0)
    max_grad_norm: float = _setting(1.0, above=0)
    warmup_steps: int = _setting(0, at_least=0)
    schedule: str = _setting("constant", choices=("constant", "linear", "cosine"))


@dataclass
class EvalConfig:
    every: int = _setting(0, at_least=0, trajectory=False)
    max_new_tokens: int | None = _setting(None, at_least=1, trajectory=False)


@dataclass
class CheckpointConfig:
    every: int = _setting(0, at_least=0, trajectory=False)
    keep: int = _setting(2, at_least=1, trajectory=False)


@dataclass
class TrackingConfig:
    """What all dashboards have; tracking=none has no more."""

    kind: str = _setting("none", trajectory=False)


@dataclass
class WandbConfig(TrackingConfig):
    """tracking=wandb"""

    kind: str = _setting("wandb", trajectory=False)
    mode: str = _setting("offline", choices=("offline", "online", "disabled"), trajectory=False)
    project: str = _setting("cowroll", trajectory=False)
    completions: int = _setting(4, at_least=0, trajectory=False)


@dataclass
class TrainerConfig:
    name: str = _setting(MISSING, trajectory=False)
    run_dir: str = _setting(MISSING, trajectory=False)
    seed: int = _setting(0, at_least=0, at_most=2**32 - 1)
    steps: int = _setting(100, at_least=1, trajectory=False)
    resume: str | None = _setting(None, trajectory=False)
    resume_changed: list[str] = _setting([], trajectory=False)  # noqa: RUF009  it is no default, but makes one
    model: ModelConfig = field(default_factory=TinyModelConfig)
    task: TaskConfig = field(default_factory=ArithmeticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


OPTIONS: dict[str, dict[str, type]] = {
    "model": {"tiny": TinyModelConfig, "hf": HFModelConfig},
    "task": {"arithmetic": ArithmeticConfig, "jsonl": JsonlConfig},
    "reward": {
        "task": RewardConfig,
        "exact_match": RewardConfig,
        "numeric": RewardConfig,
        "custom": CustomRewardConfig,
    },
    "tracking": {"none": TrackingConfig, "wandb": WandbConfig},
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
