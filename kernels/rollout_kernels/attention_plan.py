"""What attention is asked for: ragged query spans, and from them, once per forward and for all layers, what a kernel
reads: flat tables, or a few batches of equal tiles.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_kernels.shapes import ROW_MULTIPLE, SEGMENT_SIZE, AttentionTiles, round_up

MAX_TILE_ROWS = 64
MAX_SCORES = 1 << 20  # per batch of tiles: 4 MB of fp32 scores stay in a cache; one tile alone may have more

LAUNCH_SCORES = 1 << 17  # what a batch of tiles costs beside its scores, counted in scores

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class QuerySpan:
    """Query rows that attend the same KV.

    rows: [m] rows of q. lengths: [m] KV positions each may see, counted from position 0, not decreasing.
    units: KV unit (of kv head 0) of each U positions from the start of `first_segment` on.
    num_segments: how many segments to attend from first_segment on, after which the rows go on in another span; None:
        all that the rows' lengths reach.
    """

    rows: Ints
    lengths: Ints
    units: Ints
    first_segment: int = 0
    num_segments: int | None = None


@dataclass(frozen=True)
class KVLayout:
    """Where KV lies in flat storage: units of `unit` positions; kv head h of a unit lies h * head_stride further."""

    num_kv_heads: int
    num_groups: int
    unit: int
    head_stride: int


@dataclass(frozen=True)
class SpanTables:
    """Spans laid end to end, those that begin at segment 0 first.

    rows, lengths: int64 [sum of rows]. units: int64. spans: int64 [n, 6], for each where its rows begin and end, where
    its units begin, its first segment, how many segments, and whether its rows go on in another span.
    """

    rows: Ints
    lengths: Ints
    units: Ints
    spans: Ints
    num_first: int
    """How many begin at segment 0."""
    chained: bool
    """Whether rows of some span go on in another."""


@dataclass
class AttentionPlan:
    """Which query rows attend which KV, in one forward: any number of spans, each row in one of them, or in one that
    begins at 0 and one that goes on from where the first ends.
    """

    spans: list[QuerySpan]
    layout: KVLayout
    device: torch.device
    arguments: Any = field(default=None, init=False, repr=False)
    """What a compiled kernel is told in every layer, kept by cpu/attention.py."""

    @cached_property
    def tables(self) -> SpanTables:
        spans = sorted(self.spans, key=lambda span: span.first_segment > 0)
        row_ends = np.cumsum([0] + [len(span.rows) for span in spans])
        unit_ends = np.cumsum([0] + [len(span.units) for span in spans])
        table = np.empty((len(spans), 6), np.int64)
        for i, span in enumerate(spans):
            reached = -(-int(span.lengths[-1]) // SEGMENT_SIZE) - span.first_segment
            goes_on = span.num_segments is not None
            segments = reached if span.num_segments is None else span.num_segments
            table[i] = row_ends[i], row_ends[i + 1], unit_ends[i], span.first_segment, segments, goes_on
        return SpanTables(
            rows=_joined([span.rows for span in spans]),
            lengths=_joined([span.lengths for span in spans]),
            units=_joined([span.units for span in spans]),
            spans=table,
            num_first=sum(span.first_segment == 0 for span in spans),
            chained=any(span.num_segments is not None for span in spans),
        )

    @cached_property
    def tiles(self) -> list[AttentionTiles]:
        return plan_tiles(self.spans, self.layout, self.device)


def _joined(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.zeros(0, np.int64)


def _bucket(n: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ...: few shapes, and at most half as much again."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 and power >= 4 else power


def plan_tiles(spans: Iterable[QuerySpan], layout: KVLayout, device: torch.device) -> list[AttentionTiles]:
    """Cut spans into tiles of at most MAX_TILE_ROWS rows and batch those of like shape.

    Tiles that begin at segment 0 come first, so that a row's segments are added in order; a row may have one span
    that begins at 0 and one that goes on from where the first ends.
    """
    base = ROW_MULTIPLE // math.gcd(ROW_MULTIPLE, layout.num_groups)
    max_rows = round_up(MAX_TILE_ROWS, base)
    kinds: dict[_Kind, list[QuerySpan]] = defaultdict(list)
    for span in spans:
        chained = span.first_segment > 0 or span.num_segments is not None
        for start in range(0, len(span.rows), max_rows):
            rows, lengths = span.rows[start : start + max_rows], span.lengths[start : start + max_rows]
            segments = -(-int(lengths[-1]) // SEGMENT_SIZE) - span.first_segment
            if span.num_segments is not None:
                segments = min(segments, span.num_segments)
            tile = QuerySpan(rows, lengths, span.units, span.first_segment, segments)
            padded_rows = min(base * _bucket(-(-len(rows) // base)), max_rows)
            kinds[_Kind(span.first_segment > 0, chained, padded_rows)].append(tile)
    heads = layout.num_kv_heads * layout.num_groups
    return [
        _batch(members, kind, layout, device)
        for kind, tiles in sorted(kinds.items(), key=lambda item: item[0])
        for members in _batches(tiles, heads * kind.rows * SEGMENT_SIZE)
    ]


class _Kind(NamedTuple):
    """What tiles of one batch have in common."""

    later: bool
    """Whether they begin behind segment 0."""
    chained: bool
    rows: int


def _batches(tiles: list[QuerySpan], scores_per_segment: int) -> Iterator[list[QuerySpan]]:
    """Tiles of like length together: as many as MAX_SCORES allows, unless padding costs more than another launch."""

    def segments(tile: QuerySpan) -> int:
        return tile.num_segments or 0

    batch: list[QuerySpan] = []
    padding = 0
    for tile in sorted(tiles, key=segments, reverse=True):
        if batch:
            padding += (segments(batch[0]) - segments(tile)) * scores_per_segment
            scores = (len(batch) + 1) * segments(batch[0]) * scores_per_segment
            if scores > MAX_SCORES or padding > LAUNCH_SCORES:
                yield batch
                batch, padding = [], 0
        batch.append(tile)
    if batch:
        yield batch


def _batch(members: Sequence[QuerySpan], kind: _Kind, layout: KVLayout, device: torch.device) -> AttentionTiles:
    num_tiles, num_real = len(members), max(len(span.rows) for span in members)
    segments = max(span.num_segments or 0 for span in members)
    query_rows = np.zeros((num_tiles, kind.rows), np.int64)
    lengths = np.zeros((num_tiles, num_real), np.int64)
    filled = np.zeros((num_tiles, num_real), bool)
    units = np.zeros((num_tiles, segments * SEGMENT_SIZE // layout.unit), np.int64)
    for i, span in enumerate(members):
        size = len(span.rows)
        query_rows[i, :size], lengths[i, :size], filled[i, :size] = span.rows, span.lengths, True
        used = span.units[: (span.num_segments or 0) * SEGMENT_SIZE // layout.unit]
        units[i, : len(used)] = used
    heads = np.arange(layout.num_kv_heads, dtype=np.int64)[None, :, None] * layout.head_stride
    places = np.flatnonzero(filled)
    first = np.array([span.first_segment for span in members], np.int64) * SEGMENT_SIZE
    end = first + np.array([span.num_segments for span in members], np.int64) * SEGMENT_SIZE
    shortest, longest = (np.array([span.lengths[i] for span in members]) for i in (0, -1))

    def on_device(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionTiles(
        query_rows=on_device(query_rows),
        lengths=on_device(lengths),
        kv_units=on_device(units[:, None] + heads),
        first_positions=on_device(first),
        end_positions=on_device(end),
        places=on_device(places),
        rows=on_device(query_rows[:, :num_real].reshape(-1)[places]),
        reach=int((np.minimum(longest, end) - first).max()),
        seen_by_all=max(0, int((np.minimum(shortest, end) - first).min())),
        begins=not kind.later,
        chained=kind.chained,
    )
