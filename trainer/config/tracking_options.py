"""Keys of each dashboard."""

from dataclasses import dataclass

from trainer.config.setting import setting


@dataclass
class TrackingConfig:
    """What all dashboards have; tracking=none has no more."""

    kind: str = setting("none", trajectory=False)
    completions: int = setting(4, at_least=0, trajectory=False)


@dataclass
class TensorboardConfig(TrackingConfig):
    """tracking=tensorboard"""

    kind: str = setting("tensorboard", trajectory=False)


@dataclass
class WandbConfig(TrackingConfig):
    """tracking=wandb"""

    kind: str = setting("wandb", trajectory=False)
    mode: str = setting("offline", choices=("offline", "online", "disabled"), trajectory=False)
    project: str = setting("cowroll", trajectory=False)
