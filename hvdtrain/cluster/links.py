"""Measures the links between hosts over MPI: latency, the rate of each direction alone and of both at once.

Owns the messages: of each pair of hosts the first rank of the first host leads, that of the second follows. The leader
says what comes next in a message of its own and times it by its own clock, so no clocks are compared. Nobody spins: all
messages are asked for and looked at now and then. What pairs there are and what is made of the figures:
`hvdtrain.cluster.pair_links`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.cluster.control import MpiControl
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.pair_links import BUDGET_S, LEAST_PIECE, MOST_PIECES, PIECE, PairLink, Way, plan, sizing
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.processes import wait_for

WINDOW = 4
"""Pieces of one direction under way at once: the next one leaves while this one arrives."""
LONGEST_SLEEP_S = 50e-6
"""Between two looks: MPI moves a message only while somebody looks."""
TIMEOUT_S = 60.0

OVER, PING, THERE, BACK, BOTH = range(5)
"""What the leader orders."""
_ORDER, _PING, _PIECE, _THANKS = range(4)
"""Tags."""
_WARM_UPS, _PINGS, _MOST_PINGS = 3, 5, 200
"""Small messages there and back: before they count, of one order, and in all at most."""
_PING_PART, _WAY_PART = 0.1, 0.3
"""Of a pair's time: for the latency, and for each of three ways to send."""
_EXCHANGES = 6
"""So many exchanges of a way fit its time, of which to find out how fast it is takes one or two."""


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
    with deadline(timeout_s, "giving the communicator for the links between hosts back"):
        own.Free()
    return links


def lead(comm: Any, peer: int, pair_s: float, timeout_s: float = TIMEOUT_S) -> tuple[float, Way, Way, Way]:
    """Measure the link to ``peer``, which follows, for about ``pair_s``: seconds of latency; there, back, both ways."""
    end = _End(comm, peer, timeout_s)
    latency_s = _latency(end, _PING_PART * pair_s)
    there, back, both = (_way(end, kind, latency_s, _WAY_PART * pair_s) for kind in (THERE, BACK, BOTH))
    end.order(OVER)
    return latency_s, there, back, both


def follow(comm: Any, peer: int, timeout_s: float = TIMEOUT_S) -> None:
    """Do what ``peer``, which leads, orders, until it says that it is over."""
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
    """Half the median of small messages there and back, for about ``seconds``."""
    end.pings(_WARM_UPS)  # the first one opens the connection
    ends_at, found = time.perf_counter() + seconds, end.pings(_PINGS)
    while time.perf_counter() < ends_at and len(found) < _MOST_PINGS:
        found += end.pings(_PINGS)
    return median(found) / 2


def _way(end: _End, kind: int, latency_s: float, way_s: float) -> Way:
    """Exchanges of one kind for about ``way_s``."""
    ends_at, found = time.perf_counter() + way_s, list[float]()
    size, count = sizing(_rate(end, kind, latency_s, way_s / _EXCHANGES), way_s / _EXCHANGES)
    while not found or time.perf_counter() < ends_at:
        found.append(_net(end.timed(kind, size, count), latency_s) / count)
    return Way(size, median(found), len(found) * count)


