"""Estimate a step without one of its ranks, from the steps of a run and the simulator. Pure.

`hvdtrain.engine.callbacks.whatif` collects the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.planning.batch.plan import BatchPlan, Ceilings, of_shares, plan
from hvdtrain.planning.linear import LinearTime, Link, fit
from hvdtrain.planning.simulator import Exchange, Host, Rank, Scene, host_links, step
from hvdtrain.planning.simulator.events import unshared_cores
from hvdtrain.planning.simulator.scene import RING

LEAST_STEPS = 10
"""Fewer steps tell nothing."""

PAUSE = 0.5
"""A step between whose end and the one before more than this part of a usual step was spent on other things (a save, an
evaluation) does not count."""

LONGEST = 5.0
"""A step that took so many times as long as a usual one was another kind of step: the first, which traces a graph."""

MANY, MOST_GONE = 64, 16
"""An estimate of 1,024 ranks takes tens of milliseconds for each rank that is left out."""

LEAST_OF_A_SIZE = 3
"""So many steps with a number of samples make a point of a rank's line; the first of them may trace a graph."""


@dataclass(frozen=True)
class Steps:
    """Times of P ranks in N successive steps; float64[N, P] seconds.

    ``wall``: from the end of the step before to its end. ``work``: input, forward and backward. ``wait``: for others
    and for the exchange. ``samples``: int64[N, P].
    """

    wall: np.ndarray
    work: np.ndarray
    wait: np.ndarray
    samples: np.ndarray

    @property
    def rest(self) -> np.ndarray:
        """Seconds of a rank's own work that do not grow with its samples: the update, callbacks."""
        return np.maximum(0.0, self.wall - self.work - self.wait)

    def some(self, which: np.ndarray) -> Steps:
        """Return the steps whose entry in bool[N] is true."""
        return Steps(self.wall[which], self.work[which], self.wait[which], self.samples[which])


@dataclass(frozen=True)
class BatchDivision:
    """Division of a global batch of ``n`` samples: by ``shares_P``, or as planned from the lines if None; the rest as
    in `plan`.
    """

    n: int
    shares_P: Sequence[float] | None
    ceilings_P: Ceilings = None
    least_parts: int = 1
    same_parts: bool = False


@dataclass(frozen=True)
class RankCores:
    """``host``: number of a rank's host; ``threads``: cores that it can use at once."""

    host: int = 0
    threads: float = 1.0


@dataclass(frozen=True)
class ExchangeSetup:
    """Exchange of the steps over transport ``name``, on ``places_P`` of the ranks. ``cores``: of each host, 0: enough.

    ``on_cores``: sums are the processors' work, so that a slower rank takes longer for its share of them.
    """

    name: str = RING
    places_P: tuple[RankCores, ...] = ()
    cores: tuple[float, ...] = ()
    on_cores: bool = False


@dataclass(frozen=True)
class WhatIfForecast:
    """Mean seconds of a step now, and ``without_s_P`` without each rank, None if unknown."""

    step_s: float
    without_s_P: tuple[float | None, ...]

    @property
    def percent_P(self) -> tuple[float | None, ...]:
        """Percent more samples a second without each rank; negative: fewer."""
        return tuple(None if s is None else 100.0 * (self.step_s / s - 1.0) for s in self.without_s_P)


def forecast(steps: Steps, work: BatchDivision, lines_P: Sequence[LinearTime | None] = (),
             transport: ExchangeSetup = ExchangeSetup()) -> WhatIfForecast | None:
    """Estimate a step without each rank; None if too few steps are alike.

    The simulator plays the observed steps, with the others' samples as they would be divided, the exchange of fewer
    ranks, and the cores that the rank leaves to others of its host. What the steps of now take beyond the simulated
    ones, those of then are assumed to take too. ``lines_P``: as measured by the probe; others are fitted to steps of
    different sizes. Of more than `MANY` ranks only the slowest `MOST_GONE` are tried.
    """
    size = steps.wall.shape[1]
    known = list(lines_P) if len(lines_P) == size else [None] * size
    lines_P = [one or line_of(steps.work[:, r], steps.samples[:, r]) for r, one in enumerate(known)]
    usual = counted(steps)
    if len(usual.wall) < LEAST_STEPS or size < 2:
        return None
    step_s = float(usual.wall.mean())
    run = _Observed(usual, work, lines_P, transport)
    beside = step_s / step(run.scene(range(size), run.now)).mid_s
    slowest = set(run.slowest(MOST_GONE if size > MANY else size))
    without: list[float | None] = []
    for gone in range(size):
        if gone not in slowest:
            without.append(None)
            continue
        others = [r for r in range(size) if r != gone]
        made = _divided(others, work, lines_P)
        shares = made and {r: (part.samples, part.accumulate) for r, part in zip(others, made.parts)}
        if not shares or any(m and not run.now[r][0] and lines_P[r] is None for r, (m, _) in shares.items()):
            without.append(None)  # what a rank takes for a sample was not seen
        else:
            without.append(beside * step(run.scene(others, shares)).mid_s)
    return WhatIfForecast(step_s, tuple(without))


