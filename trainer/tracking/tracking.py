"""Where metrics go: metrics.jsonl, the console, and wandb if asked. A tracker that fails never stops training."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

from trainer.config import TrackingConfig, WandbConfig
from trainer.storage.writing import writing

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class Tracker(Protocol):
    """A dashboard."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...
    def finish(self) -> None: ...
    def fail(self, exit_code: int) -> None: ...


class WandbTracker:
    """Weights & Biases, offline unless the configuration says online."""

    def __init__(self, config: WandbConfig, run_dir: Path, name: str, values: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._num_completions = config.completions
        mode = cast(Literal["online", "offline", "disabled"], config.mode)
        self._run = wandb.init(project=config.project, name=name, dir=run_dir, mode=mode, config=values)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = rows[: self._num_completions]
        if not rows:
            return
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._run.log({"completions": table}, step=step)

    def finish(self) -> None:
        self._run.finish()

    def fail(self, exit_code: int) -> None:
        """Finish a run that did not come to its end; the dashboard shows it as failed."""
        self._run.finish(exit_code=exit_code)


class SafeTracker:
    """Any tracker, dropped with a warning at its first failure."""

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker

    def _try(self, method: str, *arguments: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*arguments)
        except Exception as error:  # noqa: BLE001  a dashboard is not worth a run
            logger.warning("tracking failed and is off from now on: %s", error)
            self._tracker = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._try("log", metrics, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if rows:
            self._try("log_completions", rows, step)

    def finish(self) -> None:
        self._try("finish")

    def fail(self, exit_code: int) -> None:
        self._try("fail", exit_code)


def make_tracker(config: TrackingConfig, run_dir: Path, name: str, values: dict[str, Any] | None) -> SafeTracker:
    """The configured tracker; one that cannot start is a warning. values: the run's settings; None: nothing to log."""
    if not isinstance(config, WandbConfig) or values is None:
        return SafeTracker(None)
    try:
        return SafeTracker(WandbTracker(config, run_dir, name, values))
    except Exception as error:  # noqa: BLE001  see above
        logger.warning("tracking=wandb could not start, training goes on without it: %s", error)
        return SafeTracker(None)


class MetricsFile:
    """metrics.jsonl: one line per step, each step once, also after a resume."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Keep the lines up to resume_step; later ones belong to steps that will run again."""
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        partial = path.with_suffix(".tmp")
        with writing(path):
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(path)

    def append(self, metrics: Mapping[str, float]) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in complete]


class Progress:
    """One console line per step, with the time left."""

    _SHOWN: ClassVar = {
        "reward": "reward {:.3f}",
        "eval/pass@1": "eval pass@1 {:.3f}",
        "completions/mean_length": "length {:.1f}",
        "entropy": "entropy {:.3f}",
        "grad_norm": "grad {:.3f}",
        "logprob_gap_max": "gap {:.1g}",
        "rollout/tokens_per_second": "{:.0f} tok/s",
    }

    def __init__(self, start: int, total: int) -> None:
        self.start, self.total = start, total
        self._began = time.monotonic()

    def line(self, metrics: Mapping[str, float], step: int) -> str:
        left = (time.monotonic() - self._began) / (step - self.start) * (self.total - step)
        parts = [
            f"step {step}/{self.total}",
            *(shown.format(metrics[name]) for name, shown in self._SHOWN.items() if name in metrics),
            f"{math.ceil(left)} s left",
        ]
        return "  ".join(parts)
