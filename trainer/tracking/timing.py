"""Where a run's time goes, by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rollout.memory import synchronize


@dataclass
class PhaseTimer:
    """Seconds per phase, of the current step and of the whole run."""

    step: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    waits_for: torch.device | None = None
    """A device whose work a phase waits for before it ends; None: what a phase has begun may end in the next."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.waits_for is not None:
                synchronize(self.waits_for)
            spent = time.perf_counter() - began
            for seconds in (self.step, self.total):
                seconds[name] = seconds.get(name, 0.0) + spent