class _Observed:
    """The steps as scenes. ``now``: (samples, micro-batches) by rank."""

    def __init__(self, steps: Steps, work: BatchDivision, lines_P: Sequence[LinearTime | None],
                 transport: ExchangeSetup) -> None:
        self._lines, self._transport = [line or LinearTime(0.0, 1.0) for line in lines_P], transport
        size = steps.wall.shape[1]
        self._places = transport.places_P or (RankCores(),) * size
        self.now = {rank: (m, _parts(m, rank, work)) for rank, m in enumerate(map(int, steps.samples[-1]))}
        own = steps.work + steps.rest
        for host, cores in enumerate(transport.cores):  # what its work would take on cores of its own
            here = [r for r, place in enumerate(self._places) if place.host == host]
            if cores and sum(self._places[r].threads for r in here) > cores:
                at_once = cores / max(self._places[r].threads for r in here)
                own[:, here] = unshared_cores(own[:, here], at_once)
        self._rest = np.minimum(steps.rest, own).mean(axis=0)
        self._work = np.maximum(own - self._rest, 1e-9)
        # Who came last waits for the exchange alone.
        self._wire_s = float(steps.wait.min(axis=1).mean())
        each = [self._work[:, r].mean() / self._lines[r].seconds(*self.now[r]) if self.now[r][0] else 0.0
                for r in range(size)]
        self._scale = [factor or 1.0 for factor in each]
        slow = [1.0] * size
        if transport.on_cores and all(m for m, _ in self.now.values()):
            seconds = [self._work[:, r].mean() / self.now[r][0] for r in range(size)]
            slow = [s / max(seconds) for s in seconds]
        self._slow = slow
        idle = [1.0] * len(self._work)
        self._factors = [tuple((self._work[:, r] / self._work[:, r].mean()).tolist() if self.now[r][0] else idle)
                         for r in range(size)]
        self._hosts = tuple(Host(cores) for cores in transport.cores)
        self._links = host_links(transport.name, [place.host for place in self._places], Link(0.0, self._wire_s),
                                 self._hosts, slow)

    def slowest(self, count: int) -> list[int]:
        """Return the ranks with the longest own time."""
        return np.argsort(-(self._work.mean(axis=0) + self._rest), kind="stable")[:count].tolist()

    def scene(self, ranks: Sequence[int], shares: dict[int, tuple[int, int]]) -> Scene:
        """Return the scene of these ranks with these (samples, micro-batches)."""
        found = []
        for r in ranks:
            samples, parts = shares[r]
            found.append(Rank(self._places[r].host, self._lines[r].scaled(self._scale[r]), samples, parts,
                              update_s=float(self._rest[r]), threads=self._places[r].threads, slow=self._slow[r],
                              factors=self._factors[r]))
        exchange = Exchange(self._transport.name, (1,), *self._links)
        return Scene(tuple(found), exchange, hosts=self._hosts)


def _parts(samples: int, rank: int, work: BatchDivision) -> int:
    """Return the micro-batches of ``samples`` of a rank."""
    limit = (work.ceilings_P[rank] if work.ceilings_P else None) or samples
    return max(min(work.least_parts, samples), -(-samples // limit)) if samples else 0


def counted(steps: Steps) -> Steps:
    """Return the steps like the last whole one: the same shares, and nothing else in between."""
    whole = steps.samples.sum(axis=1) == steps.samples.sum(axis=1).max()
    latest = steps.samples[whole][-1] if whole.any() else steps.samples[-1:]
    alike = (steps.samples == latest).all(axis=1)
    usual_s = float(np.median((steps.work + steps.wait)[alike])) if alike.any() else 0.0
    paused = steps.rest.min(axis=1) > PAUSE * usual_s
    return steps.some(alike & ~paused & (steps.wall.max(axis=1) <= LONGEST * usual_s))


def line_of(work_s: np.ndarray, samples: np.ndarray) -> LinearTime | None:
    """Return the line through the medians of steps of different sizes; None with one size."""
    found = []
    for m in np.unique(samples[samples > 0]):
        seconds = work_s[samples == m]
        if len(seconds) >= LEAST_OF_A_SIZE:
            found.append((int(m), float(np.median(seconds[1:]))))
    return fit(*zip(*found)) if len(found) > 1 else None


def _divided(others: Sequence[int], work: BatchDivision, lines_P: Sequence[LinearTime | None]) -> BatchPlan | None:
    """Return the shares of ``others`` in a step without the rest; None if unknown."""
    lines = [lines_P[r] for r in others]
    guessed = [line or LinearTime(0.0, 1.0) for line in lines]
    ceilings = [work.ceilings_P[r] for r in others] if work.ceilings_P else None
    if work.shares_P is None:
        return None if None in lines else plan(guessed, work.n, ceilings, work.least_parts, work.same_parts)
    shares = [work.shares_P[r] for r in others]
    if not sum(shares) > 0:
        return None
    return of_shares(guessed, work.n, shares, ceilings, work.least_parts, work.same_parts)
