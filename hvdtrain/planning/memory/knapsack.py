"""The cheapest set of blocks to recompute, so that a pass stays within a budget of bytes; pure.

A pass holds most at one of these moments, which `peak` looks at:

- when forward has ended: all that blocks keep, less what the chosen ones have forgotten;
- in the backward pass of a chosen block: it holds again what it had forgotten, while the blocks after it are gone and
  the chosen ones before it have not come back yet.

So the last block is of no use alone: its backward comes at once. What lies behind the named blocks (a head, the loss)
counts as held at every moment, which errs on the safe side.

Sets are found block by block. Of those with blocks up to the i-th, one is dropped where another saves as much for less:
what a later block asks for is only how much those before it have saved. That is exact; beyond `MOST_SETS` of them those
that save about the same are taken as one, and the cheapest is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdtrain.core.protocols.model import BlockCost

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
