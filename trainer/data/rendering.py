"""Prompts are rendered once per run and kept: a chat template may print the date, and a run must not change with it."""

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout import ChatPrompt
from rollout.engine import Prompt, encode_prompt
from trainer.config import ConfigError
from trainer.data.columns import TEMPLATE_KWARGS, TOOLS
from trainer.data.prompts import PromptSettings, Text
from trainer.data.rows import Row
from trainer.data.tasks import Task

logger = logging.getLogger(__name__)


def prompt_of(row: Row, settings: PromptSettings) -> Prompt:
    """What the engine encodes for a row.

    Messages (and text, with task.chat) are a chat: the system prompt, the examples as turns behind it and behind a
    system message of the row's own, the row's messages, and the beginning of the assistant's turn. Any other text is
    one text: the system prompt and a blank line, each example with its answer right behind it and a blank line, the
    row's text, the prefill. A row's own template arguments go before the task's.

    Raises ConfigError for what would be left out: template arguments for a text, two system prompts, tools twice.
    """
    tools, own = row.columns.get(TOOLS), row.columns.get(TEMPLATE_KWARGS)
    if not isinstance(tools, list | None):
        raise ConfigError(f"{TOOLS}={tools!r}: give a list of JSON schemas")
    if not isinstance(own, dict | None):
        raise ConfigError(f"{TEMPLATE_KWARGS}={own!r}: give an object of names and values")
    if tools and settings.tools:
        raise ConfigError("task.tools: the row has tools of its own; take out one or the other")
    tools, arguments = tools or settings.tools, {**settings.template_kwargs, **(own or {})}
    if isinstance(row.prompt, str) and not settings.chat:
        for name, given in ((TOOLS, tools), (TEMPLATE_KWARGS, arguments)):
            if given:
                raise ConfigError(
                    f"{name} are for a chat template, and this prompt is text: give messages, or use task.chat=true"
                )
        return _text(row.prompt, settings)
    return ChatPrompt(_messages(row.prompt, settings), tools, arguments, settings.prefill)


def _text(prompt: str, settings: PromptSettings) -> str:
    parts = [settings.system_prompt] if settings.system_prompt else []
    for place, example in enumerate(settings.few_shot, start=1):
        if not isinstance(example.prompt, str):
            raise ConfigError(f"task.few_shot: entry {place} is a chat, and this prompt is text; use task.chat=true")
        parts.append(example.prompt + example.answer)
    return "\n\n".join([*parts, prompt + settings.prefill])


def _messages(prompt: Text, settings: PromptSettings) -> list[dict[str, Any]]:
    messages = _turns(prompt)
    first = 0
    while first < len(messages) and isinstance(messages[first], dict) and messages[first].get("role") == "system":
        first += 1
    system = messages[:first]
    if settings.system_prompt is not None:
        if system:
            raise ConfigError("task.system_prompt: the row has a system message of its own; take out one or the other")
        system = [{"role": "system", "content": settings.system_prompt}]
    shots = [
        turn
        for example in settings.few_shot
        for turn in (*_turns(example.prompt), {"role": "assistant", "content": example.answer})
    ]
    return [*system, *shots, *messages[first:]]


def _turns(prompt: Text) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def render_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    kind: str,
    settings: PromptSettings | None = None,
) -> list[Row]:
    """The rows with the ids of their prompts; ConfigError names a row that cannot be rendered. kind: train or eval."""
    rendered, settings = [], settings or PromptSettings()
    for row in rows:
        try:
            ids = encode_prompt(prompt_of(row, settings), tokenizer, vocab_size)
            rendered.append(replace(row, prompt_ids=array("i", ids)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"task: {kind} row {row.name()}: {error}") from error
    _warn_of_special_tokens([row for row in rows if settings.chat or not isinstance(row.prompt, str)], tokenizer, kind)
    return rendered


def _warn_of_special_tokens(chats: Sequence[Row], tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    """A tokenizer makes special tokens of text that reads like them, which in a message may end its turn.

    A text that is no chat may well have been rendered from a template before.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    found = [row for row in chats if any(token in text for text in _said(row.prompt) for token in special)]
    if found:
        logger.warning(
            "task: %d %s rows have messages with text that reads like a special token and becomes one, such as %s",
            len(found), kind, found[0].name(),
        )  # fmt: skip


def _said(prompt: Text) -> list[str]:
    return [str(message.get("content")) for message in _turns(prompt)]


def without_long_prompts(task: Task) -> Task:
    """The rendered task without the rows of more than task.max_prompt_tokens; says how many, and names the longest.

    Raises ConfigError if none is left.
    """
    limit = task.prompts.max_tokens
    return replace(
        task, train_rows=_short(task.train_rows, limit, "train"), eval_rows=_short(task.eval_rows, limit, "eval")
    )


def _short(rows: list[Row], limit: int | None, kind: str) -> list[Row]:
    lengths = [len(row.prompt_ids or ()) for row in rows]
    if limit is None or max(lengths, default=0) <= limit:
        return rows
    longest = rows[lengths.index(max(lengths))].name()
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    what = f"task.max_prompt_tokens={limit}"
    if not kept:
        raise ConfigError(f"{what}: no {kind} row has as few; the shortest has {min(lengths)} tokens")
    logger.warning(
        "%s: %d of %d %s rows are longer and left out; the longest has %d tokens: %s",
        what, len(rows) - len(kept), len(rows), kind, max(lengths), longest,
    )  # fmt: skip
    return kept


def kept_prompts(task: Task) -> dict[str, Tensor]:
    """What a checkpoint keeps of a rendered task: per kind of rows all ids, one after the other, and the lengths."""
    tensors = {}
    for kind, rows in (("train", task.train_rows), ("eval", task.eval_rows)):
        ids = array("i")
        for row in rows:
            ids.extend(row.prompt_ids or ())
        tensors[f"{kind}/ids"] = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.zeros(0, dtype=torch.int32)
        tensors[f"{kind}/lengths"] = torch.tensor([len(row.prompt_ids or ()) for row in rows], dtype=torch.int32)
    return tensors


def restore_prompts(rows: Sequence[Row], kept: Mapping[str, Tensor], kind: str) -> list[Row]:
    """The rows with the ids that were kept; ConfigError if they are of other rows."""
    lengths = kept[f"{kind}/lengths"].tolist()
    if len(lengths) != len(rows) or sum(lengths) != len(kept[f"{kind}/ids"]):
        raise ConfigError(f"resume: prompts are kept of {len(lengths)} {kind} rows, and the task has {len(rows)}")
    ids = array("i", kept[f"{kind}/ids"].numpy().tobytes())
    ends = list(accumulate(lengths))
    return [
        replace(row, prompt_ids=ids[end - length : end]) for row, length, end in zip(rows, lengths, ends, strict=True)
    ]


def render_task(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    kept: Mapping[str, Tensor] | None,
    changed: Collection[str],
) -> Task:
    """The task with its prompts as ids: those in `kept`, where the data and what renders it have not changed."""

    def rows(given: list[Row], kind: str, name: str) -> list[Row]:
        if kept is None or set(changed) & {name, "text around prompts", "tokenizer", "chat template"}:
            return render_rows(given, tokenizer, vocab_size, kind, task.prompts)
        return restore_prompts(given, kept, kind)

    return replace(
        task,
        train_rows=rows(task.train_rows, "train", "training data"),
        eval_rows=rows(task.eval_rows, "eval", "held-out data"),
    )
