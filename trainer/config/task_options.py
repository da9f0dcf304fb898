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
class PromptedTaskConfig(TaskConfig):
    """What tasks have that say how their prompts are put."""

    chat: bool = setting(False)
    system_prompt: str | None = setting(None)
    few_shot: Any = None  # a list of examples, or a file of them
    prefill: str | None = setting(None)
    tools: Any = None  # a list of JSON schemas, or a file of them
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = setting(None, at_least=1)


@dataclass
class DatasetConfig(PromptedTaskConfig):
    """task=dataset, gsm8k and jsonl"""

    kind: str = setting("dataset")
    eval_rows: int = setting(0, at_least=0)
    path: str = setting(MISSING, needs="a file, a directory or a dataset of the hub, as in task.path=FILE")
    split: str | None = setting(None)
    subset: str | None = setting(None)
    eval_path: str | None = setting(None)
    eval_split: str | None = setting(None)
    prompt_column: str = setting("prompt")
    answer_column: str | None = setting("answer")
    answer_after: str | None = setting(None)


@dataclass
class ReasoningGymConfig(PromptedTaskConfig):
    """task=reasoning_gym"""

    kind: str = setting("reasoning_gym")
    name: Any = setting(  # noqa: RUF009  a field, not a shared value
        MISSING, needs="a dataset of that library, or a list, as in task.name=[chain_sum,gcd]"
    )
    size: int = setting(2000, at_least=1)
    seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    options: dict[str, Any] = field(default_factory=dict)
    finished_fraction: float = setting(0.35, at_least=0, at_most=1)
