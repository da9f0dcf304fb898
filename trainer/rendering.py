"""Prompts are rendered once per run and kept: a chat template may print the date, and a run must not change with it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout.prompts import encode_prompt
from trainer.config import ConfigError
from trainer.rows import Row
from trainer.tasks import Task


def render_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of one row's prompt."""
    return encode_prompt(row.prompt, tokenizer, len(tokenizer))


def render_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, kind: str) -> list[Row]:
    """The rows with the ids of their prompts; ConfigError names a row that cannot be rendered. kind: train or eval."""
    rendered = []
    for i, row in enumerate(rows):
        try:
            rendered.append(replace(row, prompt_ids=array("i", render_row(row, tokenizer))))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"task: {kind} row {i}: {error}") from error
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
