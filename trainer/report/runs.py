"""Runs as a report reads them: from their folders, whether they have ended or not."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config import ConfigError
from trainer.storage.lines import iterate_lines

Points = list[tuple[float, float]]
"""Step and value, by step."""


@dataclass(frozen=True)
class RunRecord:
    """What one run has written so far."""

    path: Path
    label: str
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""
    completions: list[dict[str, Any]]
    """Of completions.jsonl."""
    config: dict[str, str]
    """By full key, as text; empty if there is none."""
    ended: bool
    """It came to its last step."""

    def points(self, name: str) -> Points:
        """A metric at the steps that have it; values that are not finite are left out."""
        return [(line["step"], line[name]) for line in self.lines if _finite(line.get(name))]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.points(name)]

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Each folder's run, with labels that differ. Raises ConfigError for a folder that is none, or damaged."""
    folders = list(dict.fromkeys(Path(path).expanduser().resolve() for path in paths))
    configs = [_config(folder) for folder in folders]
    names = [config.get("name", folder.name) for config, folder in zip(configs, folders, strict=True)]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    return [_read(folder, label, config) for folder, label, config in zip(folders, labels, configs, strict=True)]


def _read(folder: Path, label: str, config: dict[str, str]) -> RunRecord:
    if not (folder / "metrics.jsonl").is_file():
        what = "is no folder" if not folder.is_dir() else "holds no run: it has no metrics.jsonl"
        raise ConfigError(f"RUN: {folder} {what}; give a run_dir, as in outputs/NAME")
    lines, completions = _lines(folder / "metrics.jsonl"), _lines(folder / "completions.jsonl")
    return RunRecord(folder, label, lines, completions, config, (folder / "summary.json").is_file())


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = list(iterate_lines(path))
        if all(isinstance(line, dict) and _finite(line.get("step")) for line in lines):
            return lines
        reason = "a line that is no object with a step"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(f"RUN: {path} cannot be read: {reason}")


def _config(folder: Path) -> dict[str, str]:
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"RUN: {path} cannot be read: {error}") from error
    return _flat(values, "") if isinstance(values, dict) else {}


def _flat(values: dict[Any, Any], prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat
