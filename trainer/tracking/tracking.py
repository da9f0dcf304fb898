"""Where metrics go: metrics.jsonl, the console, and a dashboard if asked. A tracker that fails never stops training."""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

from trainer.config import TensorboardConfig, TrackingConfig, WandbConfig
from trainer.storage.lines import iterate_lines
from trainer.tracking.tensorboard import TensorboardTracker

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
        mode = cast(Literal["online", "offline", "disabled"], config.mode)
        self._run = wandb.init(project=config.project, name=name, dir=run_dir, mode=mode, config=values)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
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
    """The configured tracker; one that cannot start is a warning. values: the run's settings; None: nothing to log.

    The run's own files already have the lines that the run goes on from, and no others.
    """
    tracker: Tracker | None = None
    try:
        if isinstance(config, WandbConfig) and values is not None:
            tracker = WandbTracker(config, run_dir, name, values)
        elif isinstance(config, TensorboardConfig) and values is not None:
            tracker = TensorboardTracker(run_dir, values)
    except Exception as error:  # noqa: BLE001  see above
        logger.warning("tracking=%s could not start, training goes on without it: %s", config.kind, error)
    return SafeTracker(tracker)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    return list(iterate_lines(path))


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
