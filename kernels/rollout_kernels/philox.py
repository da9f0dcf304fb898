"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a function of its counter and key alone, so there is no generator state to save, to share or to lose.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of 32-bit words held in uint64; all arrays share one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * np.uint64(_MULTIPLIERS[0])
        p1 = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def uniform53(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per counter."""
    high, low, _, _ = philox4x32(counter, key)
    bits = ((high >> np.uint64(5)) << np.uint64(26)) + (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
