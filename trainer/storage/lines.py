"""Files of JSON lines of which each has its step: metrics.jsonl and completions.jsonl."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.storage.writing import writing


class StepFile:
    """Lines in order of steps; each step's are there once, also after a resume."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Keep the lines up to resume_step; later ones belong to steps that will run again."""
        self.path = path
        partial = path.with_suffix(".tmp")
        with writing(path):
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(_text(line) for line in iterate_lines(path) if line["step"] <= resume_step)
            partial.replace(path)

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Write a step's lines, through to the disk."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(_text, lines))
            file.flush()
            os.fsync(file.fileno())


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, none if it is not there; a last line that a crash cut short is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):
                yield json.loads(text)
