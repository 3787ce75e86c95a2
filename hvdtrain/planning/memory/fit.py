"""Micro-batches and blocks to recompute of one rank, so that a step fits and takes least time; pure.

The rule for `micro_batch: auto` and `remat: auto` together: as few micro-batches as fit with nothing recomputed, unless
fewer and larger ones with some blocks recomputed are predicted to be faster by more than `WORTH`, or unless nothing
else fits. Where one of the two is settled by the configuration the other one alone makes it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.linear import Line

WORTH = 0.05
"""Part of a step's time that recomputing has to save over smaller micro-batches."""

HARDLY = 0.05
"""Part of its memory for which a rank does not cut its micro-batches smaller, where the least is too much already."""

ALL_UP_TO, GROWTH = 8, 1.25
"""Numbers of micro-batches that are tried with blocks recomputed: each of the first few, then by this factor."""


@dataclass(frozen=True)
class MemoryRoom:
    """What one rank knows. ``need``: bytes that it holds in all with micro-batches of so many samples and nothing
    recomputed. ``free``: bytes that it may hold; None: unknown. ``costs``: of its blocks, for so many samples, in the
    order of the forward pass; none where nothing may be recomputed. ``line``: seconds of a micro-batch.
    """

    need: Callable[[int], int]
    free: int | None
    costs: Callable[[int], Sequence[BlockCost]]
    line: Line = Line(0.0, 1e-9)


@dataclass(frozen=True)
class Fit:
    """What a rank does: ``parts`` micro-batches of at most ``micro_batch`` samples, and ``choice`` recomputed.

    ``need``: bytes that it holds with nothing recomputed.
    """

    micro_batch: int
    parts: int
    choice: RematChoice
    need: int


def choose(room: MemoryRoom, n: int, least_parts: int, most_parts: int) -> Fit:
    """Return how ``n`` samples of a step are best computed in ``least_parts`` to ``most_parts`` micro-batches.

    Where nothing fits: what comes `nearest`, with the blocks recomputed that do most for it.
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
    """Return the fewest micro-batches that hold hardly more than the most would; pure.

    Where what lasts is too much, or a process shows no rise with the samples because it has held more before, tiny
    micro-batches would save nothing and take many times as long. What then runs out in earnest is halved in the run.
    """
    last = in_parts(room, n, most_parts)
    found = (in_parts(room, n, parts) for parts in _some(least_parts, most_parts - 1))
    return next((fit for fit in found if fit.choice.peak <= (1 + HARDLY) * last.choice.peak), last)


def in_parts(room: MemoryRoom, n: int, parts: int) -> Fit:
    """Return what fits best with ``n`` samples in ``parts`` micro-batches."""
    micro_batch = -(-n // parts)
    need = room.need(micro_batch) if n else 0
    if room.free is None or need <= room.free:
        return Fit(micro_batch, parts, RematChoice((), need, 0.0, True), need)
    return Fit(micro_batch, parts, cheapest(room.costs(micro_batch), need, room.free), need)


def _fewest(room: MemoryRoom, n: int, least: int, most: int) -> int | None:
    """The fewest micro-batches that fit with nothing recomputed; None where none do."""
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
    """Numbers from ``first`` to ``last``, ascending, fewer where they are large."""
    found, at = [], first
    while at <= last:
        found.append(at)
        at = at + 1 if at < first + ALL_UP_TO else max(at + 1, int(GROWTH * at))
    return found


def _seconds(room: MemoryRoom, fit: Fit, n: int) -> float:
    """Predicted seconds of forward and backward of a step."""
    return room.line.seconds(n, fit.parts) + fit.parts * fit.choice.seconds


MOST_SETS = 1024

NEAR = 0.005
"""Where no set fits, the least peak is looked for to within this part of what the pass holds."""


@dataclass(frozen=True)
class RematChoice:
    """Blocks to recompute. ``peak``: bytes that the pass holds then. ``seconds``: that they cost each micro-batch.

    ``fits``: within the budget; else it is the set that comes nearest.
    """

    names: tuple[str, ...]
    peak: int
    seconds: float
    fits: bool


@dataclass(frozen=True)
class _Set:
    """Blocks by their places, what they save together and what they cost."""

    saved: int = 0
    seconds: float = 0.0
    places: tuple[int, ...] = ()


def scaled(costs: Sequence[BlockCost], factor: float, overhead: float = 0.0) -> list[BlockCost]:
    """Return the costs of ``factor`` times the samples that they were measured with.

    ``overhead``: part of its bytes that a block takes beside them and gives back with them (fragmentation).
    """
    bytes_ = factor * (1.0 + overhead)
    return [replace(cost, saved_bytes=int(bytes_ * cost.saved_bytes), forward_s=factor * cost.forward_s,
                    inner_bytes=int(bytes_ * cost.inner_bytes)) for cost in costs]


def peak(costs: Sequence[BlockCost], chosen: Collection[str], whole: int) -> int:
    """Return the most bytes that a pass holds with ``chosen`` recomputed, of ``whole`` with none.

    ``costs``: in the order of the forward pass.
    """
    most, saved, after = 0, 0, sum(_gain(cost) for cost in costs)
    for cost in costs:
        if cost.name in chosen:
            most = max(most, whole - saved - after + _inner(cost))
            saved += cost.saved_bytes
        after -= _gain(cost)
    return max(most, whole - saved)


def cheapest(costs: Sequence[BlockCost], whole: int, budget: int) -> RematChoice:
    """Return the set of blocks that costs least of those that keep a pass within ``budget`` bytes.

    ``costs``: in the order of the forward pass. ``whole``: bytes with nothing recomputed. A block that saves nothing is
    never chosen; nor is any where ``whole`` fits. Of sets that cost the same the one that saves most, of those the one
    with the fewest blocks. Where none fits: the cheapest of those with about the least peak.
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
    """The cheapest set within the budget, None without any."""
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
    """Those that no other one beats in both, of very many only some."""
    best = list(_front(sorted(sets, key=lambda s: (-s.saved, s.seconds, len(s.places), s.places))))
    if len(best) <= MOST_SETS:
        return best
    step = max(1, best[0].saved // (MOST_SETS // 2))
    some: dict[int, _Set] = {}
    for s in best:  # from the dearest to the cheapest
        some[s.saved // step] = s
    return [best[0], *(s for s in some.values() if s is not best[0])]


def _front(sets: Sequence[_Set]) -> Iterator[_Set]:
    """Of sets from the one that saves most on, those that cost less than all before them."""
    least = float("inf")
    for s in sets:
        if s.seconds < least:
            least = s.seconds
            yield s


def _gain(cost: BlockCost) -> int:
    return max(0, cost.saved_bytes)


def _inner(cost: BlockCost) -> int:
    """What a block holds in its own backward: what it had forgotten at least."""
    return max(cost.inner_bytes, cost.saved_bytes)
