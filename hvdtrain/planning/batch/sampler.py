"""Samples of global batch t, and their division over ranks and micro-batches: pure functions of numbers.

Law 2 rests here: the order does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdtrain.core.errors import UserError

_WORD = 2**64
_BUCKETED = 3 * 2**61  # first of the random streams of `bucketed`

BUCKETS = 32
"""Buckets of a window whose samples are sorted by length together."""


def random_bits(n: int, seed: int, stream: int) -> np.ndarray:
    """Return uint64[n] random bits that depend on ``seed`` and ``stream`` only (a prefix for a smaller ``n``).

    Raw output of the counter-based Philox-4x64 (Salmon et al., SC 2011), which numpy promises to keep.
    """
    key = np.array([seed % _WORD, stream % _WORD], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(n)


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of ``n`` samples in ``epoch`` as int64[n], a permutation of 0 .. n-1; 0 .. n-1 without
    ``shuffle``.

    Depends on (n, seed, epoch) only, and is the same with every numpy version.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return stable_order(random_bits(n, seed, epoch))


def stable_order(keys_N: np.ndarray) -> np.ndarray:
    """Return ``np.argsort(keys_N, kind="stable")`` of uint64[N] as int64[N], several times as fast for many keys.

    Numpy sorts values with vector instructions, and indices not: sort words of a key's upper bits and its index, then
    sort the few keys that have the same upper bits by their lower ones.
    """
    bits = np.uint64(max(len(keys_N) - 1, 1).bit_length())
    words_N = keys_N >> bits
    words_N <<= bits
    words_N |= np.arange(len(keys_N), dtype=np.uint64)
    words_N.sort()
    order_N = (words_N & (np.uint64(1) << bits) - np.uint64(1)).view(np.int64)
    words_N >>= bits
    same_N = np.zeros(len(keys_N) + 1, bool)
    np.equal(words_N[1:], words_N[:-1], out=same_N[1:-1])
    at = np.flatnonzero(same_N[1:] | same_N[:-1])
    tied = order_N[at]
    order_N[at] = tied[np.argsort(keys_N[tied], kind="stable")]
    return order_N


def bucketed(order_N: np.ndarray, lengths_N: np.ndarray, bucket: int, seed: int, epoch: int) -> np.ndarray:
    """Return ``order_N`` with samples of similar length in buckets of ``bucket``, int64[N]. Pure.

    ``lengths_N``: of each sample, by its number. Windows of `BUCKETS` buckets are sorted by length, then the buckets of
    a window and the samples of each bucket are permuted. The last bucket may be short and stays at the end.
    """
    n, full = len(order_N), len(order_N) // bucket
    places_N = np.arange(n)
    sorted_N = order_N[np.lexsort((lengths_N[order_N], places_N // (BUCKETS * bucket)))]
    drawn = random_bits(full + n, seed, _BUCKETED + epoch)
    turns = np.concatenate([np.lexsort((drawn[:full], np.arange(full) // BUCKETS)), [full]])
    starts = np.repeat(turns * bucket, bucket)[:n] if full else np.zeros(n, np.int64)
    moved_N = sorted_N[starts + places_N % bucket]
    return moved_N[np.lexsort((drawn[full:], places_N // bucket))]


def cut(n: int, weights_P: Sequence[float]) -> np.ndarray:
    """Divide ``n`` samples over P ranks in proportion to ``weights_P``; return offsets int64[P+1].

    Rank r takes [offsets[r], offsets[r+1]). Largest remainder (Hamilton's method), computed exactly: each share is less
    than one sample from its quota n * w / sum(w), equal remainders go to the lower rank, a rank of weight 0 gets
    nothing. Errors: `UserError` for a negative or non-finite weight, or without a positive one.
    """
    shares = _exact(weights_P)
    total = sum(shares)
    quotas = [divmod(n * share, total) for share in shares]
    missing = n - sum(whole for whole, _ in quotas)
    by_remainder = sorted(range(len(quotas)), key=lambda rank: (-quotas[rank][1], rank))
    lucky = set(by_remainder[:missing])
    counts = [whole + (rank in lucky) for rank, (whole, _) in enumerate(quotas)]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True)
class BatchShares:
    """Division of every global batch, the same on every rank: over P ranks by ``shares_P``, and within each rank.

    ``accumulate_P``, ``micro_batch_P``: see `micro_batches`, one of each per rank.
    """

    shares_P: tuple[float, ...]
    accumulate_P: tuple[int, ...]
    micro_batch_P: tuple[int, ...]

    @classmethod
    def of(cls, shares_P: Sequence[float], accumulate: int | Sequence[int] = 1, micro_batch: int = 0) -> BatchShares:
        """Return a division with the same micro-batches on every rank; ``accumulate`` may have an entry for each."""
        P = len(shares_P)
        accumulate_P = (accumulate,) * P if isinstance(accumulate, int) else tuple(accumulate)
        return cls(tuple(float(s) for s in shares_P), accumulate_P, (micro_batch,) * P)

    def offsets(self, n: int) -> np.ndarray:
        """Return int64[P+1]: rank r takes [offsets[r], offsets[r+1]) of ``n`` samples."""
        return _offsets(n, self.shares_P)

    def bounds(self, n: int, rank: int) -> list[tuple[int, int]]:
        """Return the micro-batches [start, stop) of ``n`` samples of ``rank``."""
        return micro_batches(n, self.accumulate_P[rank], self.micro_batch_P[rank])

    def rounds(self, counts_P: Sequence[int]) -> int:
        """Return the most micro-batches of any rank, with ``counts_P[r]`` samples on rank r."""
        different = set(zip((int(n) for n in counts_P), self.accumulate_P, self.micro_batch_P))
        return max(len(micro_batches(*each)) for each in different)


@lru_cache(maxsize=64)
def _offsets(n: int, shares_P: tuple[float, ...]) -> np.ndarray:
    return cut(n, shares_P)


def steps_per_epoch(n: int, global_batch: int) -> int:
    """Return the number of global batches in ``n`` samples; the last one may be short and is kept."""
    at_least("global_batch", global_batch, 1)
    return -(-n // global_batch)


def micro_batches(n: int, accumulate: int, micro_batch: int) -> list[tuple[int, int]]:
    """Split a rank's ``n`` samples of one step into parts [start, stop) of nearly equal size, none empty.

    ``accumulate`` parts, or more where a part would exceed ``micro_batch`` samples (0: no cap); fewer where
    there are fewer samples, and none for n == 0. Larger parts come first.
    """
    at_least("accumulate", accumulate, 1)
    at_least("micro_batch", micro_batch, 0)
    parts = min(accumulate, n)
    if micro_batch:
        parts = max(parts, -(-n // micro_batch))
    if parts == 0:
        return []
    size, larger = divmod(n, parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(zip(starts[:-1], starts[1:]))


def padded(bounds: list[tuple[int, int]], k: int) -> list[tuple[int, int]]:
    """Return ``bounds`` followed by empty parts, ``k`` in all."""
    end = bounds[-1][1] if bounds else 0
    return bounds + [(end, end)] * (k - len(bounds))


def at_least(name: str, value: int, least: int) -> None:
    """Raise `UserError` unless ``value`` is a whole number >= ``least``."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least:
        raise UserError(f"{name} is {value!r}",
                        f"a whole number of at least {least}",
                        f"set {name}: {max(least, 1)} or more")


def _exact(weights_P: Sequence[float]) -> list[int]:
    """Scale finite floats to whole numbers of the same proportions: a float is a fraction over a power of two."""
    weights = [float(w) for w in weights_P]
    if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise UserError(f"the ranks' shares are {weights}",
                        "finite numbers >= 0, at least one of them positive",
                        "give every rank a share, 0 for one that is to get no samples")
    ratios = [w.as_integer_ratio() for w in weights]
    scale = max(below for _, below in ratios)
    return [above * (scale // below) for above, below in ratios]
