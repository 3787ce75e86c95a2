"""In which order a rank of a pipeline does its forwards and backwards. Pure.

An order gives, for the rank at ``place`` of a copy of ``depth`` ranks with ``chunks`` chunks on each, the list of what
it does with ``micros`` micro-batches. Its chunk v is the copy's chunk v * depth + place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """Forward or backward (``phase``) of micro-batch ``micro`` through the rank's own chunk number ``chunk``."""

    phase: str
    chunk: int
    micro: int


Order = Callable[[int, int, int, int], list[Action]]


def gpipe(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """All forwards, then all backwards, the last micro-batch first. Source: Huang et al. 2019, arXiv 1811.06965."""
    assert chunks == 1
    return [*(Action(FORWARD, 0, m) for m in range(micros)), *(Action(BACKWARD, 0, m) for m in reversed(range(micros)))]


def one_f_one_b(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """First min(micros, depth - place - 1) forwards, then forwards and backwards in turn, then the backwards left.

    At most min(micros, depth - place) micro-batches are between their forward and their backward.
    Source: Narayanan et al. 2019, SOSP, arXiv 1806.03377; 2021, arXiv 2006.09503 (PipeDream-Flush).
    """
    assert chunks == 1
    ahead = min(micros, depth - place - 1)
    actions = [Action(FORWARD, 0, m) for m in range(ahead)]
    for m in range(micros - ahead):
        actions += [Action(FORWARD, 0, ahead + m), Action(BACKWARD, 0, m)]
    return actions + [Action(BACKWARD, 0, m) for m in range(micros - ahead, micros)]


def interleaved(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """As `one_f_one_b`, with ``chunks`` runs of blocks on each rank: an idle share of about 1 / chunks of its.

    Micro-batches go through all chunks in groups of ``depth`` or more, so that a group comes back to the first rank
    when that has done with it. Any number of them will do. Where it is no multiple of ``depth`` groups are larger: more
    is held, and up to ``depth`` messages of a direction wait between two ranks, of which otherwise one is enough. With
    one chunk it is `one_f_one_b`.
    Source: Narayanan et al. 2021, arXiv 2104.04473, which asks for a multiple of ``depth``.
    """
    assert chunks == 1 or depth > 1, f"{chunks} chunks on one rank"
    if chunks == 1:
        return one_f_one_b(place, depth, chunks, micros)
    groups = _groups(micros, depth)
    forwards = [Action(FORWARD, v, m) for group in groups for v in range(chunks) for m in group]
    backwards = [Action(BACKWARD, v, m) for group in groups for v in reversed(range(chunks)) for m in group]
    ahead = 2 * (depth - place - 1) + (chunks - 1) * max(map(len, groups), default=0)
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards)
    return [*forwards[:ahead], *(action for turn in turns for action in turn), *backwards[len(forwards) - ahead:]]


def _groups(micros: int, depth: int) -> list[range]:
    """``micros`` in runs of nearly equal lengths, ``depth`` or more each; one shorter run where there are fewer."""
    n = max(1, micros // depth)
    return [range(micros * i // n, micros * (i + 1) // n) for i in range(n)] if micros else []


def order_of(name: str) -> Order:
    """Return the order that ``pipeline.order`` names."""
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}[name]


def in_flight(order: Order, place: int, depth: int, chunks: int, micros: int, each: Sequence[float] = ()) -> float:
    """Return how much the rank keeps for its backwards at most, where its chunk v keeps ``each[v]`` of a micro-batch.

    By default 1 of each: the number of (chunk, micro-batch) between their forward and the end of their backward.
    """
    held = most = 0.0
    for phase, chunk, _ in order(place, depth, chunks, micros):
        amount = each[chunk] if each else 1
        held += amount if phase == FORWARD else -amount
        most = max(most, held)
    return most
