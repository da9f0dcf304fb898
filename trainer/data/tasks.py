"""Tasks: rows to train on, rows held out, and the reward that goes with them."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config import ArithmeticConfig, ConfigError, DatasetConfig, ReasoningGymConfig, TaskConfig
from trainer.data.arrow import without_nulls
from trainer.data.columns import rows_of
from trainer.data.files import Source, read_records
from trainer.data.procedural import make_problems, worked_example
from trainer.data.prompts import PromptSettings, prompt_settings
from trainer.data.rows import SPLIT_PURPOSE, Row, permutation
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
    prompts: PromptSettings = field(default_factory=PromptSettings)
    """What goes with the prompts of all rows."""


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


def dataset(config: DatasetConfig, seed: int) -> Task:
    """Rows from task.path; held-out ones from task.eval_path or task.eval_split, else eval_rows of them, at random.

    Every row has every column of its file's rows, None where it was left out. Rows with equal prompts are all held out
    or all trained on.
    """
    reward = numeric if config.kind == "gsm8k" else exact_match
    rows = _read_rows(config, "task.path", config.path, config.split, config.subset)
    if config.eval_path is not None or config.eval_split is not None:
        subset = config.subset if config.eval_path is None else None
        held_out = _read_rows(config, "task.eval_path", config.eval_path or config.path, config.eval_split, subset)
        _warn_of_twins(rows, held_out)
        return Task(config.kind, rows, held_out, reward)
    if config.eval_rows >= len(rows):
        raise ConfigError(f"task.eval_rows={config.eval_rows}: {config.path} has {len(rows)} rows; hold out fewer")
    chosen = _held_out(rows, config, seed)
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return Task(config.kind, train, [rows[i] for i in sorted(chosen)], reward)


def _read_rows(config: DatasetConfig, key: str, path: str, split: str | None, subset: str | None) -> list[Row]:
    source = Source(key, path, split, subset, lines=config.kind == "jsonl")
    return rows_of(read_records(source), config, key)


def _prompt_key(row: Row) -> str:
    """Equal for prompts that say the same: null is as good as left out, and text as its parts."""
    messages = row.prompt if isinstance(row.prompt, str) else [_plain_message(message) for message in row.prompt]
    return json.dumps(messages, sort_keys=True)


def _plain_message(message: dict[str, Any]) -> Any:
    plain = without_nulls(message)
    parts = plain.get("content")
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str) for part in parts
    ):
        plain["content"] = "".join(part["text"] for part in parts)
    return plain


def _held_out(rows: list[Row], config: DatasetConfig, seed: int) -> set[int]:
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
    """Refuse an answer that the task's reward cannot compare with. Raises ConfigError naming the row."""
    for row in rows if reward in (exact_match, numeric) else ():
        if row.answer is None:
            raise ConfigError(
                f"task.answer_column: {row.name()} has no answer to compare with; name the column, or use a"
                " reward=custom of your own"
            )
        if reward is numeric and single_number(row.answer) is None:
            shown = repr(row.answer)
            raise ConfigError(
                f"reward=numeric: {row.name()}: answer {shown if len(shown) <= 60 else shown[:60] + '...'} is not a"
                " single number; correct the row, or use reward=exact_match or a reward=custom of your own (with"
                " math-verify, for instance)"
            )


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that the configuration names. Raises ConfigError if its rows cannot be made, read or split."""
    if isinstance(config, ArithmeticConfig):
        return arithmetic(config, seed)
    if isinstance(config, DatasetConfig):
        made = dataset(config, seed)
    else:
        assert isinstance(config, ReasoningGymConfig)
        problems = make_problems(config)
        example = worked_example(config, problems.train_rows)
        made = Task(config.kind, problems.train_rows, problems.eval_rows, problems.reward, example)
    return replace(made, prompts=prompt_settings(config))
