"""Tasks: rows to train on, rows held out, and the reward that goes with them."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config import ArithmeticConfig, ConfigError, JsonlConfig, TaskConfig
from trainer.data.rows import SPLIT_PURPOSE, Row, permutation, read_jsonl
from trainer.rewards.numerals import equal, last_number, single_number

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float]]
"""Called with prompts, completions, completion_ids and the rows' columns, each a list with one entry per completion."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how it is scored unless `reward` says otherwise."""

    name: str
    train_rows: list[Row]
    eval_rows: list[Row]
    reward: RewardFunction
    worked_example: Callable[[Row, float], str] | None = None
    """(row, a uniform number) -> a completion to imitate in a warm start; None: the task has none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template, for all rows."""


def exact_match(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion, without outer white space, is the answer; else 0."""
    return [float(text.strip() == str(want).strip()) for text, want in zip(completions, answer, strict=True)]


def numeric(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion's last number (its last box's, if it has one) equals the answer's; else 0.

    trainer.rewards.numerals says how numbers are read and compared. An answer that is no single number scores 0;
    check_answers refuses it beforehand.
    """

    def score(text: str, want: Any) -> float:
        expected = single_number(want)
        found = None if expected is None else last_number(text)
        return float(expected is not None and found is not None and equal(found, expected))

    return [score(text, want) for text, want in zip(completions, answer, strict=True)]


def final_answer(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if what follows the last "=" of the completion (all of it if there is none) is the answer; else 0."""
    return exact_match([text.rsplit("=", 1)[-1] for text in completions], answer)


def arithmetic(config: ArithmeticConfig, seed: int) -> Task:
    """Sums of two two-digit numbers, such as "47+38=".

    The held-out problems share no pair of operands, in either order, with the others. A worked example adds the ones
    and the tens first: "15+70=85". All but finished_fraction of them stop before the answer.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    if config.eval_rows >= len(pairs):
        raise ConfigError(f"task.eval_rows={config.eval_rows}: there are {len(pairs)} problems in all")
    order = permutation(len(pairs), seed, SPLIT_PURPOSE)
    shuffled = [pairs[i] for i in order]
    # either order of the operands for the held-out problems, both for the others
    held_out = [(b, a) if i % 2 else (a, b) for i, (a, b) in enumerate(shuffled[: config.eval_rows])]
    rest = shuffled[config.eval_rows :]
    train = [ordered for a, b in rest for ordered in dict.fromkeys([(a, b), (b, a)])]

    def row(a: int, b: int) -> Row:
        return Row(f"{a}+{b}=", str(a + b), {"operands": [a, b]})

    def worked_example(problem: Row, uniform: float) -> str:
        a, b = problem.columns["operands"]
        steps = f"{a % 10 + b % 10}+{(a // 10 + b // 10) * 10}"
        return f"{steps}={problem.answer}" if uniform < config.finished_fraction else steps

    return Task("arithmetic", [row(*p) for p in train], [row(*p) for p in held_out], final_answer, worked_example)


def jsonl(config: JsonlConfig, seed: int) -> Task:
    """Rows from task.path; held-out ones from task.eval_path, else eval_rows of them, drawn at random.

    Every row has every field of its file's rows, None where it was left out. Rows with equal prompts are all held out
    or all trained on.
    """
    rows = _with_all_fields(read_jsonl(config.path, "task.path"))
    if config.eval_path is not None:
        held_out = _with_all_fields(read_jsonl(config.eval_path, "task.eval_path"))
        _warn_of_twins(rows, held_out)
        return Task("jsonl", rows, held_out, exact_match)
    if config.eval_rows >= len(rows):
        raise ConfigError(f"task.eval_rows={config.eval_rows}: {config.path} has {len(rows)} rows; hold out fewer")
    chosen = _held_out(rows, config, seed)
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return Task("jsonl", train, [rows[i] for i in sorted(chosen)], exact_match)


def _with_all_fields(rows: list[Row]) -> list[Row]:
    fields: dict[str, Any] = dict.fromkeys(name for row in rows for name in row.columns)
    return [replace(row, columns=fields | row.columns) for row in rows]


def _prompt_key(row: Row) -> str:
    """Equal for prompts that say the same: null is as good as left out, and text as its parts."""
    messages = row.prompt if isinstance(row.prompt, str) else [_plain_message(message) for message in row.prompt]
    return json.dumps(messages, sort_keys=True)


def _plain_message(message: dict[str, Any]) -> Any:
    plain = _without_nulls(message)
    parts = plain.get("content")
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str) for part in parts
    ):
        plain["content"] = "".join(part["text"] for part in parts)
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _held_out(rows: list[Row], config: JsonlConfig, seed: int) -> set[int]:
    """Places of the held-out rows: whole sets of equal prompts in random order, each that still fits in eval_rows."""
    twins: dict[str, list[int]] = {}
    for i in permutation(len(rows), seed, SPLIT_PURPOSE).tolist():
        twins.setdefault(_prompt_key(rows[i]), []).append(i)
    chosen: set[int] = set()
    for places in twins.values():
        if len(chosen) + len(places) <= config.eval_rows:
            chosen.update(places)
    if len(chosen) < config.eval_rows:
        short = f"task.eval_rows={config.eval_rows}: rows with equal prompts stay together, and {config.path} has"
        if not chosen:
            fewest = min(map(len, twins.values()))
            raise ConfigError(f"{short} no prompt in fewer than {fewest} rows; hold out more, or give task.eval_path")
        logger.warning("%s some in several rows: %d are held out", short, len(chosen))
    return chosen


def _warn_of_twins(rows: list[Row], held_out: list[Row]) -> None:
    trained = {_prompt_key(row) for row in rows}
    twins = [row for row in held_out if _prompt_key(row) in trained]
    if twins:
        logger.warning(
            "task.eval_path: %d of %d held-out rows have prompts that are trained on too, such as %s",
            len(twins),
            len(held_out),
            twins[0].name(),
        )


def check_answers(reward: RewardFunction, rows: Sequence[Row]) -> None:
    """Refuse an answer that the numeric reward cannot compare with. Raises ConfigError naming the row."""
    if reward is not numeric:
        return
    for row in rows:
        if single_number(row.answer) is None:
            shown = repr(row.answer)
            raise ConfigError(
                f"reward=numeric: {row.name()}: answer {shown if len(shown) <= 60 else shown[:60] + '...'} is not a"
                " single number; correct the row, or use reward=exact_match or a reward=custom of your own (with"
                " math-verify, for instance)"
            )


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that the configuration names. Raises ConfigError if its rows cannot be read or split."""
    if isinstance(config, JsonlConfig):
        return replace(jsonl(config, seed), chat_template_kwargs=config.chat_template_kwargs)
    assert isinstance(config, ArithmeticConfig)
    return arithmetic(config, seed)
