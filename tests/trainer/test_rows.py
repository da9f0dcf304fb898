"""The order of rows: nothing dropped, nothing seen twice."""

from collections import Counter
from itertools import pairwise, permutations, product

import numpy as np
import pytest

import tiny_models
from trainer.data.rows import DATA_PURPOSE, SHUFFLE_PURPOSE, Row, RowStream, permutation, uniforms

# -- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1000])
def test_permutation_holds_every_place_once(n: int) -> None:
    assert sorted(permutation(n, 3, DATA_PURPOSE, 2).tolist()) == list(range(n))


def test_permutation_is_a_function_of_seed_purpose_and_epoch() -> None:
    def draw(seed: int, purpose: int, epoch: int) -> tuple[int, ...]:
        return tuple(permutation(100, seed, purpose, epoch).tolist())

    variants = list(product((0, 1, 2**32 - 1), (DATA_PURPOSE, SHUFFLE_PURPOSE), (0, 1, 2**32 - 1)))
    first = [draw(*variant) for variant in variants]
    # 100! orders: two equal ones by chance have odds below 1e-150
    assert len(set(first)) == len(variants)
    assert [draw(*variant) for variant in reversed(variants)] == first[::-1]


@pytest.mark.parametrize("vary", ["epoch", "seed"])
def test_permutation_is_uniform(vary: str) -> None:
    draws = 2400
    orders = (permutation(4, 0, DATA_PURPOSE, i) if vary == "epoch" else permutation(4, i, 17) for i in range(draws))
    counts = Counter(tuple(order.tolist()) for order in orders)
    observed = [counts[order] for order in permutations(range(4))]
    # false alarm: 1 in a million
    assert tiny_models.chi_square_p(observed, [draws / 24] * 24) > 1e-6


def test_successive_orders_are_independent() -> None:
    firsts = [int(permutation(3, 0, DATA_PURPOSE, epoch)[0]) for epoch in range(2701)]
    counts = Counter(pairwise(firsts))
    observed = [counts[a, b] for a in range(3) for b in range(3)]
    # false alarm: 1 in a million
    assert tiny_models.chi_square_p(observed, [2700 / 9] * 9) > 1e-6


def test_uniforms_are_in_range_and_do_not_depend_on_how_many_are_drawn() -> None:
    many = uniforms(1000, 5, 18, 1)
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert np.array_equal(uniforms(7, 5, 18, 1), many[:7])


# -- the stream ---------------------------------------------------------------------------------------------------


def _rows(count: int) -> list[Row]:
    return [Row(str(i), i) for i in range(count)]


def _answers(rows: list[Row]) -> list[int]:
    return [row.answer for row in rows]


@pytest.mark.parametrize(("count", "batch"), [(5, 8), (10, 4), (7, 7), (1, 3), (6, 1)])
def test_every_epoch_sees_each_row_once_whatever_the_batch(count: int, batch: int) -> None:
    stream = RowStream(_rows(count), seed=0)
    batches = [_answers(stream.take(i * batch, batch)) for i in range(count * 3)]
    assert [len(taken) for taken in batches] == [batch] * (count * 3)
    seen = [answer for taken in batches for answer in taken]
    epochs = [seen[i : i + count] for i in range(0, len(seen), count)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * (3 * batch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    rows = _rows(50)
    orders = [tuple(_answers(RowStream(rows, seed).take(50 * e, 50))) for seed in (0, 1) for e in (0, 1)]
    assert len({*orders, tuple(range(50))}) == 5


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 13, 20])
def test_two_takes_are_one_and_their_order_does_not_matter(cut: int) -> None:
    whole = _answers(RowStream(_rows(5), 3).take(2, 20))
    forwards, backwards = RowStream(_rows(5), 3), RowStream(_rows(5), 3)
    head, tail = forwards.take(2, cut), forwards.take(2 + cut, 20 - cut)
    late, early = backwards.take(2 + cut, 20 - cut), backwards.take(2, cut)
    assert _answers(head + tail) == _answers(early + late) == whole
