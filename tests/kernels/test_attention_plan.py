"""Plans: every row once, in tiles whose shapes keep a row's bits; and the helpers of shapes."""

import math

import numpy as np
import pytest
import torch

from rollout_kernels import attention_plan
from rollout_kernels.attention_plan import MAX_TILE_ROWS, KVLayout, QuerySpan, plan_tiles
from rollout_kernels.shapes import SEGMENT_SIZE, AttentionTiles, pad_rows, round_up

CPU = torch.device("cpu")
UNIT = 16
PER_SEGMENT = SEGMENT_SIZE // UNIT


def layout(num_groups: int = 2) -> KVLayout:
    return KVLayout(num_kv_heads=2, num_groups=num_groups, unit=UNIT, head_stride=3)


def random_spans(seed: int, count: int = 60) -> list[QuerySpan]:
    """Spans of 1 to 200 rows at lengths up to 700, on units that no other span has."""
    rng = np.random.default_rng(seed)
    spans, row, unit = [], 0, 0
    for _ in range(count):
        size = int(rng.choice([1, 1, 1, 5, 16, 64, 65, 200]))
        first = int(rng.integers(1, 500))
        num_units = -(-(first + size) // UNIT)
        spans.append(
            QuerySpan(np.arange(row, row + size), np.arange(first, first + size), np.arange(unit, unit + num_units))
        )
        row, unit = row + size, unit + num_units
    return spans


def planned_rows(tiles: list[AttentionTiles]) -> dict[int, tuple[int, list[int]]]:
    """For each planned row: how many positions it sees, and its tile's units of kv head 0."""
    found: dict[int, tuple[int, list[int]]] = {}
    for batch in tiles:
        size = batch.num_real_rows
        for place, row in zip(batch.places.tolist(), batch.rows.tolist(), strict=True):
            assert row not in found
            assert batch.query_rows[:, :size].flatten()[place] == row
            found[row] = int(batch.lengths.flatten()[place]), batch.kv_units[place // size, 0].tolist()
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 16])
def test_every_row_is_planned_once_with_its_own_length_and_units(seed: int, num_groups: int) -> None:
    spans = random_spans(seed)
    found = planned_rows(plan_tiles(spans, layout(num_groups), CPU))
    assert sorted(found) == list(range(sum(len(span.rows) for span in spans)))
    for span in spans:
        for row, length in zip(span.rows.tolist(), span.lengths.tolist(), strict=True):
            needed = -(-length // UNIT)
            assert found[row][0] == length
            assert found[row][1][:needed] == span.units[:needed].tolist()


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_query_rows_of_a_tile_are_a_multiple_of_16(num_groups: int) -> None:
    for tile in plan_tiles(random_spans(0), layout(num_groups), CPU):
        rows = tile.query_rows.shape[1]
        assert rows * num_groups % 16 == 0
        assert rows <= round_up(MAX_TILE_ROWS, 16 // math.gcd(16, num_groups))


def test_places_that_hold_no_row_see_nothing() -> None:
    for tile in plan_tiles(random_spans(1), layout(), CPU):
        empty = torch.ones_like(tile.lengths, dtype=torch.bool).flatten()
        empty[tile.places] = False
        assert not tile.lengths.flatten()[empty].any()
        assert tile.lengths.flatten()[tile.places].all()


@pytest.mark.parametrize("length", [1, 64, 65, 129, 257, 300, 385, 520, 1000])
def test_a_tile_alone_has_the_segments_that_it_needs(length: int) -> None:
    span = QuerySpan(np.array([0]), np.array([length]), np.arange(-(-length // UNIT)))
    (tile,) = plan_tiles([span], layout(), CPU)
    needed = -(-length // SEGMENT_SIZE)
    assert tile.kv_units.shape[-1] == needed * PER_SEGMENT
    assert tile.end_positions.tolist() == [needed * SEGMENT_SIZE]
    assert (tile.reach, tile.seen_by_all) == (length, length)


def test_few_short_tiles_join_longer_ones_and_many_do_not() -> None:
    """A tile of 1 row is padded to 8, with 4 heads: 2,048 scores a segment; 2 ** 17 are worth a batch of one's own."""

    def batches(num_short: int) -> list[int]:
        lengths = [64] * num_short + [768]
        spans = [QuerySpan(np.array([i]), np.array([n]), np.arange(48)) for i, n in enumerate(lengths)]
        return [tile.lengths.shape[0] for tile in plan_tiles(spans, layout(), CPU)]

    fitting = (1 << 17) // (2048 * 11)
    assert batches(fitting) == [fitting + 1]
    assert batches(2 * fitting) == [fitting + 1, fitting]


def test_kv_heads_lie_a_stride_apart() -> None:
    (tile,) = plan_tiles([QuerySpan(np.arange(4), np.arange(61, 65), np.array([10, 40, 20, 90]))], layout(), CPU)
    assert tile.kv_units.tolist() == [[[10, 40, 20, 90], [13, 43, 23, 93]]]


def test_tiles_that_go_on_come_after_those_that_begin() -> None:
    """Two rows share segments 0 and 1 (units 0 to 7) and go on alone, one of them for three segments more."""
    lengths = np.array([140, 300])
    shared = QuerySpan(np.arange(2), lengths, np.arange(8), 0, 2)
    own = [QuerySpan(np.array([i]), lengths[i : i + 1], np.arange(20 + 20 * i, 40 + 20 * i), 2) for i in range(2)]
    tiles = plan_tiles([own[1], shared, own[0]], layout(), CPU)
    assert [tile.chained for tile in tiles] == [True, True]
    assert (tiles[0].first_positions.tolist(), tiles[0].end_positions.tolist()) == ([0], [128])
    assert tiles[1].first_positions.tolist() == [128, 128]
    assert sorted(tiles[1].end_positions.tolist()) == [192, 320]


@pytest.mark.parametrize("limit", [1, 100_000, 1 << 20])
def test_batches_hold_no_more_scores_than_the_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single tile may hold more; two never do."""
    monkeypatch.setattr(attention_plan, "MAX_SCORES", limit)
    spans = random_spans(2)
    tiles = plan_tiles(spans, layout(), CPU)
    for tile in tiles:
        count, rows = tile.query_rows.shape
        scores = count * rows * 2 * 2 * tile.kv_units.shape[-1] * UNIT
        assert scores <= limit or count == 1
    assert len(planned_rows(tiles)) == sum(len(span.rows) for span in spans)


def test_bias_masks_what_a_row_may_not_see() -> None:
    """Rows of lengths 3 and 66 in a tile of two segments; a window of 2 leaves the last two positions of each."""
    span = QuerySpan(np.arange(2), np.array([3, 66]), np.arange(8))
    (tile,) = plan_tiles([span], layout(8), CPU)
    visible = tile.bias(0, 128, None)[0, 0, :, 0] == 0
    assert visible.sum(-1).tolist() == [3, 66]
    windowed = tile.bias(0, 128, 2)[0, 0, :, 0] == 0
    assert [row.nonzero()[:, 0].tolist() for row in windowed] == [[1, 2], [64, 65]]


@pytest.mark.parametrize(("n", "of", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32), (7, 1, 7)])
def test_round_up(n: int, of: int, expected: int) -> None:
    assert round_up(n, of) == expected


@pytest.mark.parametrize("rows", [1, 15, 16, 17])
def test_pad_rows_appends_zeros(rows: int) -> None:
    x = torch.ones(rows, 3)
    padded = pad_rows(x)
    assert padded.shape == (round_up(rows, 16), 3)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].any()


def test_pad_rows_leaves_whole_tiles_alone() -> None:
    x = torch.ones(32, 3)
    assert pad_rows(x) is x
    assert pad_rows(x[:7], 1).shape == (7, 3)
