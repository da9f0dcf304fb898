"""Prompts are rendered once per run and kept: a chat template may print the date, and a run must not change with it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout import ChatPrompt
from rollout.engine import Prompt, encode_prompt
from trainer.config import ConfigError
from trainer.data.rows import Row
from trainer.data.tasks import Task

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
"""Fields of a row that go to its chat template, beside being columns for rewards."""


def prompt_of(row: Row, template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
    """The row's prompt; messages get the row's tools, and the arguments of all rows overridden by its own.

    template_kwargs: task.chat_template_kwargs. Raises ConfigError for fields of the wrong kind, and for arguments of a
    prompt that is text.
    """
    tools, own = row.columns.get(TOOLS), row.columns.get(TEMPLATE_KWARGS)
    if not isinstance(tools, list | None):
        raise ConfigError(f"{TOOLS}={tools!r}: give a list of JSON schemas")
    if not isinstance(own, dict | None):
        raise ConfigError(f"{TEMPLATE_KWARGS}={own!r}: give an object of names and values")
    arguments = {**(template_kwargs or {}), **(own or {})}
    if isinstance(row.prompt, str):
        for name, given in ((TOOLS, tools), (TEMPLATE_KWARGS, arguments)):
            if given:
                raise ConfigError(f"{name} are for a chat template, and this prompt is text: give messages")
        return row.prompt
    return ChatPrompt(row.prompt, tools, arguments)


def render_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    kind: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows with the ids of their prompts; ConfigError names a row that cannot be rendered. kind: train or eval."""
    rendered = []
    for row in rows:
        try:
            ids = encode_prompt(prompt_of(row, template_kwargs), tokenizer, vocab_size)
            rendered.append(replace(row, prompt_ids=array("i", ids)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"task: {kind} row {row.name()}: {error}") from error
    return rendered


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