def _rate(end: _End, kind: int, latency_s: float, seconds: float) -> float:
    """About how many bytes a second it carries: twice as many at a time until they take half of ``seconds``."""
    total = LEAST_PIECE
    while True:
        size = min(total, PIECE)
        taken_s = _net(end.timed(kind, size, total // size), latency_s)
        if taken_s >= seconds / 2 or total >= PIECE * MOST_PIECES // 4:
            return total / taken_s
        total *= 2


def _net(seconds: float, latency_s: float) -> float:
    """Without the way of the order and that of the thanks, or of the first byte of what was ordered."""
    return max(seconds - 2 * latency_s, seconds / 4, 1e-9)


_stuck: list[Any] = []
"""What a wait was given up for: MPI may still write into its memory."""


class _Flow:
    """``count`` pieces in one direction, `WINDOW` of them under way at once; ``start(i)`` asks MPI for one."""

    def __init__(self, start: Callable[[int], Any], count: int) -> None:
        self._start, self._next, self._count = start, 0, count
        self._open: deque[Any] = deque()
        self.moved()

    def moved(self) -> bool:
        """Go on; return whether all are through."""
        while self._open and self._open[0].Test():
            self._open.popleft()
        while self._next < self._count and len(self._open) < WINDOW:
            self._open.append(self._start(self._next))
            self._next += 1
        return not self._open


class _End:
    """One end of a pair: messages to and from the other end, whose waits sleep and are bounded."""

    def __init__(self, comm: Any, peer: int, timeout_s: float) -> None:
        self._comm, self._peer, self._timeout_s = comm, peer, timeout_s
        self._out = np.ones(PIECE, np.uint8)  # written, so that the pages are there
        self._in = np.ones((WINDOW, PIECE), np.uint8)
        self._note, self._small = np.zeros(3, np.int64), np.zeros(1, np.int64)

    def order(self, kind: int, size: int = 0, count: int = 0) -> None:
        """Tell the other end what comes next."""
        self._until(_one(self._say(kind, size, count)))

    def ordered(self) -> tuple[int, int, int]:
        """Wait for an order: kind, size, count."""
        note = np.zeros(3, np.int64)
        self._until(_one(self._comm.Irecv(note, source=self._peer, tag=_ORDER)))
        kind, size, count = note.tolist()
        return kind, size, count

    def pings(self, count: int) -> list[float]:
        """Seconds of each of ``count`` small messages there and back; an order of its own."""
        self.order(PING, 0, count)
        return [self._ping() for _ in range(count)]

    def _ping(self) -> float:
        back = np.zeros(1, np.int64)
        begin = time.perf_counter()
        answer = self._comm.Irecv(back, source=self._peer, tag=_PING)
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_PING)), _one(answer))
        return time.perf_counter() - begin

    def answer(self) -> None:
        """Wait for a small message and send one back."""
        self._until(_one(self._comm.Irecv(self._small, source=self._peer, tag=_PING)))
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_PING)))

    def timed(self, kind: int, size: int, count: int) -> float:
        """Seconds from an order to send ``count`` pieces until all are where they should be, as this end hears."""
        leaves, waits = kind in (THERE, BOTH), []
        begin = time.perf_counter()
        if leaves:
            waits.append(_one(self._comm.Irecv(np.zeros(1, np.int64), source=self._peer, tag=_THANKS)))
        waits.append(_one(self._say(kind, size, count)))
        self.exchange(count if leaves else 0, count if kind in (BACK, BOTH) else 0, size, *waits)
        return time.perf_counter() - begin

    def exchange(self, sends: int, takes: int, size: int, *also: Callable[[], bool]) -> None:
        """Send and receive so many pieces of ``size`` bytes, and wait for what else there is."""
        comm, peer = self._comm, self._peer
        coming = _Flow(lambda i: comm.Irecv(self._in[i % WINDOW, :size], source=peer, tag=_PIECE), takes)
        leaving = _Flow(lambda i: comm.Isend(self._out[:size], dest=peer, tag=_PIECE), sends)
        self._until(coming.moved, leaving.moved, *also)

    def thank(self) -> None:
        """Tell the other end that all has arrived."""
        self._until(_one(self._comm.Isend(self._small, dest=self._peer, tag=_THANKS)))

    def _say(self, *words: int) -> Any:
        self._note[:] = words
        return self._comm.Isend(self._note, dest=self._peer, tag=_ORDER)

    def _until(self, *tests: Callable[[], bool]) -> None:
        """Wait until all ``tests`` are true; each is looked at every time, since looking moves it on."""
        if not wait_for(lambda: all([test() for test in tests]), self._timeout_s, LONGEST_SLEEP_S):
            _stuck.append((self, tests))
            raise WaitTimeout(f"waited {self._timeout_s:g} s for rank {self._peer} while the link to it was measured. "
                              f"{pulse.missing()}".rstrip())


def _one(request: Any) -> Callable[[], bool]:
    """Whether a request is through; MPI is asked again and again, which costs nothing once it is."""
    return lambda: bool(request.Test())
