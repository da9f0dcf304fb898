"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a function of its counter and key alone, so there is no generator state to save, to share or to lose.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64) * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays [n] of 32-bit words held in uint64."""
    even, odd = np.stack(counter[::2]), np.stack(counter[1::2])
    for keys in (np.stack(key) + _WEYL) & _LOW:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _HALF) ^ odd ^ keys, products & _LOW
    return even[0], odd[0], even[1], odd[1]


def uniform53(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per counter."""
    high, low, _, _ = philox4x32(counter, key)
    bits = ((high >> np.uint64(5)) << np.uint64(26)) + (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
