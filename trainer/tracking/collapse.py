"""Has the run gone wrong? Bounds on a step's metrics, and how often in a row they may be missed."""

from rollout import RolloutError
from trainer.config import StopConfig
from trainer.tracking.tracking import Metrics

_BOUNDS = (
    ("max_gap", "sampling/sampling_logp_difference/mean", 1),
    ("min_entropy", "entropy", -1),
    ("min_reward", "reward", -1),
    ("min_length", "completions/mean_length", -1),
    ("max_length", "completions/mean_length", 1),
    ("max_skipped", "skipped_updates", 1),
)
"""Key, metric, and 1 where more is bad."""


class CollapseError(RolloutError):
    """The run was ended, since its metrics missed a bound for too long."""


class CollapseWatch:
    """Counts, for each bound, the steps in a row that have missed it."""

    def __init__(self, config: StopConfig) -> None:
        self.config = config
        self._missed = dict.fromkeys((key for key, _, _ in _BOUNDS), 0)

    def check(self, metrics: Metrics, step: int) -> None:
        """Raises CollapseError if a bound has been missed for config.patience steps up to this one, counted from 1."""
        if step <= self.config.after:
            return
        for key, name, sign in _BOUNDS:
            bound, value = getattr(self.config, key), metrics.get(name)
            if bound is None or value is None:
                continue
            reached = key == "max_skipped" and value == bound
            self._missed[key] = self._missed[key] + 1 if sign * value > sign * bound or reached else 0
            if self._missed[key] >= self.config.patience:
                raise CollapseError(
                    f"stop.{key}={bound:g}: {name} is {value:.3g} at step {step}, {self.config.patience} in a row;"
                    " the run has collapsed and ends here"
                )
