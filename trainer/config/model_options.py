"""Keys of each model."""

from dataclasses import dataclass

from omegaconf import MISSING

from trainer.config.setting import setting


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
