"""Whether the compiled product is as fast as torch's on this machine, found out by trying both."""

import logging
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

from rollout_kernels.ops import Ops
from rollout_kernels.reference.linear import linear

logger = logging.getLogger(__name__)

_ROWS, _COLUMNS, _DEPTH = 128, 512, 512
_TRIES = 4
_LIMIT = 1.2
"""How much slower than torch's the compiled product may be before the engine says so."""


def seconds_in_turn(*runs: Callable[[], object], tries: int) -> list[tuple[float, ...]]:
    """What each of `runs` took, in `tries` turns of all of them after a turn that is not counted."""
    turns = []
    for _ in range(tries + 1):
        marks = [time.perf_counter()]
        for run in runs:
            run()
            marks.append(time.perf_counter())
        turns.append(tuple(after - before for before, after in pairwise(marks)))
    return turns[1:]


def best_seconds(*runs: Callable[[], object], tries: int) -> list[float]:
    """The shortest time of each, run in turn."""
    return [min(spent) for spent in zip(*seconds_in_turn(*runs, tries=tries), strict=True)]


@cache
def warn_if_slow(ops: Ops, device: torch.device, dtype: torch.dtype, num_threads: int) -> None:
    """Once per process and kind of product: a warning if the backend's own takes over a fifth longer than torch's."""
    if "linear" not in ops.own:
        return
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, _DEPTH, generator=generator).to(device, dtype) for n in (_ROWS, _COLUMNS))
    with torch.no_grad():
        runs = (lambda: ops.linear(x, weight, None), lambda: linear(x, weight))
        ours, torchs = best_seconds(*runs, tries=_TRIES)
        if ours > _LIMIT * torchs:  # another process may have been in the way
            ours, torchs = best_seconds(*runs, tries=4 * _TRIES)
    if ours > _LIMIT * torchs:
        flops = 2e-9 * _ROWS * _COLUMNS * _DEPTH
        logger.warning(
            "the compiled kernels (%s) multiply %s at %.0f GF/s, torch at %.0f:"
            " COWROLL_KERNELS=torch does without them, COWROLL_KERNELS_MARCH and CXX build them otherwise",
            ops.identity, str(dtype).removeprefix("torch."), flops / ours, flops / torchs,
        )  # fmt: skip
