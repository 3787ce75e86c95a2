"""Micro-batches and recomputed blocks of one rank, so that a step fits and takes least time. Pure.

The rule of `micro_batch: auto` and `remat: auto` together: as few micro-batches as fit with nothing recomputed, unless
fewer ones with recomputed blocks are faster by more than `WORTH`, or nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.linear import LinearTime

WORTH = 0.05
"""Part of a step's time that recomputing has to save over smaller micro-batches."""

HARDLY = 0.05
"""Part of its memory for which a rank does not cut its micro-batches smaller, where the least is too much already."""

ALL_UP_TO, GROWTH = 8, 1.25
"""Numbers of micro-batches that are tried with blocks recomputed: each of the first few, then by this factor."""


@dataclass(frozen=True)
class MemoryRoom:
    """Memory and costs of one rank.

    ``need``: bytes with micro-batches of so many samples and nothing recomputed. ``free``: bytes that it may hold;
    None: unknown. ``costs``: of its blocks by samples, in forward order; none if nothing may be recomputed. ``line``:
    seconds of a micro-batch.
    """

    need: Callable[[int], int]
    free: int | None
    costs: Callable[[int], Sequence[BlockCost]]
    line: LinearTime = LinearTime(0.0, 1e-9)


@dataclass(frozen=True)
class Fit:
    """Decision of a rank: ``parts`` micro-batches of at most ``micro_batch`` samples, and ``choice`` recomputed.

    ``need``: bytes with nothing recomputed.
    """

    micro_batch: int
    parts: int
    choice: RematChoice
    need: int


def choose(room: MemoryRoom, n: int, least_parts: int, most_parts: int) -> Fit:
    """Return the best division of ``n`` samples into ``least_parts`` to ``most_parts`` micro-batches; `nearest` if none
    fits.
    """
    if n == 0:
        return Fit(0, least_parts, RematChoice((), 0, 0.0, True), 0)
    most_parts = max(least_parts, min(most_parts, n))
    if room.free is None:
        return in_parts(room, n, least_parts)
    plain = _fewest(room, n, least_parts, most_parts)
    if plain == least_parts:
        return in_parts(room, n, plain)
    candidates = [in_parts(room, n, parts) for parts in _some(least_parts, (plain or most_parts + 1) - 1)]
    fitting = [fit for fit in candidates if fit.choice.fits]
    best = min(fitting, key=lambda fit: (_seconds(room, fit, n), fit.parts), default=None)
    if plain is not None:
        without = in_parts(room, n, plain)
        if best is None or _seconds(room, best, n) > (1 - WORTH) * _seconds(room, without, n):
            return without
    return best or nearest(room, n, least_parts, most_parts)


def nearest(room: MemoryRoom, n: int, least_parts: int, most_parts: int) -> Fit:
    """Return the fewest micro-batches that hold hardly more than the most would.

    If state alone is too much, or a process shows no rise with samples because it has held more before, tiny
    micro-batches would save nothing and take many times as long. The run halves what then runs out.
    """
    last = in_parts(room, n, most_parts)
    found = (in_parts(room, n, parts) for parts in _some(least_parts, most_parts - 1))
    return next((fit for fit in found if fit.choice.peak <= (1 + HARDLY) * last.choice.peak), last)


