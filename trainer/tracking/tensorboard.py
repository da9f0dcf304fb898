"""tracking=tensorboard: event files in run_dir/tensorboard, made from the run's own files."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.storage.lines import iterate_lines
from trainer.tracking.completions import table_row
from trainer.tracking.events import EventFile

FOLDER = "tensorboard"


class TensorboardTracker:
    """Metrics under their names in metrics.jsonl, completions and the configuration as texts.

    A run that goes on begins its file anew with all steps that it keeps, and empties the earlier ones: so each step is
    there once, wherever the run was resumed from.
    """

    def __init__(self, run_dir: Path, values: Mapping[str, Any]) -> None:
        folder = run_dir / FOLDER
        earlier = list(folder.glob("events.out.tfevents.*"))
        self._events = EventFile(folder)
        self._events.add_table("config", [["key", "value"], *_flat(values)], 0)
        for line in iterate_lines(run_dir / "metrics.jsonl"):
            self.log({name: value for name, value in line.items() if name != "step"}, line["step"])
        for step, lines in groupby(iterate_lines(run_dir / "completions.jsonl"), key=lambda line: line["step"]):
            self.log_completions([table_row(line) for line in lines], step)
        for path in earlier:
            _empty(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._events.add_scalars(metrics, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
        cells = [[_verbatim(row.get(column)) for column in columns] for row in rows]
        self._events.add_table("completions", [columns, *cells], step)

    def finish(self) -> None:
        self._events.close()

    def fail(self, exit_code: int) -> None:
        self._events.close()


def _empty(path: Path) -> None:
    """A TensorBoard that is watching the file would wait for it for ever if it went; one emptied before may go."""
    if path.stat().st_size:
        os.truncate(path, 0)
    else:
        path.unlink()


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    rows = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append([f"{prefix}{key}", _verbatim(value if isinstance(value, str) else json.dumps(value))])
    return rows


def _verbatim(value: object) -> str:
    """As a block of code, so that no line of it is taken for Markdown."""
    text = "" if value is None else str(value)
    return "\n".join(f"    {line}" for line in text.split("\n"))
