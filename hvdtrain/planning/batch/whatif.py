"""How long a step would take without one of its ranks, from what every rank did in the steps so far.

Owns the arithmetic; pure. Of each step t and rank r is known what r did by itself (input, forward and backward, which
grow with its samples; all the rest, which does not) and how long it waited. With m samples now and m' without rank x::

    own_tr   = work_tr * line_r(m'_r) / line_r(m_r) + rest_tr
    wire_t   = the least wait of a rank in step t: who came last waits for the exchange alone
    step_t   = max over r != x of own_tr, + wire_t * ring(P - 1) / ring(P)        ring(P) = (P - 1) / P

and a step without x is the mean over t: the slowest of the others is another one in each step, which means of ranks do
not show. Where a rank's line is not known its seconds grow as its samples do. It leaves out that ranks which share
cores get more of them when one goes, and that what is left may have another wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.planning.batch.line import Line, fit
from hvdtrain.planning.batch.plan import Ceilings, of_shares, plan

LEAST_STEPS = 10
"""Fewer steps tell nothing."""

PAUSE = 0.5
"""A step between whose end and the one before more than this part of a usual step was spent on other things (a save, an
evaluation) does not count."""

LONGEST = 5.0
"""A step that took so many times as long as a usual one was another kind of step: the first, which traces a graph."""

LEAST_OF_A_SIZE = 3
"""So many steps with a number of samples make a point of a rank's line; the first of them may trace a graph."""


@dataclass(frozen=True)
class Steps:
    """What P ranks did in N successive steps; float64[N, P] seconds.

    ``wall``: from the end of the step before to its end. ``work``: input, forward and backward. ``wait``: for others
    and for the exchange. ``samples``: int64[N, P].
    """

    wall: np.ndarray
    work: np.ndarray
    wait: np.ndarray
    samples: np.ndarray

    @property
    def rest(self) -> np.ndarray:
        """What a rank did by itself that does not grow with its samples: the update, callbacks."""
        return np.maximum(0.0, self.wall - self.work - self.wait)

    def some(self, which: np.ndarray) -> Steps:
        """The steps whose entry in bool[N] is true."""
        return Steps(self.wall[which], self.work[which], self.wait[which], self.samples[which])


@dataclass(frozen=True)
class BatchDivision:
    """How a global batch of ``n`` samples is divided: by ``shares_P``, or as planned from the lines where None.

    The rest as in `hvdtrain.planning.batch.plan.plan`.
    """

    n: int
    shares_P: Sequence[float] | None
    ceilings_P: Ceilings = None
    least_parts: int = 1
    same_parts: bool = False


@dataclass(frozen=True)
class Forecast:
    """``step_s``: of a step now, the mean; ``without_s_P``: without each rank, None where it cannot be told."""

    step_s: float
    without_s_P: tuple[float | None, ...]

    @property
    def percent_P(self) -> tuple[float | None, ...]:
        """How many percent more samples a second there would be without each rank; negative: fewer."""
        return tuple(None if s is None else 100.0 * (self.step_s / s - 1.0) for s in self.without_s_P)


def forecast(steps: Steps, work: BatchDivision, lines_P: Sequence[Line | None] = ()) -> Forecast | None:
    """Reckon a step without each rank; None where too few steps are alike.

    ``lines_P``: as the probe has measured them; others are found from steps of unlike sizes, such as the last of each
    epoch, where there are some.
    """
    size = steps.wall.shape[1]
    known = list(lines_P) if len(lines_P) == size else [None] * size
    lines_P = [one or line_of(steps.work[:, r], steps.samples[:, r]) for r, one in enumerate(known)]
    usual = counted(steps)
    if len(usual.wall) < LEAST_STEPS or size < 2:
        return None
    samples_P = [int(m) for m in usual.samples[-1]]
    wire_N = usual.wait.min(axis=1)
    step_s = float(usual.wall.mean())
    # What the model of now is beside the clock, that of then is taken to be too.
    beside = step_s / float(((usual.work + usual.rest).max(axis=1) + wire_N).mean())
    ring = (size - 2) / (size - 1) / ((size - 1) / size)
    without: list[float | None] = []
    for gone in range(size):
        others = [r for r in range(size) if r != gone]
        changes = _changes(others, samples_P, work, lines_P)
        if changes is None:
            without.append(None)
            continue
        factors, more_s = np.array(changes).T
        own = usual.work[:, others] * factors + more_s + usual.rest[:, others]
        without.append(beside * float((own.max(axis=1) + ring * wire_N).mean()))
    return Forecast(step_s, tuple(without))


def counted(steps: Steps) -> Steps:
    """Those steps that are like the last whole one: the same parts for all ranks, and nothing else in between."""
    whole = steps.samples.sum(axis=1) == steps.samples.sum(axis=1).max()
    latest = steps.samples[whole][-1] if whole.any() else steps.samples[-1:]
    alike = (steps.samples == latest).all(axis=1)
    usual_s = float(np.median((steps.work + steps.wait)[alike])) if alike.any() else 0.0
    paused = steps.rest.min(axis=1) > PAUSE * usual_s
    return steps.some(alike & ~paused & (steps.wall.max(axis=1) <= LONGEST * usual_s))


def line_of(work_s: np.ndarray, samples: np.ndarray) -> Line | None:
    """The line through the medians of steps of unlike sizes; None where there is one size only."""
    found = []
    for m in np.unique(samples[samples > 0]):
        seconds = work_s[samples == m]
        if len(seconds) >= LEAST_OF_A_SIZE:
            found.append((int(m), float(np.median(seconds[1:]))))
    return fit(*zip(*found)) if len(found) > 1 else None


def _changes(others: Sequence[int], samples_P: Sequence[int], work: BatchDivision,
             lines_P: Sequence[Line | None]) -> list[tuple[float, float]] | None:
    """(factor, seconds more) of what each of ``others`` works in a step without the rest; None where not known."""
    lines = [lines_P[r] for r in others]
    guessed = [line or Line(0.0, 1.0) for line in lines]
    ceilings = [work.ceilings_P[r] for r in others] if work.ceilings_P else None
    if work.shares_P is None:
        if None in lines:
            return None
        made = plan(guessed, work.n, ceilings, work.least_parts, work.same_parts)
    else:
        shares = [work.shares_P[r] for r in others]
        if not sum(shares) > 0:
            return None
        made = of_shares(guessed, work.n, shares, ceilings, work.least_parts, work.same_parts)
    found = []
    for rank, line, part in zip(others, lines, made.parts):
        now = samples_P[rank]
        if not now:  # what it takes for a sample was not seen
            if part.samples and line is None:
                return None
            found.append((1.0, line.seconds(part.samples, part.accumulate) if line and part.samples else 0.0))
            continue
        limit = (work.ceilings_P[rank] if work.ceilings_P else None) or now
        parts_now = max(min(work.least_parts, now), -(-now // limit))
        line = line or Line(0.0, 1.0)
        found.append((line.seconds(part.samples, part.accumulate) / line.seconds(now, parts_now), 0.0))
    return found
