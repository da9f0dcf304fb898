"""Tasks: rows to train on, rows held out, and the reward that goes with them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trainer.config import ConfigError, TaskConfig
from trainer.rows import SPLIT_PURPOSE, Row, permutation, read_jsonl

RewardFunction = Callable[..., list[float]]
"""Called with prompts, completions, completion_ids and the rows' columns, each a list with one entry per completion."""

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Task:
    """What is trained, and how it is scored unless `reward` says otherwise."""

    name: str
    train_rows: list[Row]
    eval_rows: list[Row]
    reward: RewardFunction
    worked_example: Callable[[Row, float], str] | None = None
    """(row, a uniform number) -> a completion to imitate in a warm start; None: the task has none."""


def exact_match(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion, without outer white space, is the answer; else 0."""
    return [float(text.strip() == str(want).strip()) for text, want in zip(completions, answer, strict=True)]


def numeric(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion's last number equals the answer's (integers exactly, others to one in a million); else 0."""

    def score(text: str, want: Any) -> float:
        found, wanted = _NUMBER.findall(text), _NUMBER.findall(str(want))
        if not found or not wanted:
            return 0.0
        got, expected = (Decimal(number.replace(",", "")) for number in (found[-1], wanted[-1]))
        if got == got.to_integral_value() and expected == expected.to_integral_value():
            return float(got == expected)
        return float(math.isclose(got, expected, rel_tol=1e-6))

    return [score(text, want) for text, want in zip(completions, answer, strict=True)]


def final_answer(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if what follows the last "=" of the completion (all of it if there is none) is the answer; else 0."""
    return exact_match([text.rsplit("=", 1)[-1] for text in completions], answer)


def arithmetic(config: TaskConfig, seed: int) -> Task:
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


def jsonl(config: TaskConfig, seed: int) -> Task:
    """Rows from task.path; held-out ones from task.eval_path, else eval_rows of them, drawn at random."""
    assert config.path is not None
    rows = read_jsonl(config.path, "task.path")
    if config.eval_path is not None:
        return Task("jsonl", rows, read_jsonl(config.eval_path, "task.eval_path"), exact_match)
    if config.eval_rows >= len(rows):
        raise ConfigError(f"task.eval_rows={config.eval_rows}: {config.path} has {len(rows)} rows; hold out fewer")
    order = permutation(len(rows), seed, SPLIT_PURPOSE)
    held_out, rest = order[: config.eval_rows], order[config.eval_rows :]
    return Task("jsonl", [rows[i] for i in sorted(rest)], [rows[i] for i in sorted(held_out)], exact_match)


def make_task(config: TaskConfig, seed: int) -> Task:
    return {"arithmetic": arithmetic, "jsonl": jsonl}[config.kind](config, seed)
