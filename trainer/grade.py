"""`python -m trainer.grade FILE reward=...`: what a reward gives to the completions in a file, without a model.

Each line of FILE is an object with prompt, completion, answer and any further fields. Failures are shown by row, and
end nothing. Exit status: 0 no function failed, 1 some did, 2 a configuration or a file that cannot be used.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from rollout import Rollout, RolloutError, RolloutGroup
from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import ConfigError, DatasetConfig, RewardConfig, TaskConfig, parse_config
from trainer.config.names import as_typed
from trainer.config.reward_options import POLICIES
from trainer.data.columns import rows_of
from trainer.data.files import Source, read_records
from trainer.data.rows import Row
from trainer.data.tasks import Task, exact_match, make_task
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.functions import check_functions, make_functions
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores

USAGE = "python -m trainer.grade FILE [--json] [reward=numeric] [reward.KEY=VALUE] [task=jsonl task.path=FILE] ..."
_WIDTH = 40
"""Characters of a text in the table."""


def grade(path: str, overrides: Sequence[str]) -> tuple[list[Row], list[str], Scores]:
    """Rows of the file, their completions, and their scores, [rows, 1]. Raises ConfigError or RolloutError."""
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIRECTORY)):
            config = parse_config(compose("config", as_typed(overrides)))
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    rows, texts = _read(path, config.task)
    functions = make_functions(config.reward, make_task(config.task, config.seed))
    for one in functions:
        if one.takes is not None and "completion_ids" in one.takes:
            raise ConfigError(f"reward: {one.name} wants completion_ids, which only a model's tokenizer gives")
    check_functions(functions, Task("file", rows, [], exact_match))
    groups = [RolloutGroup([], [Rollout(0, [], [], [], text, "stop", 0)], key, 0) for key, text in enumerate(texts)]
    with Scorer(functions, _shown(config.reward)) as scorer:
        return rows, texts, scorer.collect(rows, groups, TrainingProgress(0, config.steps))


def _shown(config: RewardConfig) -> RewardConfig:
    """What would end a run is no score here."""
    changed: dict[str, Any] = {name: "skip" for name in POLICIES if getattr(config, name) == "error"}
    return dataclasses.replace(config, **changed)


def _read(path: str, task: TaskConfig) -> tuple[list[Row], list[str]]:
    """Rows of a file that a task could read, with the task's names of columns, and their completions."""
    names = task if isinstance(task, DatasetConfig) else DatasetConfig()
    rows, texts = [], []
    for row in rows_of(read_records(Source("FILE", path)), names, "FILE"):
        columns = dict(row.columns)
        text = columns.pop("completion", None)
        if not isinstance(text, str):
            raise ConfigError(f"FILE: {row.source}: completion={text!r}: give text")
        rows.append(dataclasses.replace(row, columns=columns))
        texts.append(text)
    return rows, texts


def _records(rows: Sequence[Row], scores: Scores) -> list[dict[str, Any]]:
    """One for each row: where it is, its score and each function's, null for none, and what failed."""
    failures: list[dict[str, str]] = [{} for _ in rows]
    for name, of_one in scores.failures.items():
        for i, _, text in of_one:
            failures[i][name] = text
    columns = {name: values.flatten().tolist() for name, values in scores.parts.items()}
    return [
        {
            "row": row.source,
            "reward": float(scores.totals[i, 0]) if scores.scored[i, 0] else None,
            "rewards": {name: None if values[i] != values[i] else values[i] for name, values in columns.items()},
            "failures": failures[i],
        }
        for i, row in enumerate(rows)
    ]


def _table(rows: Sequence[Row], texts: Sequence[str], scores: Scores) -> str:
    """A line for each row, what failed on lines below it, and the metrics."""
    names = list(scores.parts)
    lines = [["row", "reward", *names, "answer", "completion"]]
    notes: dict[int, list[str]] = {}
    for row, text, record in zip(rows, texts, _records(rows, scores), strict=True):
        values = [record["reward"], *record["rewards"].values()]
        numbers = ["-" if value is None else f"{value:.4g}" for value in values]
        notes[len(lines)] = list(record["failures"].values())
        lines.append([row.source, *numbers, _short(str(row.answer)), _short(text)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = []
    for place, line in enumerate(lines):
        shown.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        shown += [f"    {note}" for note in notes.get(place, ())]
    shown.append("  ".join(f"{name} {value:.4g}" for name, value in scores.metrics().items()))
    return "\n".join(shown)


def _short(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= _WIDTH else quoted[: _WIDTH - 4] + '..."'


def main(arguments: Sequence[str]) -> int:
    files = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    flags = {argument for argument in arguments if argument.startswith("-")}
    if len(files) != 1 or not flags <= {"--json"}:
        print(f"usage: {USAGE}", file=sys.stderr)
        return 2
    logging.getLogger("trainer.rewards.scorer").setLevel(logging.ERROR)  # failures stand in the table
    try:
        rows, texts, scores = grade(files[0], [a for a in arguments if a not in (files[0], "--json")])
    except (ConfigError, RolloutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags:
        print("\n".join(json.dumps(record) for record in _records(rows, scores)))
    else:
        print(_table(rows, texts, scores))
    return 1 if any(scores.failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
