"""The memory ledger: a row for every holder of memory, while rollouts are made and while the policy is trained.

It knows the rows that it is given; whoever holds the memory says how much it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.errors import RolloutError

GIB = 1 << 30
MIB = 1 << 20

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from "80GiB", "24 GB" or "1000"."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().upper() or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise RolloutError(f"{text!r} is no amount of memory: write 80GiB, 24GB or a number of bytes") from None
    if size <= 0:
        raise RolloutError(f"{text!r} is no amount of memory: it must be more than 0")
    return size


def show_bytes(size: int) -> str:
    """Bytes for people: GiB from 1 GiB on, else MiB."""
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB else f"{size / MIB:,.1f} MiB"


@dataclass(frozen=True)
class LedgerRow:
    """What one thing takes, in bytes, at the rollout peak and at the training peak."""

    name: str
    rollout: int
    training: int

    @classmethod
    def resident(cls, name: str, size: int) -> "LedgerRow":
        """What is resident counts in both columns."""
        return cls(name, size, size)


@dataclass(frozen=True)
class Ledger:
    """Rows against the device's memory."""

    rows: Sequence[LedgerRow]
    capacity: int

    @property
    def rollout_peak(self) -> int:
        return sum(row.rollout for row in self.rows)

    @property
    def training_peak(self) -> int:
        return sum(row.training for row in self.rows)

    @property
    def peak(self) -> int:
        return max(self.rollout_peak, self.training_peak)

    @property
    def missing(self) -> int:
        """Bytes that the higher peak lacks; 0 if it fits."""
        return max(0, self.peak - self.capacity)

    def render(self) -> str:
        """The table, and what is left or missing."""
        width = max(len(row.name) for row in self.rows)
        total = LedgerRow("peak", self.rollout_peak, self.training_peak)
        lines = [f"{'memory':<{width}}  {'rollout':>12}  {'training':>12}"]
        lines += [
            f"{row.name:<{width}}  {show_bytes(row.rollout):>12}  {show_bytes(row.training):>12}"
            for row in [*self.rows, total]
        ]
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        phase = "training" if self.training_peak >= self.rollout_peak else "rollout"
        if self.missing:
            return (
                f"does not fit: the {phase} peak lacks {show_bytes(self.missing)} ({self.missing} bytes) of"
                f" {show_bytes(self.capacity)}"
            )
        return (
            f"fits: {show_bytes(self.capacity - self.peak)} of {show_bytes(self.capacity)} are left at the {phase} peak"
        )
