"""What memory there is, what will be taken of it, and what was."""

from rollout.memory.device import (
    device_bytes,
    in_process,
    peak_bytes,
    pool_size,
    reset_peak,
    sized_for,
    slot_bytes,
    synchronize,
    trim,
    used_bytes,
)
from rollout.memory.estimate import (
    Adapt,
    TrainingPeak,
    rollout_peak,
    score_and_backward,
    skeleton,
    training_peak,
    widest_pack,
)
from rollout.memory.ledger import Ledger, LedgerRow, parse_bytes, show_bytes

__all__ = [
    "Adapt",
    "Ledger",
    "LedgerRow",
    "TrainingPeak",
    "device_bytes",
    "in_process",
    "parse_bytes",
    "peak_bytes",
    "pool_size",
    "reset_peak",
    "rollout_peak",
    "score_and_backward",
    "show_bytes",
    "sized_for",
    "skeleton",
    "slot_bytes",
    "synchronize",
    "training_peak",
    "trim",
    "used_bytes",
    "widest_pack",
]
