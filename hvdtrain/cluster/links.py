"""Links between hosts over MPI: latency, and the rate of each direction alone and of both at once.

For each pair of hosts the first rank of the first one leads and times by its own clock; messages are polled.
`hvdtrain.comm.transport_sweep` shows the results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.cluster.control import MpiControl
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.processes import wait_for

PIECE = 2 << 20
"""Bytes of the largest piece: what a run's transports move at once."""
LEAST_PIECE = 4 << 10
PIECES, MOST_PIECES = 6, 64
"""Pieces of one exchange, which follow each other without a pause: about, and at most."""

PAIR_S, LEAST_PAIR_S = 0.3, 0.1
"""Seconds that a pair is measured for, and those below which some pairs are left out."""
BUDGET_S = 5.0
SINGLY = 16
"""Up to so many pairs are measured one after the other; of more, those of a round at once."""
SLOW = 0.5
"""A pair below this share of the others' median is slow."""

Pair = tuple[int, int]
"""Two hosts by their places among all, the smaller one first."""


@dataclass(frozen=True)
class LinkTiming:
    """``pieces`` of ``size`` bytes, which follow each other: the median ``seconds`` of one hold no latency."""

    size: int
    seconds: float
    pieces: int = 1

    @property
    def rate_Bps(self) -> float:
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
    there: LinkTiming
    back: LinkTiming
    both: LinkTiming
    at_once: int = 1

    @property
    def rate_Bps(self) -> float:
        """Bytes a second in each direction with both busy, as an all-reduce uses a link."""
        return self.both.rate_Bps


def plan(hosts: int, budget_s: float = BUDGET_S) -> tuple[list[list[Pair]], float]:
    """Return (groups of pairs that are measured at once, seconds for each group); groups follow one another. Pure.

    A group is one pair where there are `SINGLY` at most, else a round. Where ``budget_s`` does not hold all of them for
    `LEAST_PAIR_S` each, the later ones are left out.
    """
    groups = rounds(hosts)
    if hosts * (hosts - 1) // 2 <= SINGLY:
        groups = [[pair] for group in groups for pair in group]
    groups = groups[:max(1, int(budget_s / LEAST_PAIR_S))]
    return groups, min(PAIR_S, budget_s / max(1, len(groups)))


