"""Keys of each task."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainer.config.setting import setting


@dataclass
class TaskConfig:
    """What all tasks have."""

    kind: str = setting("arithmetic")
    eval_rows: int = setting(256, at_least=0)


@dataclass
class ArithmeticConfig(TaskConfig):
    """task=arithmetic"""

    finished_fraction: float = setting(0.35, at_least=0, at_most=1)


@dataclass
class JsonlConfig(TaskConfig):
    """task=jsonl"""

    kind: str = setting("jsonl")
    eval_rows: int = setting(0, at_least=0)
    path: str = setting(MISSING, needs="a file, as in task.path=FILE")
    eval_path: str | None = setting(None)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
