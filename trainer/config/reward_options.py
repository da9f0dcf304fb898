"""Keys of each reward."""

from dataclasses import dataclass

from omegaconf import MISSING

from trainer.config.setting import setting


@dataclass
class RewardConfig:
    """What all rewards have; reward=task, exact_match and numeric have no more."""

    kind: str = setting("task")
    shuffle: bool = setting(False)


@dataclass
class CustomRewardConfig(RewardConfig):
    """reward=custom"""

    kind: str = setting("custom")
    path: str = setting(MISSING, needs="package.module:function or FILE.py:function")
