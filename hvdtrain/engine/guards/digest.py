"""Numbers that stand for arrays: one that any changed bit changes, one whose difference tells how far two are apart.

Numpy only. Neither depends on the order in which it is added up, so ranks with other threads come to the same.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

COLUMNS = 1021
"""A prime, so that what repeats in a tensor's rows does not fall into one column."""


def digest(x: np.ndarray) -> int:
    """Return 64 bits of the bytes of ``x``: equal for equal bytes, other ones for others but for one chance in 2^64.

    Words of 32 bits are added up exactly in 1021 columns, 9 GB a second; each column counts by a factor of its own. Not
    against an attacker.
    """
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = raw.size // 4 * 4
    words = raw[:whole].view(np.uint32) if raw.ctypes.data % 4 == 0 else raw[:whole].copy().view(np.uint32)
    rows = words.size // COLUMNS
    sums_C = np.add.reduce(words[:rows * COLUMNS].reshape(rows, COLUMNS), axis=0, dtype=np.uint64)
    rest = words[rows * COLUMNS:]
    sums_C[:rest.size] += rest
    factor_C, further = _factors()
    tail = int.from_bytes(raw[whole:].tobytes(), "little")
    with np.errstate(over="ignore"):
        total = int((sums_C * factor_C).sum(dtype=np.uint64))
    return (total + (raw.size * further[0] + tail * further[1])) % 2**64


def signed_sum(x: np.ndarray) -> float:
    """Return the sum of ``x`` under pseudo-random weights: the difference of two is about the distance of two arrays.

    In the mean square it is that distance (Johnson and Lindenstrauss).
    """
    flat = np.asarray(x).reshape(-1)
    rows = -(-flat.size // COLUMNS)
    padded = np.zeros(rows * COLUMNS)
    with np.errstate(invalid="ignore", over="ignore"):
        padded[:flat.size] = flat
        by_row = padded.reshape(rows, COLUMNS) @ _weights(COLUMNS, 1)
        return float(by_row @ _weights(rows, 2))


def norm(x: np.ndarray) -> float:
    """Return the Euclidean norm of ``x``, in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        flat = np.asarray(x, np.float64).reshape(-1)
        return float(np.sqrt(flat @ flat))


@lru_cache(maxsize=1)
def _factors() -> tuple[np.ndarray, tuple[int, int]]:
    """Odd factors, the same wherever they are drawn."""
    drawn = np.random.Generator(np.random.Philox(12)).integers(0, 2**63, COLUMNS + 2, dtype=np.uint64) * 2 + 1
    drawn = drawn.astype(np.uint64)
    return drawn[:COLUMNS], (int(drawn[-2]), int(drawn[-1]))


@lru_cache(maxsize=256)
def _weights(n: int, salt: int) -> np.ndarray:
    """n numbers from 0.48 to 1.44 with signs, of mean square 1, the same wherever they are drawn.

    No bare signs, under which a constant that is added to all elements may add up to 0. Kept, since there are few sizes
    and drawing takes longer.
    """
    draw = np.random.Generator(np.random.Philox(salt))
    return (1.0 - 2.0 * draw.integers(0, 2, n)) * draw.uniform(0.5, 1.5, n) / np.sqrt(13 / 12)
