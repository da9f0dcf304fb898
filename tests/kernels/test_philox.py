"""Philox4x32-10 against Random123's known-answer vectors, and the uniform numbers that are made of it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_kernels.philox import philox4x32, uniform53
from tiny_models import chi_square_p

Words = NDArray[np.uint64]

# counter, key, result: kat_vectors of Random123 1.14, "philox4x32 10"
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*columns: int) -> tuple[Words, ...]:
    return tuple(np.array([value], np.uint64) for value in columns)


def uniforms(place: int, count: int) -> NDArray[np.float64]:
    """`count` numbers whose counter (places 0 .. 3) or key (4, 5) runs in one word."""
    columns = [np.full(count, 7, np.uint64) for _ in range(6)]
    columns[place] = np.arange(count, dtype=np.uint64)
    return uniform53(tuple(columns[:4]), tuple(columns[4:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    out = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in out) == expected


def test_arrays_are_computed_element_by_element() -> None:
    counters, keys, results = zip(*VECTORS, strict=True)
    columns = np.array(counters, np.uint64).T, np.array(keys, np.uint64).T
    out = philox4x32(tuple(columns[0]), tuple(columns[1]))
    assert np.array_equal(np.stack(out).T, np.array(results, np.uint64))


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_uniform_has_the_top_53_bits_of_two_words(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    value = uniform53(words(*counter), words(*key))[0]  # type: ignore[arg-type]
    assert value == ((result[0] >> 5) * 2**26 + (result[1] >> 6)) / 2**53


@pytest.mark.parametrize("place", range(6))
def test_uniform_whichever_word_counts(place: int) -> None:
    """Chi-square over 100 cells; the numbers are fixed, and right ones would fail for 6 words in 1e5 choices."""
    drawn = uniforms(place, 50_000)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, bins=100, range=(0.0, 1.0))[0]
    assert chi_square_p(counts.tolist(), [500.0] * 100) > 1e-5


@pytest.mark.parametrize("place", range(6))
def test_neighbours_are_uncorrelated(place: int) -> None:
    """Serial correlation within 5 standard deviations; right numbers would fail for 6 words in 3e5 choices."""
    drawn = uniforms(place, 50_000) - 0.5
    assert abs(np.mean(drawn[1:] * drawn[:-1]) * 12) < 5 / np.sqrt(50_000)


def test_every_bit_is_used() -> None:
    """53 bits: the lowest one is set half the time, within 5 standard deviations (right ones fail 1 time in 1e6)."""
    lowest = (uniforms(0, 20_000) * 2**53).astype(np.int64) & 1
    assert abs(lowest.mean() - 0.5) < 5 * 0.5 / np.sqrt(20_000)
