"""What a link between two hosts carries, in which order the pairs of hosts are measured, and which of them is slow.

Owns the arithmetic; pure. `hvdtrain.cluster.links` measures, `hvdtrain.comm.measure.link_rows` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PIECE = 2 << 20
"""Bytes of the largest piece: what the wires of a run move at once."""
LEAST_PIECE = 4 << 10
PIECES, MOST_PIECES = 6, 64
"""Pieces of one exchange, which follow each other without a pause: about, and at most."""

PAIR_S, LEAST_PAIR_S = 0.3, 0.1
"""Seconds that a pair is measured for, and those below which some pairs are rather left out."""
BUDGET_S = 5.0
SINGLY = 16
"""Up to so many pairs are measured one after the other; of more, those of a round at once."""
SLOW = 0.5
"""A pair below this part of the others' median is slow."""

Pair = tuple[int, int]
"""Two hosts by their places among all, the smaller one first."""


@dataclass(frozen=True)
class Way:
    """``pieces`` of ``size`` bytes, which follow each other: the median ``seconds`` of one hold no latency."""

    size: int
    seconds: float
    pieces: int = 1

    @property
    def rate_Bps(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds


@dataclass(frozen=True)
class PairLink:
    """The link between two hosts, as rank ``ranks[0]`` on ``hosts[0]`` and ``ranks[1]`` on ``hosts[1]`` found it.

    ``latency_s``: of a small message one way. ``there``, ``back``: from the first host to the second and from the
    second to the first, nothing else on the way; ``both``: as many pieces in each direction at once, until the slower
    one is through. ``at_once``: pairs that were measured together, this one counted.
    """

    hosts: Pair
    ranks: tuple[int, int]
    latency_s: float
    there: Way
    back: Way
    both: Way
    at_once: int = 1

    @property
    def rate_Bps(self) -> float:
        """Bytes a second in each direction with both busy, as an all-reduce uses a link."""
        return self.both.rate_Bps


def plan(hosts: int, budget_s: float = BUDGET_S) -> tuple[list[list[Pair]], float]:
    """(groups of pairs that are measured at once, seconds for each group); groups follow one another.

    A group is one pair where there are `SINGLY` at most, else a round. Where ``budget_s`` does not hold all of them
    for `LEAST_PAIR_S` each, the later ones are left out.
    """
    groups = rounds(hosts)
    if hosts * (hosts - 1) // 2 <= SINGLY:
        groups = [[pair] for group in groups for pair in group]
    groups = groups[:max(1, int(budget_s / LEAST_PAIR_S))]
    return groups, min(PAIR_S, budget_s / max(1, len(groups)))


def rounds(hosts: int) -> list[list[Pair]]:
    """Every pair of hosts once, in rounds in which each host has one partner at most (the circle method)."""
    if hosts < 2:
        return []
    seats = list(range(hosts + hosts % 2))  # an odd one is met by nobody, in its turn
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:len(seats) // 2], reversed(seats))
        found.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def sizing(rate_Bps: float, seconds: float) -> tuple[int, int]:
    """(bytes of a piece, pieces) of an exchange that takes about ``seconds`` at this rate.

    A piece is a power of two, `LEAST_PIECE` to `PIECE`, and there are `PIECES` or more where that leaves it so large:
    of one piece in each direction, one may wait for the other.
    """
    wanted = max(1, int(rate_Bps * seconds))
    size = min(PIECE, max(LEAST_PIECE, 1 << (max(1, wanted // PIECES).bit_length() - 1)))
    return size, min(MOST_PIECES, max(1, wanted // size))


def slowest(links: Sequence[PairLink]) -> PairLink:
    """The pair of the smallest `PairLink.rate_Bps`, the first of equal ones."""
    return min(links, key=lambda link: link.rate_Bps)


def others_Bps(link: PairLink, links: Sequence[PairLink]) -> float | None:
    """Median rate of all other pairs; None where there is no other."""
    rates = [other.rate_Bps for other in links if other.hosts != link.hosts]
    return median(rates) if rates else None


def slow(links: Sequence[PairLink]) -> list[tuple[PairLink, float]]:
    """The pairs below `SLOW` of the median of the others, each with that median; the slowest first."""
    found = []
    for link in sorted(links, key=lambda link: link.rate_Bps):
        middle = others_Bps(link, links)
        if middle is not None and link.rate_Bps < SLOW * middle:
            found.append((link, middle))
    return found
