"""The checkpoints that lie in a run's folder: which are the program's own, and which are kept."""

import json
import re
import shutil
from pathlib import Path

from trainer.config import ConfigError

METRICS_ASIDE = "metrics.before-resume.jsonl"
"""Metrics of steps that a resumed run does again, until its first checkpoint."""

NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,})", re.ASCII)
WRITING, REPLACED, _DROPPED = ".writing-", ".replaced-", ".dropped-"
_LEFT = re.compile(r"\.(?:writing|replaced|dropped)-(?:\d{6}|[1-9]\d{6,})", re.ASCII)
"""What a process that died may have left; anything else is somebody's."""


def checkpoint_root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def own_folders(run_dir: Path) -> dict[Path, int]:
    """Folders of the program's own names and their steps, the first first; `step-best` or a backup is somebody's."""
    root = checkpoint_root(run_dir)
    matches = [(path, NAME.fullmatch(path.name)) for path in (root.iterdir() if root.is_dir() else ())]
    steps = {path: int(match[1]) for path, match in matches if match is not None and path.is_dir()}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, the oldest first."""
    return [path for path in own_folders(run_dir) if (path / "trainer.json").is_file()]


def recover(run_dir: Path) -> None:
    """Finish what a process that died in the middle of it began; for the one process that has the folder."""
    root = checkpoint_root(run_dir)
    left = [path for path in (root.iterdir() if root.is_dir() else ()) if _LEFT.fullmatch(path.name)]
    for path in left:
        if not path.is_dir():
            raise ConfigError(f"run_dir: {path} is no folder, and the run makes one of that name; move it away")
    for path in left:
        target = root / f"step-{path.name.rpartition('-')[2]}"
        if path.name.startswith(REPLACED) and not target.exists():
            path.rename(target)
        elif path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def _drop(path: Path) -> None:
    """Remove a checkpoint; at no moment is there half of one under its name."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.rename(path.with_name(path.name.replace("step-", _DROPPED)))
    shutil.rmtree(doomed)


def best_checkpoint(run_dir: Path) -> Path | None:
    """The one of the highest score, the last of several; None if none has a score."""
    scores: dict[Path, float] = {}
    for path in list_checkpoints(run_dir):
        try:
            score = json.loads((path / "trainer.json").read_text()).get("score")
        except (OSError, ValueError, AttributeError):
            continue  # a damaged one is nobody's best; a resume from it says what is wrong
        if isinstance(score, float):
            scores[path] = score
    return max(reversed(scores), key=lambda path: scores[path], default=None)


def drop_replaced(run_dir: Path, step: int, keep: int) -> None:
    """With the checkpoint of `step` on the disk: remove those of steps run again, and all but the last `keep` and the
    best."""
    folders = own_folders(run_dir)
    # the last first: stopped in between, the newest one left is whole, with all that led to it
    for path in [path for path, number in reversed(folders.items()) if number > step]:
        _drop(path)
    (run_dir / METRICS_ASIDE).unlink(missing_ok=True)
    oldest = list_checkpoints(run_dir)[-keep:][0]
    best = best_checkpoint(run_dir)
    for path in [path for path, number in folders.items() if number < folders[oldest] and path != best]:
        _drop(path)
