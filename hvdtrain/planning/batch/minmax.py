"""Exact division of n samples over ranks with the shortest step, with the same bits on every rank. Pure.

Only whole numbers and single float64 operations in order: exponentials, logarithms and numpy's sum may depend on the
processor. Rank r takes f_r(m) seconds over m samples, and f_r does not fall. A division x with sum n is optimal if::

    max_r f_r(x_r) <= min_r f_r(x_r + 1)

because a shorter step has to move a sample from the rank on the left to one on the right. A bisection on the step finds
x up to rounding; single samples are added and removed until the condition holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

CLOSE = 1e-12
"""A bisection ends at this relative width; what is left is less than a sample of most ranks."""


class SampleCost(Protocol):
    """Cost of m samples on each of P ranks; ``most_P``: int64[P], the most samples a rank can take."""

    most_P: np.ndarray

    def seconds(self, samples_P: np.ndarray) -> np.ndarray:
        """Return float64[P] seconds of int64[P] samples, 0 for none; not falling as samples rise."""
        ...

    def one(self, rank: int, samples: int) -> float:
        """Return `seconds` of one rank, the same bits."""
        ...

    def capacity(self, step_s: float) -> np.ndarray:
        """Return int64[P], about the most samples of each rank that end within ``step_s``."""
        ...


class OwnParts:
    """Each rank runs as few micro-batches as it may: k(m) = max(min(least, m), ceil(m / ceiling))."""

    def __init__(self, a_P: np.ndarray, c_P: np.ndarray, ceiling_P: np.ndarray, least: int | Sequence[int],
                 n: int) -> None:
        self.a_P, self.c_P, self.ceiling_P = a_P, c_P, ceiling_P
        self.least_P = np.broadcast_to(np.asarray(least, np.int64), a_P.shape)
        self.most_P = np.full(len(a_P), n, np.int64)
        self._lists = a_P.tolist(), c_P.tolist(), ceiling_P.tolist(), self.least_P.tolist()
        self._full_s = a_P + c_P * ceiling_P
        self._one_s = a_P + c_P

    def parts(self, samples_P: np.ndarray) -> np.ndarray:
        """Return int64[P] micro-batches of int64[P] samples."""
        return np.maximum(np.minimum(self.least_P, samples_P), -(-samples_P // self.ceiling_P))

    def seconds(self, samples_P: np.ndarray) -> np.ndarray:
        return self.parts(samples_P) * self.a_P + self.c_P * samples_P

    def one(self, rank: int, samples: int) -> float:
        parts = max(min(self._lists[3][rank], samples), -(-samples // self._lists[2][rank]))
        return parts * self._lists[0][rank] + self._lists[1][rank] * samples

    def capacity(self, step_s: float) -> np.ndarray:
        """Return the smaller of the bounds by full micro-batches and by the least number of them."""
        full_P = np.floor(step_s / self._full_s)
        rest_P = np.floor((step_s - full_P * self._full_s - self.a_P) / self.c_P)
        by_ceiling_P = full_P * self.ceiling_P + np.clip(rest_P, 0, self.ceiling_P - 1)
        by_least_P = np.where(step_s < self.least_P * self._one_s, step_s / self._one_s,
                              (step_s - self.least_P * self.a_P) / self.c_P)
        return np.clip(np.minimum(by_ceiling_P, np.floor(by_least_P)), 0, self.most_P).astype(np.int64)


class CommonParts:
    """All ranks run ``k`` micro-batches; a rank without samples pays for them too (`floor_s`)."""

    def __init__(self, a_P: np.ndarray, c_P: np.ndarray, ceiling_P: np.ndarray, k: int, n: int) -> None:
        self.fixed_P, self.c_P, self.n = k * a_P, c_P, n
        self.most_P = np.minimum(k * ceiling_P, n)
        self.floor_s = float(self.fixed_P.max())

    def seconds(self, samples_P: np.ndarray) -> np.ndarray:
        return np.where(samples_P > 0, self.fixed_P + self.c_P * samples_P, 0.0)

    def one(self, rank: int, samples: int) -> float:
        return float(self.fixed_P[rank] + self.c_P[rank] * samples) if samples else 0.0

    def capacity(self, step_s: float) -> np.ndarray:
        return np.clip(np.floor((step_s - self.fixed_P) / self.c_P), 0, self.most_P).astype(np.int64)

    def relaxed(self, step_s: float) -> float:
        """Return the fractional samples that end within ``step_s``: concave in k and the step; < 0: none at all."""
        if step_s < self.floor_s:
            return -1.0
        return float(np.cumsum(np.minimum((step_s - self.fixed_P) / self.c_P, self.most_P))[-1])  # in order, see above

    def holds(self, step_s: float) -> bool:
        """Return whether n samples end within ``step_s``."""
        return step_s >= self.floor_s and int(self.capacity(step_s).sum()) >= self.n

    def roomy(self, step_s: float) -> bool:
        """Return whether no rank is at its ceiling within ``step_s``, so that more micro-batches would only cost."""
        return bool((self.capacity(step_s) < self.most_P).all())


def solve(cost: SampleCost, n: int) -> np.ndarray:
    """Return int64[P] samples with sum ``n`` and the shortest step.

    Of the ranks that would all be slowest, those give up a sample first that save most, then the highest rank.
    """
    samples_P = _start(cost, n)
    samples_P = _add(cost, samples_P, n - int(samples_P.sum()))
    step_s = float(cost.seconds(samples_P).max())
    while True:  # from what fits in a step that is long enough, the way down is the same however long it was
        fits_P = _one_more(cost, samples_P) <= step_s
        if not fits_P.any():
            break
        samples_P = samples_P + fits_P
    return _remove(cost, samples_P, int(samples_P.sum()) - n)


def fewest_common_parts(a_P: np.ndarray, c_P: np.ndarray, ceiling_P: np.ndarray, least: int,
                        n: int) -> tuple[int, np.ndarray]:
    """Return (k, int64[P] samples): the number of micro-batches common to all ranks with the shortest step; ties: the
    fewest.

    The step over fractional samples is convex in k: a search finds its minimum, and only the ks around it whose relaxed
    step is below the best whole one are solved.
    """
    def common(k: int) -> CommonParts:
        return CommonParts(a_P, c_P, ceiling_P, k, n)

    def solved(k: int) -> tuple[float, int, np.ndarray]:
        cost = common(k)
        samples_P = solve(cost, n)
        return max(float(cost.seconds(samples_P).max()), cost.floor_s), k, samples_P

    first = max(least, -(-n // int(ceiling_P.sum())))
    last = max(first, int(-(-n // ceiling_P.min())))
    low, high = first, last
    while low < high:
        middle = (low + high) // 2
        if _relaxed_step(common(middle)) <= _relaxed_step(common(middle + 1)):
            high = middle
        else:
            low = middle + 1
    best = solved(low)
    for k in range(low - 1, first - 1, -1):
        cost, step_s = common(k), best[0] * (1 + CLOSE)
        if cost.relaxed(step_s) < n * (1 - CLOSE):
            break
        if cost.holds(step_s):
            best = min(best, solved(k), key=lambda found: found[:2])
    for k in range(low + 1, last + 1):
        cost, step_s = common(k), best[0] * (1 - CLOSE)
        if cost.relaxed(step_s) < n * (1 - CLOSE):
            break
        if cost.holds(step_s):
            best = min(best, solved(k), key=lambda found: found[:2])
        elif cost.roomy(step_s):
            break
    return best[1], best[2]


def _relaxed_step(cost: CommonParts) -> float:
    """Return the step of ``cost`` with fractional samples."""
    low_s, high_s = 0.0, cost.floor_s + float(cost.c_P.max()) * cost.n
    while high_s - low_s > CLOSE * high_s:
        middle_s = 0.5 * (low_s + high_s)
        if cost.relaxed(middle_s) >= cost.n:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _start(cost: SampleCost, n: int) -> np.ndarray:
    """Return about the best division, most often with too few samples."""
    low_s, high_s = 0.0, float(cost.seconds(cost.most_P).max())
    samples_P = np.zeros(len(cost.most_P), np.int64)
    while high_s - low_s > CLOSE * high_s:
        middle_s = 0.5 * (low_s + high_s)
        capacity_P = cost.capacity(middle_s)
        total = int(capacity_P.sum())
        if total > n:
            high_s = middle_s
            continue
        low_s, samples_P = middle_s, capacity_P
        if total == n:
            break
    return samples_P


def _add(cost: SampleCost, samples_P: np.ndarray, missing: int) -> np.ndarray:
    """Add ``missing`` samples, each where it ends first."""
    assert 0 <= missing <= int((cost.most_P - samples_P).sum()), "a division needs room for all samples"
    samples_P = samples_P.copy()
    ready = [(t, r) for r, t in enumerate(_one_more(cost, samples_P).tolist())]
    heapq.heapify(ready)
    for _ in range(missing):
        rank = ready[0][1]
        samples_P[rank] += 1
        heapq.heapreplace(ready, (_more(cost, samples_P, rank), rank))
    return samples_P


def _remove(cost: SampleCost, samples_P: np.ndarray, surplus: int) -> np.ndarray:
    """Take ``surplus`` samples away, each from the rank that is the slowest by then; see `solve` for ties."""
    samples_P = samples_P.copy()

    def entry(rank: int) -> tuple[float, float, int]:
        samples = int(samples_P[rank])
        return -cost.one(rank, samples), cost.one(rank, samples - 1), -rank

    if surplus == 0:
        return samples_P
    slowest = [entry(int(rank)) for rank in np.flatnonzero(samples_P)]
    heapq.heapify(slowest)
    for _ in range(surplus):
        rank = -slowest[0][2]
        samples_P[rank] -= 1
        if samples_P[rank]:
            heapq.heapreplace(slowest, entry(rank))
        else:
            heapq.heappop(slowest)
    return samples_P


def _one_more(cost: SampleCost, samples_P: np.ndarray) -> np.ndarray:
    """Return float64[P] seconds with one sample more on each rank; infinite at its limit."""
    return np.where(samples_P < cost.most_P, cost.seconds(samples_P + 1), np.inf)


def _more(cost: SampleCost, samples_P: np.ndarray, rank: int) -> float:
    samples = int(samples_P[rank])
    return cost.one(rank, samples + 1) if samples < cost.most_P[rank] else np.inf
