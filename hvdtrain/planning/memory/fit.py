"""Micro-batches and blocks to recompute of one rank, so that a step fits and takes least time; pure.

The rule for `micro_batch: auto` and `remat: auto` together: as few micro-batches as fit with nothing recomputed, unless
fewer and larger ones with some blocks recomputed are predicted to be faster by more than `WORTH`, or unless nothing
else fits. Where one of the two is settled by the configuration the other one alone makes it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.batch.line import Line
from hvdtrain.planning.memory.knapsack import RematChoice, cheapest

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
