"""Which kernels there are, and how a test has them chosen anew."""

import torch

from rollout_kernels import ops
from rollout_kernels.cpu import library

CPU = torch.device("cpu")


def has_kernels() -> bool:
    """Whether compiled kernels are there and wanted."""
    return "linear" in ops.choose(CPU, torch.float32).own


def choose_anew() -> None:
    """Settings are read again, and libraries looked for again, at the next choice."""
    for kept in (ops._choice, ops._prepare, ops._warn_once, library.kernels):
        kept.cache_clear()
