"""From a file's columns to rows: which are prompt and answer, as the task's settings say."""

import json
from collections.abc import Sequence
from typing import Any

from trainer.config import ConfigError, DatasetConfig
from trainer.data.arrow import without_nulls
from trainer.data.json_text import Record
from trainer.data.rows import Row

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
"""Columns that go to a row's chat template, beside being columns for rewards."""
_RESERVED = ("prompts", "completions", "completion_ids", "answer")


def rows_of(records: Sequence[Record], config: DatasetConfig, key: str) -> list[Row]:
    """The rows, each with all columns that any of them has, None where it lacks one.

    Raises ConfigError with key and place for a row without prompt or answer, and for columns that would hide what
    rewards are called with.
    """
    for record in records:
        if not isinstance(record.values, dict):
            kind = type(record.values).__name__
            raise ConfigError(f"{key}: {record.source}: a row is an object with prompt and answer, not {kind}")
    names = list(dict.fromkeys(name for record in records for name in record.values))
    others = [name for name in names if name not in (config.prompt_column, config.answer_column)]
    rows = [_row(record, config, f"{key}: {record.source}", names, others) for record in records]
    for name in others:
        if name in _RESERVED:
            place = next(record.source for record in records if name in record.values)
            raise ConfigError(f"{key}: {place}: field {name!r} is what rewards are called with; rename it")
    return rows


def _row(record: Record, config: DatasetConfig, where: str, names: Sequence[str], others: Sequence[str]) -> Row:
    values = record.values
    given: dict[str, Any] = {}
    for setting in ("prompt_column", "answer_column"):
        name = getattr(config, setting)
        if name is not None and values.get(name) is None:
            hint = f"; the columns are {', '.join(names)}: name one by task.{setting}" if name not in names else ""
            raise ConfigError(f"{where}: the row has no {name!r}{hint}")
        given[setting] = None if name is None else values[name]
    prompt, answer = given["prompt_column"], given["answer_column"]
    columns = {name: values.get(name) for name in others}
    if not (isinstance(prompt, str) or is_chat(prompt)):
        name = config.prompt_column
        raise ConfigError(f"{where}: {name} is neither text nor a list of messages with role and content")
    if record.filled:
        prompt = without_nulls(prompt)
        columns |= {name: without_nulls(columns[name]) for name in (TOOLS, TEMPLATE_KWARGS) if name in columns}
    if config.answer_column == config.prompt_column:
        prompt, answer = _last_turn(prompt, config.prompt_column, where)
    try:
        json.dumps(prompt, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        message = f"{where}: {config.prompt_column} has half a surrogate pair, which is no character"
        raise ConfigError(message) from error
    if config.answer_after is not None:
        answer = _behind(answer, config.answer_after, where)
    return Row(prompt, answer, columns, record.source)


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages, in form."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in prompt)


def _last_turn(messages: Any, name: str, where: str) -> tuple[Any, str]:
    """A conversation without the assistant's last turn, and that turn's text."""
    last = messages[-1] if isinstance(messages, list) else {}
    if len(messages) < 2 or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ConfigError(
            f"{where}: {name} is to give prompt and answer (task.answer_column={name}), and does not end in a message"
            " of the assistant with text"
        )
    return messages[:-1], last["content"]


def _behind(answer: Any, marker: str, where: str) -> str:
    """What follows the last marker, without outer white space."""
    _, found, behind = answer.rpartition(marker) if isinstance(answer, str) else ("", "", "")
    if not found or not behind.strip():
        shown = repr(answer)
        shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
        raise ConfigError(f"{where}: nothing follows task.answer_after={marker!r} in the answer {shown}")
    return str(behind.strip())
