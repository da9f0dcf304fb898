"""The typed configuration. conf/ holds the values and says what each means; here is what a value may be.

A field's metadata gives its range, and whether a change of it alters the trajectory of a run that is resumed.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

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
) -> T:
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "choices": choices, "trajectory": trajectory}
    # OmegaConf wants a default for every field; a factory keeps lists apart
    made: T = field(default_factory=lambda: default, metadata=limits)
    return made


@dataclass
class ModelConfig:
    kind: str = _setting("tiny", choices=("tiny", "hf"))
    path: str | None = _setting(None)
    gradient_checkpointing: bool = _setting(False)
    warm_start_steps: int = _setting(0, at_least=0)
    warm_start_batch_size: int = _setting(64, at_least=1)
    warm_start_lr: float = _setting(1e-3, above=0)


@dataclass
class TaskConfig:
    kind: str = _setting("arithmetic", choices=("arithmetic", "jsonl"))
    path: str | None = _setting(None)
    eval_path: str | None = _setting(None)
    eval_rows: int = _setting(256, at_least=0)
    finished_fraction: float = _setting(0.35, at_least=0, at_most=1)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    kind: str = _setting("task", choices=("task", "exact_match", "numeric", "custom"))
    path: str | None = _setting(None)
    shuffle: bool = _setting(False)


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
    kind: str = _setting("none", choices=("none", "wandb"), trajectory=False)
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
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
