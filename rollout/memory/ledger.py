"""The memory ledger: every holder of memory, while rollouts are made and while the policy is trained."""

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


@dataclass(frozen=True)
class TrainingBytes:
    """What training adds to the weights; all 0 for rollouts alone."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0
    activations: int = 0
    reference: int = 0
    """A frozen copy of the weights."""


def build_ledger(
    *,
    weights: int,
    pool: int,
    rollout_activations: int,
    training: TrainingBytes,
    capacity: int,
    process: int = 0,
    heap_holes: float = 0.0,
) -> Ledger:
    """The ledger of a colocated trainer and generator: what rests is in both columns.

    process: on a CPU, what interpreter and libraries hold, which shares the machine's memory with the tensors.
    heap_holes: what the allocator keeps beside what comes and goes, as a share of it.
    """

    def resident(name: str, size: int) -> LedgerRow:
        return LedgerRow(name, size, size)

    rows = [
        resident("weights", weights),
        resident("reference weights", training.reference),
        resident("fp32 masters", training.masters),
        resident("optimizer moments", training.moments),
        LedgerRow("fp32 gradients", 0, training.gradients),
        LedgerRow("activations and logits", rollout_activations, training.activations),
        resident("KV pool", pool),
        resident("state slots", 0),
        resident("process", process),
    ]
    if heap_holes:
        passing = training.gradients + training.activations
        rows.append(LedgerRow("heap holes", int(heap_holes * rollout_activations), int(heap_holes * passing)))
    return Ledger(rows, capacity)