def in_parts(room: MemoryRoom, n: int, parts: int) -> Fit:
    """Return the best fit of ``n`` samples in ``parts`` micro-batches."""
    micro_batch = -(-n // parts)
    need = room.need(micro_batch) if n else 0
    if room.free is None or need <= room.free:
        return Fit(micro_batch, parts, RematChoice((), need, 0.0, True), need)
    return Fit(micro_batch, parts, cheapest(room.costs(micro_batch), need, room.free), need)


def _fewest(room: MemoryRoom, n: int, least: int, most: int) -> int | None:
    """Return the fewest micro-batches that fit with nothing recomputed, or None."""
    assert room.free is not None
    if room.need(-(-n // most)) > room.free:
        return None
    while least < most:
        middle = (least + most) // 2
        if room.need(-(-n // middle)) <= room.free:
            most = middle
        else:
            least = middle + 1
    return most


def _some(first: int, last: int) -> list[int]:
    """Return numbers from ``first`` to ``last``, fewer of the large ones."""
    found, at = [], first
    while at <= last:
        found.append(at)
        at = at + 1 if at < first + ALL_UP_TO else max(at + 1, int(GROWTH * at))
    return found


def _seconds(room: MemoryRoom, fit: Fit, n: int) -> float:
    return room.line.seconds(n, fit.parts) + fit.parts * fit.choice.seconds


MOST_SETS = 1024

NEAR = 0.005
"""Where no set fits, the least peak is looked for to within this part of what the pass holds."""


@dataclass(frozen=True)
class RematChoice:
    """Blocks to recompute, peak bytes of a pass, and ``seconds`` for each micro-batch; ``fits``: within the budget."""

    names: tuple[str, ...]
    peak: int
    seconds: float
    fits: bool


@dataclass(frozen=True)
class _Set:
    """Blocks by index, what they save together and cost."""

    saved: int = 0
    seconds: float = 0.0
    places: tuple[int, ...] = ()


def scaled(costs: Sequence[BlockCost], factor: float, overhead: float = 0.0) -> list[BlockCost]:
    """Return the costs for ``factor`` times the samples; ``overhead``: fraction of a block's bytes lost by
    fragmentation.
    """
    bytes_ = factor * (1.0 + overhead)
    return [replace(cost, saved_bytes=int(bytes_ * cost.saved_bytes), forward_s=factor * cost.forward_s,
                    inner_bytes=int(bytes_ * cost.inner_bytes)) for cost in costs]


def peak(costs: Sequence[BlockCost], chosen: Collection[str], whole: int) -> int:
    """Return the most bytes of a pass with ``chosen`` recomputed, of ``whole`` with none; ``costs`` in forward order.

    The peak is at the end of forward, or in the backward of a chosen block, which has its activations again while the
    chosen ones before it have not. So the last block saves nothing. What follows the named blocks counts as held
    throughout, which errs on the safe side.
    """
    most, saved, after = 0, 0, sum(_gain(cost) for cost in costs)
    for cost in costs:
        if cost.name in chosen:
            most = max(most, whole - saved - after + _inner(cost))
            saved += cost.saved_bytes
        after -= _gain(cost)
    return max(most, whole - saved)


def cheapest(costs: Sequence[BlockCost], whole: int, budget: int) -> RematChoice:
    """Return the cheapest set of blocks that keeps a pass within ``budget`` bytes; without one, about the least peak.

    ``costs``: in forward order. ``whole``: bytes with nothing recomputed. Of sets that cost the same the one that saves
    most, then the one with the fewest blocks. Exact up to `MOST_SETS` sets: sets are extended block by block, and one
    is dropped if another saves as much for less.
    """
    if whole <= budget:
        return RematChoice((), whole, 0.0, True)
    found = _within(costs, whole, budget)
    fits = found is not None
    if found is None:
        low, high, found = budget, whole, _Set()
        while high - low > max(1, int(NEAR * whole)):
            middle = (low + high) // 2
            better = _within(costs, whole, middle)
            low, high, found = (middle, high, found) if better is None else (low, middle, better)
    names = tuple(costs[i].name for i in found.places)
    return RematChoice(names, peak(costs, names, whole), found.seconds, fits)


def _within(costs: Sequence[BlockCost], whole: int, budget: int) -> _Set | None:
    """Return the cheapest set within the budget, or None."""
    after = sum(_gain(cost) for cost in costs)
    sets = [_Set()]
    for i, cost in enumerate(costs):
        if _gain(cost):
            room = budget - (whole - after + _inner(cost))
            longer = [_Set(s.saved + cost.saved_bytes, s.seconds + cost.forward_s, (*s.places, i))
                      for s in sets if room + s.saved >= 0]
            sets = _kept([*sets, *longer])
            after -= _gain(cost)
    fitting = [s for s in sets if s.saved >= whole - budget]
    return min(fitting, key=lambda s: (s.seconds, -s.saved, len(s.places), s.places), default=None)


def _kept(sets: Sequence[_Set]) -> list[_Set]:
    """Return the sets that no other beats in both; of very many only some."""
    best = list(_front(sorted(sets, key=lambda s: (-s.saved, s.seconds, len(s.places), s.places))))
    if len(best) <= MOST_SETS:
        return best
    step = max(1, best[0].saved // (MOST_SETS // 2))
    some: dict[int, _Set] = {}
    for s in best:  # from the dearest to the cheapest
        some[s.saved // step] = s
    return [best[0], *(s for s in some.values() if s is not best[0])]


def _front(sets: Sequence[_Set]) -> Iterator[_Set]:
    """Yield the sets that cost less than all that save more."""
    least = float("inf")
    for s in sets:
        if s.seconds < least:
            least = s.seconds
            yield s


def _gain(cost: BlockCost) -> int:
    return max(0, cost.saved_bytes)


def _inner(cost: BlockCost) -> int:
    """Return what a block holds in its own backward, at least what was freed."""
    return max(cost.inner_bytes, cost.saved_bytes)
