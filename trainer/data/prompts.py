"""How a task's prompts are put: what its settings add to each row's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ConfigError, DatasetConfig, PromptedTaskConfig
from trainer.data.columns import is_chat
from trainer.data.files import Source, read_records
from trainer.data.json_text import Record

Text = str | list[dict[str, Any]]
"""A prompt: text, or messages."""


@dataclass(frozen=True)
class Example:
    """One of the problems with answers that stand before a prompt."""

    prompt: Text
    answer: str


@dataclass(frozen=True)
class PromptSettings:
    """What goes with every prompt of a task. trainer.data.rendering says where each part stands."""

    chat: bool = False
    """Text is the user's turn of a chat."""
    system_prompt: str | None = None
    few_shot: Sequence[Example] = ()
    prefill: str = ""
    """Begins the assistant's turn, or stands behind a text: part of the prompt, not of completions."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    """Of a rendered prompt; longer ones are left out."""


def prompt_settings(config: PromptedTaskConfig) -> PromptSettings:
    """The settings, with the files that they name read. Raises ConfigError by key."""
    return PromptSettings(
        config.chat,
        config.system_prompt,
        _examples(config),
        config.prefill or "",
        _tools(config),
        config.chat_template_kwargs,
        config.max_prompt_tokens,
    )


def _examples(config: PromptedTaskConfig) -> list[Example]:
    """Examples of a file have the task's own columns; their answers are whole, also with task.answer_after."""
    key, given = "task.few_shot", config.few_shot
    prompt, answer = "prompt", "answer"
    if isinstance(given, str) and isinstance(config, DatasetConfig):
        prompt, answer = config.prompt_column, config.answer_column or answer
    return [_example(record, prompt, answer, key) for record in _listed(given, key, "a list of {prompt, answer}")]


def _example(record: Record, prompt: str, answer: str, key: str) -> Example:
    where, values = f"{key}: {record.source}", record.values
    if not isinstance(values, Mapping) or not {prompt, answer} <= values.keys():
        raise ConfigError(f"{where}: an example is an object with {prompt} and {answer}, not {_short(values)}")
    asked, said = values[prompt], values[answer]
    if not isinstance(asked, str) and not is_chat(asked):
        raise ConfigError(f"{where}: {prompt}={_short(asked)}: give text, or a list of messages; put numbers in quotes")
    # a float no longer shows how it was written
    if isinstance(said, bool) or not isinstance(said, str | int):
        raise ConfigError(f"{where}: {answer}={_short(said)}: give text; put numbers in quotes")
    return Example(asked, str(said))


def _tools(config: PromptedTaskConfig) -> list[dict[str, Any]] | None:
    tools = [record.values for record in _listed(config.tools, "task.tools", "a list of JSON schemas")]
    for tool in tools:
        if not isinstance(tool, dict):
            raise ConfigError(f"task.tools: {_short(tool)}: a tool is an object, its JSON schema")
    return tools or None


def _listed(given: Any, key: str, what: str) -> list[Record]:
    """What a setting lists, or the rows of the file that it names."""
    if given is None:
        return []
    if isinstance(given, str):
        return read_records(Source(key, given))
    if not isinstance(given, list):
        raise ConfigError(f"{key}={_short(given)}: give {what}, or a file of them")
    return [Record(value, f"entry {place}") for place, value in enumerate(given, start=1)]


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
