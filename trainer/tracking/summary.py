"""What a run came to: summary.json, and the same on the console."""

import json
import logging
from typing import Any

from trainer.run import Run
from trainer.storage.writing import writing
from trainer.tracking.tracking import read_metrics

logger = logging.getLogger(__name__)

_WINDOW = 10


def summarise(run: Run) -> dict[str, Any]:
    """Figures over the whole run, the steps before a resume included; seconds are those of this process."""
    lines = read_metrics(run.metrics_file.path)
    steps = [line for line in lines if line["step"] > 0]
    rewards = [line["reward"] for line in steps if "reward" in line]
    evals = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    stats = run.engine.stats()
    seconds = run.timer.total
    total = sum(seconds.get(phase, 0.0) for phase in ("load", "step", "eval", "checkpoint"))
    figures = {
        "steps": len(steps),
        f"reward_first{_WINDOW}": _mean(rewards[:_WINDOW]),
        f"reward_last{_WINDOW}": _mean(rewards[-_WINDOW:]),
        "eval_pass@1_before": evals[0] if evals else None,
        "eval_pass@1_after": evals[-1] if evals else None,
        "tokens_per_second": stats.tokens_per_second,
        "kv_cache_usage_max": max((line["rollout/kv_cache_usage"] for line in steps), default=None),
        "blocks_shared_max": max((line["rollout/blocks_shared"] for line in steps), default=None),
        "logprob_gap_max": max((line["logprob_gap_max"] for line in steps), default=None),
        "memory_predicted_bytes": run.memory.ledger.peak,
        "memory_peak_bytes": max((line["memory/peak_bytes"] for line in steps), default=None),
        "exact": stats.exact,
        "exact_reason": stats.exact_reason,
        "seconds": {"total": total} | {phase: round(spent, 3) for phase, spent in seconds.items()},
        "run_dir": str(run.run_dir),
    }
    return figures


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def write_summary(run: Run) -> None:
    figures = summarise(run)
    path = run.run_dir / "summary.json"
    with writing(path):
        path.write_text(json.dumps(figures, indent=2) + "\n")

    def show(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    logger.info("summary")
    for name, value in figures.items():
        if isinstance(value, dict):
            value = "  ".join(f"{phase} {show(spent)}" for phase, spent in value.items())
        logger.info("  %-20s %s", name, show(value))
