"""Which kernels there are, how a test has them chosen anew, and what torch's own products promise here."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

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


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def rows_are_stable(dtype: torch.dtype, threads: int) -> bool:
    """Whether a row of torch's products has the same bits in each batch of 16, 32, ... rows."""
    generator = torch.Generator().manual_seed(0)
    with num_threads(threads):
        for n, k in ((128, 96), (64, 96), (160, 96), (211, 96), (96, 160), (96, 128)):
            x, weight = (torch.randn(size, k, generator=generator).to(dtype) for size in (512, n))
            whole = F.linear(x, weight)
            for rows in range(16, 512, 16):
                parts = F.linear(x[:rows], weight), F.linear(x[None, :rows], weight)[0]
                if not all(torch.equal(part, whole[:rows]) for part in parts):
                    return False
    return True


def needs_stable_products(dtype: torch.dtype, *threads: int) -> None:
    """Skip a test of exactness on torch operations where this CPU's do not offer it; compiled kernels always do."""
    if not has_kernels() and not all(rows_are_stable(dtype, count) for count in threads or (torch.get_num_threads(),)):
        pytest.skip(f"a row of torch's {dtype} products has other bits in another batch here")
