"""Segment attention against fp64 softmax attention, and that a row's bits hang on the row alone.

Bit-equality is proved along a chain: a row in a pack = the row alone; the row in any chunk = the row alone; the row
among siblings over a shared prefix = the row alone. All against the same KV in different storage.

Every test runs with the compiled kernels and with torch operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_kernels import attention, attention_plan
from rollout_kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from rollout_kernels.ops import choose

CPU = torch.device("cpu")
GROUPS = [(70, (3, 1, 66)), (1, (1,)), (5, ()), (64, (64, 2)), (131, (9, 9, 9, 9))]
"""Prompt length and completion lengths, on both sides of a segment's 64 positions."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HEAD_DIMS = pytest.mark.parametrize("dim", [16, 32, 48, 64])
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (5, 5)], ids=str)
WINDOWS = pytest.mark.parametrize("window", [None, 1, 10, 64, 100])


pytestmark = pytest.mark.usefixtures("implementation")


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Out, and the log-sum-exp in nats."""
    out, lse = choose(CPU, q.dtype).segment_attention(q, k, v, plan, scale, window)
    return out, lse * math.log(2)


def training_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None = None) -> Tensor:
    return attention.training_attention(choose(CPU, q.dtype), q, k, v, plan, q.shape[-1] ** -0.5, window)


@dataclass
class Pack:
    """Rows of GROUPS one behind the other: completions of a group attend its prompt and themselves."""

    spans: list[QuerySpan] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    """For each row, the rows at positions 0, 1, ... up to its own."""

    @property
    def num_rows(self) -> int:
        return len(self.seen)

    def add(self, before: list[int], count: int) -> list[int]:
        rows = list(range(self.num_rows, self.num_rows + count))
        units = np.array(before + rows, np.int64)
        if rows:
            self.spans.append(QuerySpan(np.array(rows), np.arange(len(before) + 1, len(units) + 1), units))
        self.seen += [before + rows[: i + 1] for i in range(count)]
        return rows

    def mask(self, window: int | None) -> Tensor:
        """bool [T, T]: which rows each row attends."""
        mask = torch.zeros(self.num_rows, self.num_rows, dtype=torch.bool)
        for row, seen in enumerate(self.seen):
            mask[row, seen[-window:] if window else seen] = True
        return mask

    def plan(self, heads: int, kv_heads: int) -> AttentionPlan:
        return AttentionPlan(self.spans, KVLayout(kv_heads, heads // kv_heads, 1, self.num_rows), CPU)


def pack_of(groups: Sequence[tuple[int, Sequence[int]]] = GROUPS) -> Pack:
    pack = Pack()
    for prompt_length, completion_lengths in groups:
        prompt = pack.add([], prompt_length)
        for length in completion_lengths:
            pack.add(prompt, length)
    return pack


def inputs(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q [T, H, D], k and v [K, T, D]; scores spread over several nats."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, dim), (kv_heads, rows, dim), (kv_heads, rows, dim))
    return [(1.5 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention in the inputs' dtype: out [T, H, D] and log-sum-exp [T, H]."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, 1, x.shape[-1])


# -- values -------------------------------------------------------------------------------------------------------


@DTYPES
@HEAD_DIMS
@HEADS
@WINDOWS
def test_attention_equals_fp64_softmax(
    dtype: torch.dtype, dim: int, heads: int, kv_heads: int, window: int | None
) -> None:
    """No worse than 1.5 times the error of plain attention in the same dtype."""
    pack = pack_of()
    q, k, v = inputs(pack.num_rows, heads, kv_heads, dim, dtype)
    out, lse = attend(q, flat(k), flat(v), pack.plan(heads, kv_heads), dim**-0.5, window)
    exact, exact_lse = plain_attention(q.double(), k.double(), v.double(), pack.mask(window))
    plain, plain_lse = plain_attention(q, k, v, pack.mask(window))
    assert out.dtype == dtype
    assert error(out, exact) <= 1.5 * error(plain, exact)
    assert error(lse, exact_lse) <= 1.5 * error(plain_lse, exact_lse)


def gradients(
    attention: Callable[..., Tensor], data: Sequence[Tensor], upstream: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in data]
    return torch.autograd.grad(attention(*leaves), leaves, upstream.to(dtype))


@DTYPES
@HEAD_DIMS
@pytest.mark.parametrize("window", [None, 40, 64, 100])
def test_gradients_equal_fp64_autograd(dtype: torch.dtype, dim: int, window: int | None) -> None:
    """No worse than 1.5 times the error of autograd through plain attention in the same dtype."""
    pack = pack_of()
    *data, upstream = [*inputs(pack.num_rows, 4, 2, dim, dtype), inputs(pack.num_rows, 4, 2, dim, dtype, seed=1)[0]]
    mask, planned = pack.mask(window), pack.plan(4, 2)
    ours = gradients(lambda q, k, v: training_attention(q, k, v, planned, window=window), data, upstream, dtype)
    exact = gradients(lambda q, k, v: plain_attention(q, k, v, mask)[0], data, upstream, torch.float64)
    plain = gradients(lambda q, k, v: plain_attention(q, k, v, mask)[0], data, upstream, dtype)
    for name, mine, right, usual in zip("qkv", ours, exact, plain, strict=True):
        assert mine.dtype == dtype
        assert error(mine, right) <= 1.5 * error(usual, right), name


@pytest.mark.parametrize("window", [2, 3, 10])
@HEADS
def test_gradients_under_a_narrow_window(window: int, heads: int, kv_heads: int) -> None:
    """Few positions, whose gradients cancel more than where the other bound holds; fp32 rounding all the same."""
    pack = pack_of()
    *data, upstream = [*inputs(pack.num_rows, heads, kv_heads, 32, torch.float32), torch.ones(pack.num_rows, heads, 32)]
    mask, planned = pack.mask(window), pack.plan(heads, kv_heads)
    ours = gradients(lambda q, k, v: training_attention(q, k, v, planned, window=window), data, upstream, torch.float32)
    exact = gradients(lambda q, k, v: plain_attention(q, k, v, mask)[0], data, upstream, torch.float64)
    for name, mine, right in zip("qkv", ours, exact, strict=True):
        assert error(mine, right) < 1e-6, name


def test_two_rows_worked_by_hand() -> None:
    """q k^T * scale is ln 3 for the first key and 0 for the second, so the second row mixes values 3 : 1."""
    q, k, v = torch.zeros(2, 1, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)
    q[:, 0, 0], k[0, 0, 0] = 2.0, np.log(3.0)
    v[0, :, 0], v[0, 1, 5] = torch.tensor([8.0, 4.0]), 1.0
    out, lse = attend(q, flat(k), flat(v), pack_of([(2, ())]).plan(1, 1), 0.5)
    assert out[:, 0, 0].tolist() == pytest.approx([8.0, 7.0])
    assert out[:, 0, 5].tolist() == pytest.approx([0.0, 0.25])
    assert lse[:, 0].tolist() == pytest.approx([np.log(3), np.log(4)])


def test_a_row_that_no_tile_covers_gets_zeros() -> None:
    q, k, v = inputs(20, 4, 2, 16, torch.float32)
    span = QuerySpan(np.arange(3, 17), np.arange(4, 18), np.arange(20))
    out, lse = attend(q, flat(k), flat(v), AttentionPlan([span], KVLayout(2, 2, 1, 20), CPU), 1.0)
    assert not out[:3].any()
    assert not out[17:].any()
    assert (lse[[0, 2, 17, 19]] == -torch.inf).all()
    assert lse[3:17].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    """Scores in the thousands: each row takes the value of its best key."""
    pack = pack_of([(130, ())])
    q, k, v = inputs(130, 2, 1, 16, torch.float32)
    exact, _ = plain_attention(100 * q.double(), 10 * k.double(), v.double(), pack.mask(None))
    out, _ = attend(100 * q, flat(10 * k), flat(v), pack.plan(2, 1), 0.25)
    assert error(out, exact) < 1e-5


# -- bits ---------------------------------------------------------------------------------------------------------


@dataclass
class Paged:
    """The KV of one sequence after another in blocks of `block_size` positions, scattered over storage."""

    keys: Tensor
    values: Tensor
    layout: KVLayout
    units: list[NDArray[np.int64]]

    @staticmethod
    def of(k: Tensor, v: Tensor, seen: Sequence[Sequence[int]], heads: int, block_size: int = 16) -> "Paged":
        """seen: for each sequence, the rows of k and v [K, T, D] at positions 0, 1, ..."""
        kv_heads, _, dim = k.shape
        counts = [-(-len(rows) // block_size) for rows in seen]
        blocks = np.random.default_rng(0).permutation(sum(counts) + 3)
        storage = [torch.full((len(blocks), kv_heads, block_size, dim), 7.0, dtype=k.dtype) for _ in "kv"]
        units, used = [], 0
        for rows, count in zip(seen, counts, strict=True):
            mine = blocks[used : used + count]
            used += count
            for x, source in zip(storage, (k, v), strict=True):
                for position, row in enumerate(rows):
                    x[mine[position // block_size], :, position % block_size] = source[:, row]
            units.append(mine * kv_heads)
        layout = KVLayout(kv_heads, heads // kv_heads, block_size, 1)
        keys, values = (x.view(-1, block_size, dim) for x in storage)
        return Paged(keys, values, layout, units)

    def attend(self, q: Tensor, spans: Sequence[QuerySpan], window: int | None = None) -> tuple[Tensor, Tensor]:
        planned = AttentionPlan(list(spans), self.layout, CPU)
        return attend(q, self.keys, self.values, planned, q.shape[-1] ** -0.5, window)


def one_row(length: int, units: NDArray[np.int64]) -> QuerySpan:
    return QuerySpan(np.array([0]), np.array([length]), units)


@DTYPES
@pytest.mark.parametrize(("dim", "window"), [(16, None), (32, None), (48, None), (64, None), (32, 50)])
def test_a_packed_row_has_the_bits_of_the_row_alone(
    threads: int, dtype: torch.dtype, dim: int, window: int | None
) -> None:
    """The training pack against one-row-at-a-time decoding from paged storage, for the last row of every sequence."""
    pack = pack_of()
    q, k, v = inputs(pack.num_rows, 4, 2, dim, dtype)
    packed = training_attention(q, k, v, pack.plan(4, 2), window=window)
    rows = [int(span.rows[-1]) for span in pack.spans]
    paged = Paged.of(k, v, [pack.seen[row] for row in rows], 4)
    for row, units in zip(rows, paged.units, strict=True):
        alone, _ = paged.attend(q[row : row + 1], [one_row(len(pack.seen[row]), units)], window)
        assert torch.equal(alone[0], packed[row]), f"row {row}"


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (5, 5)], ids=str)
def test_a_batch_has_the_bits_of_each_row_alone(threads: int, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """A decoding batch: one row of each of 20 sequences of uneven length."""
    lengths = [1 + 37 * i % 200 for i in range(20)]
    q, k, v = inputs(sum(lengths), heads, kv_heads, 32, dtype)
    q = q[:20]
    starts = np.cumsum([0, *lengths])
    seen = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]
    paged = Paged.of(k, v, seen, heads)
    spans = [QuerySpan(np.array([i]), np.array([n]), paged.units[i]) for i, n in enumerate(lengths)]
    batch, batch_lse = paged.attend(q, spans)
    for i, length in enumerate(lengths):
        alone, lse = paged.attend(q[i : i + 1], [one_row(length, paged.units[i])])
        assert torch.equal(alone[0], batch[i])
        assert torch.equal(lse[0], batch_lse[i])


@DTYPES
@pytest.mark.parametrize("window", [None, 50])
def test_grouping_siblings_over_their_prefix_changes_no_bit(
    threads: int, dtype: torch.dtype, window: int | None
) -> None:
    """Eight siblings behind a prompt of 150: two whole segments as one product over all rows, or each for itself."""
    prompt, tails = list(range(150)), [1, 9, 70, 3, 128, 2, 41, 64]
    seen, used = [], 150
    for tail in tails:
        seen.append(prompt + list(range(used, used + tail)))
        used += tail
    q, k, v = inputs(used, 6, 2, 32, dtype)
    q, lengths = q[: len(tails)], [len(rows) for rows in seen]
    paged = Paged.of(k, v, seen, 6)
    alone = [QuerySpan(np.array([i]), np.array([n]), paged.units[i]) for i, n in enumerate(lengths)]
    own = [QuerySpan(np.array([i]), np.array([n]), paged.units[i][8:], 2) for i, n in enumerate(lengths)]
    order = np.argsort(lengths)
    shared = QuerySpan(order, np.array(lengths)[order], paged.units[5][:8], 0, 2)
    for ours, theirs in zip(paged.attend(q, [*own, shared], window), paged.attend(q, alone, window), strict=True):
        assert torch.equal(ours, theirs)


@DTYPES
@pytest.mark.parametrize("cuts", [(1, 8, 72), (64, 128), (16, 32, 48, 149), tuple(range(1, 150, 7))], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_cutting_a_prefill_changes_no_bit(
    threads: int, dtype: torch.dtype, cuts: tuple[int, ...], window: int | None
) -> None:
    q, k, v = inputs(150, 4, 2, 32, dtype)
    paged = Paged.of(k, v, [list(range(150))], 4)

    def prefill(start: int, end: int) -> Tensor:
        span = QuerySpan(np.arange(end - start), np.arange(start + 1, end + 1), paged.units[0])
        return paged.attend(q[start:end], [span], window)[0]

    edges = [0, *cuts, 150]
    chunks = [prefill(start, end) for start, end in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), prefill(0, 150))


@DTYPES
@pytest.mark.parametrize("implementation", ["torch"], indirect=True)
def test_splitting_batches_of_tiles_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of()
    q, k, v = inputs(pack.num_rows, 4, 2, 32, dtype)
    whole = training_attention(q, k, v, pack.plan(4, 2))
    monkeypatch.setattr(attention_plan, "MAX_SCORES", 1)
    planned = pack.plan(4, 2)
    assert all(len(tile.query_rows) == 1 for tile in planned.tiles)
    assert torch.equal(training_attention(q, k, v, planned), whole)


@DTYPES
def test_what_lies_beside_the_visible_positions_changes_no_bit(dtype: torch.dtype) -> None:
    """Stale keys and values behind a row's own position, in its last block and in other blocks."""
    q, k, v = inputs(150, 4, 2, 32, dtype)
    stale = k.clone(), v.clone()
    for x in stale:
        x[:, 77:] = 1e4
    outs = [Paged.of(keys, values, [list(range(150))], 4) for keys, values in ((k, v), stale)]
    clean, dirty = (paged.attend(q[:1], [one_row(77, paged.units[0])])[0] for paged in outs)
    assert torch.equal(clean, dirty)


@DTYPES
def test_backward_is_deterministic_whatever_the_threads(restore_threads: None, dtype: torch.dtype) -> None:
    pack = pack_of(GROUPS[:3])
    runs = []
    for count in (1, 1, 3):
        torch.set_num_threads(count)
        q, k, v = leaves = [x.requires_grad_() for x in inputs(pack.num_rows, 4, 2, 32, dtype)]
        runs.append(torch.autograd.grad(training_attention(q, k, v, pack.plan(4, 2)).square().sum(), leaves))
    for run in runs[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(run, runs[0], strict=True))