def rounds(hosts: int) -> list[list[Pair]]:
    """Return every pair of hosts once, in rounds with one partner for each host (the circle method). Pure."""
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
    """Return (bytes of a piece, pieces) of an exchange that takes about ``seconds`` at this rate. Pure.

    A piece is a power of two, `LEAST_PIECE` to `PIECE`, and there are `PIECES` or more where that leaves it so large:
    of one piece in each direction, one may wait for the other.
    """
    wanted = max(1, int(rate_Bps * seconds))
    size = min(PIECE, max(LEAST_PIECE, 1 << (max(1, wanted // PIECES).bit_length() - 1)))
    return size, min(MOST_PIECES, max(1, wanted // size))


def slowest_link(links: Sequence[PairLink]) -> PairLink:
    """Return the pair of the smallest `PairLink.rate_Bps`, the first of equal ones."""
    return min(links, key=lambda link: link.rate_Bps)


def others_Bps(link: PairLink, links: Sequence[PairLink]) -> float | None:
    """Return the median rate of all other pairs; None where there is no other."""
    rates = [other.rate_Bps for other in links if other.hosts != link.hosts]
    return median(rates) if rates else None


def slow(links: Sequence[PairLink]) -> list[tuple[PairLink, float]]:
    """Return the pairs below `SLOW` of the median of the others, each with that median; the slowest first."""
    found = []
    for link in sorted(links, key=lambda link: link.rate_Bps):
        middle = others_Bps(link, links)
        if middle is not None and link.rate_Bps < SLOW * middle:
            found.append((link, middle))
    return found


WINDOW = 4
"""Pieces of one direction under way at once: the next one leaves while this one arrives."""
LONGEST_SLEEP_S = 50e-6
"""Between two looks: MPI moves a message only while somebody looks."""
TIMEOUT_S = 60.0

OVER, PING, THERE, BACK, BOTH = range(5)
"""Orders of the leader."""
_ORDER, _PING, _PIECE, _THANKS = range(4)
_WARM_UPS, _PINGS, _MOST_PINGS = 3, 5, 200
"""Small messages there and back: before they count, of one order, and in all at most."""
_PING_PART, _WAY_PART = 0.1, 0.3
"""Of a pair's time: for the latency, and for each of three ways to send."""
_EXCHANGES = 6
"""Exchanges of one kind that fit its time; to find the rate takes one or two."""


def measure(comm: Any, hosts: Sequence[Sequence[int]], budget_s: float = BUDGET_S,
            timeout_s: float = TIMEOUT_S) -> list[PairLink]:
    """Measure the pairs of ``hosts`` (the ranks of each, the first of which speaks for it); collective over ``comm``.

    The same links on every rank, by hosts; none for one host. About 0.3 s a pair, all within about ``budget_s``, less
    where a link is very slow: each way is tried once at least. ``timeout_s`` bounds each wait. Errors: `WaitTimeout`.
    """
    if len(hosts) < 2:
        return []
    with deadline(timeout_s, "duplicating MPI's communicator for the links between hosts"):
        own = comm.Dup()  # no other message gets between these
    control = MpiControl(own, timeout_s)
    speakers = [min(ranks) for ranks in hosts]
    groups, pair_s = plan(len(hosts), budget_s)
    found: list[PairLink] = []
    for group in groups:
        control.barrier("links between hosts")
        for a, b in group:
            ranks = speakers[a], speakers[b]
            with pulse.waiting(f"measuring the link between ranks {ranks[0]} and {ranks[1]}"):
                if control.rank == ranks[0]:
                    found.append(PairLink((a, b), ranks, *lead(own, ranks[1], pair_s, timeout_s), len(group)))
                elif control.rank == ranks[1]:
                    follow(own, ranks[0], timeout_s)
    links = sorted((link for links in control.gather(found) for link in links), key=lambda link: link.hosts)
    with deadline(timeout_s, "freeing the communicator for the links between hosts"):
        own.Free()
    return links


def lead(comm: Any, peer: int, pair_s: float,
         timeout_s: float = TIMEOUT_S) -> tuple[float, LinkTiming, LinkTiming, LinkTiming]:
    """Measure the link to ``peer``, which follows, for about ``pair_s``: (latency_s, there, back, both ways)."""
    end = _End(comm, peer, timeout_s)
    latency_s = _latency(end, _PING_PART * pair_s)
    there, back, both = (_way(end, kind, latency_s, _WAY_PART * pair_s) for kind in (THERE, BACK, BOTH))
    end.order(OVER)
    return latency_s, there, back, both


def follow(comm: Any, peer: int, timeout_s: float = TIMEOUT_S) -> None:
    """Execute the orders of ``peer``, which leads, until it is over."""
    end = _End(comm, peer, timeout_s)
    while True:
        kind, size, count = end.ordered()
        if kind == OVER:
            return
        if kind == PING:
            for _ in range(count):
                end.answer()
            continue
        arrives = kind in (THERE, BOTH)
        end.exchange(count if kind in (BACK, BOTH) else 0, count if arrives else 0, size)
        if arrives:
            end.thank()


def _latency(end: _End, seconds: float) -> float:
    """Return half the median of small messages there and back, for about ``seconds``."""
    end.pings(_WARM_UPS)  # the first one opens the connection
    ends_at, found = time.perf_counter() + seconds, end.pings(_PINGS)
    while time.perf_counter() < ends_at and len(found) < _MOST_PINGS:
        found += end.pings(_PINGS)
    return median(found) / 2


def _way(end: _End, kind: int, latency_s: float, way_s: float) -> LinkTiming:
    """Time exchanges of one kind for about ``way_s``."""
    ends_at, found = time.perf_counter() + way_s, list[float]()
    size, count = sizing(_rate(end, kind, latency_s, way_s / _EXCHANGES), way_s / _EXCHANGES)
    while not found or time.perf_counter() < ends_at:
        found.append(_net(end.timed(kind, size, count), latency_s) / count)
    return LinkTiming(size, median(found), len(found) * count)


def _rate(end: _End, kind: int, latency_s: float, seconds: float) -> float:
    """Estimate the bytes a second: twice as many at a time until they take half of ``seconds``."""
    total = LEAST_PIECE
    while True:
        size = min(total, PIECE)
        taken_s = _net(end.timed(kind, size, total // size), latency_s)
        if taken_s >= seconds / 2 or total >= PIECE * MOST_PIECES // 4:
            return total / taken_s
        total *= 2


def _net(seconds: float, latency_s: float) -> float:
    """Subtract the time of the order and of the reply, or of the first byte of what was ordered."""
    return max(seconds - 2 * latency_s, seconds / 4, 1e-9)


_stuck: list[Any] = []
"""Requests whose wait ran out: MPI may still write into their memory."""


class _Flow:
    """``count`` pieces in one direction, `WINDOW` of them under way at once; ``start(i)`` asks MPI for one."""

    def __init__(self, start: Callable[[int], Any], count: int) -> None:
        self._start, self._next, self._count = start, 0, count
        self._open: deque[Any] = deque()
        self.moved()

    def moved(self) -> bool:
        """Advance; return True when all are through."""
        while self._open and self._open[0].Test():
            self._open.popleft()
        while self._next < self._count and len(self._open) < WINDOW:
            self._open.append(self._start(self._next))
            self._next += 1
        return not self._open


class _End:
    """The leader's or the follower's side of a pair: bounded messages to and from the peer."""

    def __init__(self, comm: Any, peer: int, timeout_s: float) -> None:
        self._comm, self._peer, self._timeout_s = comm, peer, timeout_s
        self._out = np.ones(PIECE, np.uint8)  # written, so that the pages are there
        self._in = np.ones((WINDOW, PIECE), np.uint8)
        self._note, self._small = np.zeros(3, np.int64), np.zeros(1, np.int64)

    def order(self, kind: int, size: int = 0, count: int = 0) -> None:
        self._until(_one(self._say(kind, size, count)))

    def ordered(self) -> tuple[int, int, int]:
        """Wait for an order: (kind, size, count)."""
        note = np.zeros(3, np.int64)
        self._until(_one(self._comm.Irecv(note, source=self._peer, tag=_ORDER)))
        kind, size, count = note.tolist()
        return kind, size, count

    def pings(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` small messages there and back; an order of its own."""
        self.order(PING, 0, count)
        return [self._ping() for _ in range(count)]

    def _ping(self) -> float:
        back = np.zeros(1, np.int64)
        begin = time.perf_counter()
        answer = self._comm.Irecv(back, source=self._peer, tag=_PING)
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_PING)), _one(answer))
        return time.perf_counter() - begin

    def answer(self) -> None:
        self._until(_one(self._comm.Irecv(self._small, source=self._peer, tag=_PING)))
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_PING)))

    def timed(self, kind: int, size: int, count: int) -> float:
        """Return the seconds from an order to send ``count`` pieces until all have arrived, as this side learns it."""
        leaves, waits = kind in (THERE, BOTH), []
        begin = time.perf_counter()
        if leaves:
            waits.append(_one(self._comm.Irecv(np.zeros(1, np.int64), source=self._peer, tag=_THANKS)))
        waits.append(_one(self._say(kind, size, count)))
        self.exchange(count if leaves else 0, count if kind in (BACK, BOTH) else 0, size, *waits)
        return time.perf_counter() - begin

    def exchange(self, sends: int, takes: int, size: int, *also: Callable[[], bool]) -> None:
        """Send and receive so many pieces of ``size`` bytes, and wait for ``also``."""
        comm, peer = self._comm, self._peer
        coming = _Flow(lambda i: comm.Irecv(self._in[i % WINDOW, :size], source=peer, tag=_PIECE), takes)
        leaving = _Flow(lambda i: comm.Isend(self._out[:size], dest=peer, tag=_PIECE), sends)
        self._until(coming.moved, leaving.moved, *also)

    def thank(self) -> None:
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_THANKS)))

    def _say(self, *words: int) -> Any:
        self._note[:] = words
        return self._comm.Isend(self._note, dest=self._peer, tag=_ORDER)

    def _until(self, *tests: Callable[[], bool]) -> None:
        """Wait until all ``tests`` are true; each is called every time, since that advances it."""
        if not wait_for(lambda: all([test() for test in tests]), self._timeout_s, LONGEST_SLEEP_S):
            _stuck.append((self, tests))
            raise WaitTimeout(f"waited {self._timeout_s:g} s for rank {self._peer} during a measurement of the link. "
                              f"{pulse.missing()}".rstrip())


def _one(request: Any) -> Callable[[], bool]:
    """Return a test of a request that MPI is asked again and again, which costs nothing once it is through."""
    return lambda: bool(request.Test())
