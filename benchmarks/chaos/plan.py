"""Plan of faults, moments and targets, drawn from a seed. Pure.

Half of the kills fall into saves and into starts, where a job holds least still. No more than `MOST_STARTS` faults in a
row fall into starts, since a supervisor rightly ends a run that is lost again and again without a step in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MOST_STARTS = 2
KILL, FREEZE, DISK, FLIP = "kill", "freeze", "disk full", "bit flip"
CUT, OUTAGE = "network cut", "network cut, mended in time"
SURVIVED = (DISK, OUTAGE)
"""Kinds that the attempt which meets them must get over, without a restart."""

START, SAVE, STEP = "start", "save", "step"
RANK, LAUNCHER, SUPERVISOR = "rank", "launcher", "supervisor"
LARGEST_SHARE = 3
TO_OTHERS = 0.1
"""Part of the kills that falls on the launcher, and as many on the supervisor, which take all ranks with them."""


@dataclass(frozen=True)
class Amounts:
    """Return the number of faults of each kind."""

    kills: int = 0
    freezes: int = 0
    disks: int = 0
    flips: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.kills + self.freezes + self.disks + self.flips


@dataclass(frozen=True)
class Fault:
    """A fault of ``kind``, at ``moment``, on ``target``.

    ``pick``, ``when`` in [0, 1): which rank or bit, and how far into the moment. ``ranks``, ``shares``: of the attempts
    that come after it.
    """

    number: int
    kind: str
    moment: str
    target: str
    pick: float
    when: float
    ranks: int
    shares: tuple[int, ...]


def draw(amounts: Amounts, most_ranks: int, hold: bool, seed: int) -> list[Fault]:
    """Draw the faults in their order; ``hold``: every attempt has ``most_ranks`` ranks and equal shares."""
    chance = random.Random(seed)
    places = [(KILL, _moment(i, amounts.kills), _target(i, amounts.kills)) for i in range(amounts.kills)]
    places += [(FREEZE, STEP, RANK)] * amounts.freezes + [(DISK, STEP, RANK)] * amounts.disks
    places += [(FLIP, STEP, RANK)] * amounts.flips
    chance.shuffle(places)
    return [Fault(number, kind, moment, target, chance.random(), chance.random(), *_world(chance, most_ranks, hold))
            for number, (kind, moment, target) in enumerate(spread(places))]


def spread(places: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Reorder so that at most `MOST_STARTS` in a row, and not the first one, fall into starts, as far as others last.

    The first attempt has nothing yet that a start could lose.
    """
    left, found, row = list(places), [], MOST_STARTS
    while left:
        at = next((i for i, place in enumerate(left) if row < MOST_STARTS or place[1] != START), 0)
        place = left.pop(at)
        row = row + 1 if place[1] == START else 0
        found.append(place)
    return found


def _moment(i: int, kills: int) -> str:
    """Of ``kills``, half (rounded up) go to saves and starts in turn; the others between."""
    return (SAVE, START)[i % 2] if i < -(-kills // 2) else STEP


def _target(i: int, kills: int) -> str:
    """Every tenth kill is the launcher's, and every tenth the supervisor's, where there are so many."""
    every = round(1 / TO_OTHERS)
    return LAUNCHER if i % every == every - 2 else SUPERVISOR if i % every == every - 1 else RANK


def _world(chance: random.Random, most: int, hold: bool) -> tuple[int, tuple[int, ...]]:
    if hold:
        return most, (1,) * most
    ranks = chance.randint(1, most)
    return ranks, tuple(chance.randint(1, LARGEST_SHARE) for _ in range(ranks))
