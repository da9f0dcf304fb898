"""From ragged query spans to a few batches of equal tiles, once per forward and for all layers."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_kernels.attention import AttentionTiles
from rollout_kernels.tiles import ROW_MULTIPLE, SEGMENT_SIZE, round_up

MAX_TILE_ROWS = 64
MAX_SCORES = 1 << 22  # per batch of tiles, so that scores stay in tens of megabytes at any length

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class QuerySpan:
    """Query rows that attend the same KV.

    rows: [m] rows of q. lengths: [m] KV positions each may see, counted from position 0, not decreasing.
    units: KV unit (of kv head 0) of each U positions from the start of `first_segment` on.
    num_segments: how many segments to attend from first_segment on; None: all that the rows' lengths reach.
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


def _bucket(n: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ...: few shapes, and at most half as much again."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 and power >= 4 else power


def plan_tiles(spans: Iterable[QuerySpan], layout: KVLayout, device: torch.device) -> list[AttentionTiles]:
    """Cut spans into tiles of at most MAX_TILE_ROWS rows and batch those of like shape.

    Tiles that begin at segment 0 come first, so that a row's segments are merged in order; a row may have one span
    that begins at 0 and one that goes on from where the first ends.
    """
    base = ROW_MULTIPLE // math.gcd(ROW_MULTIPLE, layout.num_groups)
    max_rows = round_up(MAX_TILE_ROWS, base)
    buckets: dict[tuple[bool, int, int], list[QuerySpan]] = defaultdict(list)
    for span in spans:
        for start in range(0, len(span.rows), max_rows):
            rows, lengths = span.rows[start : start + max_rows], span.lengths[start : start + max_rows]
            segments = -(-int(lengths[-1]) // SEGMENT_SIZE) - span.first_segment
            if span.num_segments is not None:
                segments = min(segments, span.num_segments)
            tile = QuerySpan(rows, lengths, span.units, span.first_segment, segments)
            padded_rows = min(base * _bucket(-(-len(rows) // base)), max_rows)
            buckets[span.first_segment > 0, padded_rows, _bucket(segments)].append(tile)
    tiles = []
    for (continues, tile_rows, segments), members in sorted(buckets.items(), key=lambda item: item[0]):
        per_tile = layout.num_kv_heads * layout.num_groups * tile_rows * segments * SEGMENT_SIZE
        step = max(1, MAX_SCORES // per_tile)
        for start in range(0, len(members), step):
            tiles.append(_batch(members[start : start + step], continues, tile_rows, segments, layout, device))
    return tiles


def _batch(
    members: Sequence[QuerySpan], continues: bool, tile_rows: int, segments: int, layout: KVLayout, device: torch.device
) -> AttentionTiles:
    shape = (len(members), tile_rows)
    query_rows, lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    units = np.zeros((len(members), segments * SEGMENT_SIZE // layout.unit), np.int64)
    filled = np.zeros(shape, bool)
    for i, span in enumerate(members):
        size = len(span.rows)
        query_rows[i, :size], lengths[i, :size], filled[i, :size] = span.rows, span.lengths, True
        used = span.units[: (span.num_segments or 0) * SEGMENT_SIZE // layout.unit]
        units[i, : len(used)] = used
    heads = np.arange(layout.num_kv_heads, dtype=np.int64)[None, :, None] * layout.head_stride
    places = np.flatnonzero(filled)
    first = np.array([span.first_segment for span in members], np.int64)
    count = np.array([span.num_segments for span in members], np.int64)

    def on_device(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionTiles(
        query_rows=on_device(query_rows),
        lengths=on_device(lengths),
        kv_units=on_device(units[:, None] + heads),
        first_positions=on_device(first * SEGMENT_SIZE),
        end_positions=on_device((first + count) * SEGMENT_SIZE),
        places=on_device(places),
        rows=on_device(query_rows.reshape(-1)[places]),
        reach=max(
            min(int(span.lengths[-1]), (span.first_segment + (span.num_segments or 0)) * SEGMENT_SIZE)
            - span.first_segment * SEGMENT_SIZE
            for span in members
        ),
        continues=continues,
    )
