"""`python -m trainer.inspect`, with the trainer's own arguments: the rows of a run, as its model would see them.

Of each split: how many rows, their columns, the lengths of their prompts, and a few rows rendered. What a run would
refuse of task, reward and lengths ends it with 2, lengths after they were shown. Nothing is written, and no weights are
loaded.
"""

import logging
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from rollout import RolloutError
from trainer.__main__ import compose, refused
from trainer.config import ConfigError, parse_config
from trainer.config.limits import check_device, check_limits
from trainer.data.rows import Row, RowStream
from trainer.run import Inputs, read_inputs

_SHOWN = 3
"""Rows of each split."""
_BINS, _WIDTH = 10, 40
"""Of a histogram: its lines, and the characters of its longest bar."""
_LONG = 200
"""Characters of a value."""


def inspect(raw: DictConfig) -> None:
    """Print it; SystemExit(2) for a configuration that cannot be run."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    try:
        config = parse_config(raw)
        inputs = read_inputs(config)
        show(inputs, config.seed)
        check_limits(config, inputs.described, check_device(config), inputs.lengths["train"], inputs.lengths["eval"])
    except (ConfigError, RolloutError) as error:
        raise refused(error) from error
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(inputs: Inputs, seed: int) -> None:
    """Print both splits, each with its first rows: of those to train on, those that the first step takes."""
    train, held_out = inputs.task.train_rows, inputs.task.eval_rows
    first = RowStream(train, seed).take(0, min(_SHOWN, len(train)))
    for name, rows, shown in (("train", train, first), ("eval", held_out, held_out[:_SHOWN])):
        for line in chain(split_lines(name, rows), *(row_lines(row, inputs.tokenizer) for row in shown)):
            print(line)


def split_lines(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """How many rows there are, their columns, and how long their prompts are."""
    yield f"{name}: {len(rows)} rows"
    if not rows:
        return
    columns = dict.fromkeys(column for row in rows for column in row.columns)
    yield f"  columns for the reward: {', '.join(['answer', *columns])}"
    lengths = [len(row.prompt_ids or ()) for row in rows]
    median = statistics.median(lengths)
    yield f"  tokens of a prompt: min {min(lengths)}, median {median:g}, max {max(lengths)}"
    yield from (f"    {line}" for line in histogram(lengths))


def histogram(lengths: Sequence[int]) -> Iterator[str]:
    """A line for each of at most ten ranges of equal width, with how many there are."""
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // _BINS)
    counts = [0] * -(-(high - low + 1) // width)
    for length in lengths:
        counts[(length - low) // width] += 1
    digits, most = len(str(high)), max(counts)
    for place, count in enumerate(counts):
        start = low + place * width
        bar = "#" * -(-count * _WIDTH // most)
        yield f"{start:>{digits}} .. {min(start + width - 1, high):>{digits}}  {bar:<{_WIDTH}}  {count}"


def row_lines(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A row's columns, and its prompt as text and as ids."""
    yield f"  row {row.source or row.name()}"
    yield f"    answer: {_short(row.answer)}"
    yield from (f"    {name}: {_short(value)}" for name, value in row.columns.items())
    ids = list(row.prompt_ids or ())
    yield f"    prompt, {len(ids)} tokens, special ones in « »:"
    yield from (f"      |{line}" for line in visible(ids, tokenizer).split("\n"))
    yield f"    ids: {' '.join(map(str, ids))}"


def visible(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The ids as text, with marks round special tokens, which text of the same look does not get."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    parts: list[str] = []
    run: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in special:
            run.append(token)
            continue
        parts.append(_decoded(run, tokenizer))
        run = []
        if token is not None:
            parts.append(f"«{_decoded([token], tokenizer)}»")
    return "".join(parts)


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    assert isinstance(text, str)
    return text


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONG else f"{shown[:_LONG]}..."


if __name__ == "__main__":
    compose(inspect)
