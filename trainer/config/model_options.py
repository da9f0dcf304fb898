"""Keys of each model, and of the adapter that is trained in the place of its weights."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from trainer.config.setting import ConfigError, setting

ALL_LINEAR = "all-linear"


@dataclass
class ModelConfig:
    """What all models have."""

    kind: str = setting("tiny")
    gradient_checkpointing: bool = setting(False)


@dataclass
class TinyModelConfig(ModelConfig):
    """model=tiny"""

    warm_start_steps: int = setting(0, at_least=0)
    warm_start_batch_size: int = setting(64, at_least=1)
    warm_start_lr: float = setting(1e-3, above=0)


@dataclass
class HFModelConfig(ModelConfig):
    """model=hf"""

    kind: str = setting("hf")
    path: str = setting(MISSING, needs="a directory, as in model.path=DIR")


@dataclass
class AdapterConfig:
    """adapter=none: every weight is trained."""

    kind: str = setting("none")


@dataclass
class LoraConfig(AdapterConfig):
    """adapter=lora"""

    kind: str = setting("lora")
    rank: int = setting(16, at_least=1)
    alpha: int = setting(32, at_least=1)
    target_modules: Any = setting(ALL_LINEAR)  # noqa: RUF009  it is no default, but makes one


def check_targets(config: AdapterConfig) -> None:
    """Raises ConfigError unless an adapter's target_modules are all-linear, or a list of names, each once."""
    if not isinstance(config, LoraConfig) or config.target_modules == ALL_LINEAR:
        return
    names = config.target_modules
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"adapter.target_modules={names!r}: use {ALL_LINEAR}, or a list of names, as in [q_proj,v_proj]"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"adapter.target_modules={names!r}: names a layer twice; name each once")
