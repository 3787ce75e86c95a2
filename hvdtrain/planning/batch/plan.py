"""How many samples of a global batch each rank computes, and in how many micro-batches.

Owns the plan, the plans to compare it with, the advice to leave a host out and the table; pure. Times nothing and moves
no data. Which division is best is found in `hvdtrain.planning.batch.minmax`; the ranks' lines come from
`hvdtrain.engine.balance_probe`, later from `hvdtrain.planning.batch.rebalance`. Every rank computes the same plan from
the same lines, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.planning.batch.minmax import OwnParts, fewest_common_parts, solve
from hvdtrain.planning.batch.sampler import cut
from hvdtrain.planning.linear import Line, fit

WORTH = 0.05
"""A host is advised to be left out where a step gets shorter by more than this part of it."""

FOLD_FROM = 17
"""Ranks from which equal neighbours share a row of the table."""

COLUMNS = ("rank", "host", "device", "dtype", "samples", "accumulation", "memory ceiling", "predicted ms")
"""Headings of `table`."""

Parts = int | Sequence[int]
"""Least micro-batches of every rank, or of each."""

Ceilings = Sequence[int | None] | None
"""By rank, the largest micro-batch its memory holds, in samples; None or 0: no limit."""


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a step: ``samples`` in ``accumulate`` micro-batches, the largest of ``micro_batch`` samples.

    `hvdtrain.planning.batch.sampler.micro_batches` cuts exactly these. All three are 0 for a rank that gets nothing,
    but for ``accumulate`` where all ranks run the same number of micro-batches.
    """

    samples: int
    micro_batch: int
    accumulate: int
    predicted_s: float


@dataclass(frozen=True)
class BatchPlan:
    """Every rank's part, by rank, and the predicted seconds of the slowest."""

    parts: tuple[RankShare, ...]
    step_s: float

    @property
    def samples_P(self) -> tuple[int, ...]:
        """Samples of each rank; their sum is the global batch."""
        return tuple(part.samples for part in self.parts)

    def same(self, other: BatchPlan) -> bool:
        """Whether ``other`` asks every rank for the same work, whatever either predicts."""
        mine = [(p.samples, p.micro_batch, p.accumulate) for p in self.parts]
        return mine == [(p.samples, p.micro_batch, p.accumulate) for p in other.parts]


@dataclass(frozen=True)
class RankLabel:
    """What the table calls a rank."""

    host: str
    device: str
    dtype: str


Plan = BatchPlan
"""The name in earlier releases, to which `hvdtrain.balance.plan` leads."""


def plan(lines_P: Sequence[Line], n: int, ceilings_P: Ceilings = None, least_parts: Parts = 1,
         same_parts: bool = False) -> BatchPlan:
    """The plan for exactly ``n`` samples whose slowest rank is predicted to be the fastest possible.

    A rank runs as few micro-batches as its ceiling allows, but at least ``least_parts`` (fewer where it has fewer
    samples). ``same_parts``: all ranks run one number of micro-batches, as synchronised BatchNorm needs, empty ones
    where samples lack; the number is chosen with the samples. A rank that would only hold the others up gets none.
    Among plans with the same step: the fewest common micro-batches, then as `hvdtrain.planning.batch.minmax.solve`
    says. Errors: `UserError` for a ceiling below 1.
    """
    a_P, c_P, ceiling_P = _vectors(lines_P, n, ceilings_P)
    assert n >= 0 and _most(least_parts) >= 1
    if same_parts:
        k, samples_P = fewest_common_parts(a_P, c_P, ceiling_P, _most(least_parts), n)
        return _made(lines_P, samples_P, np.full(len(lines_P), k, np.int64))
    cost = OwnParts(a_P, c_P, ceiling_P, least_parts, n)
    samples_P = solve(cost, n)
    return _made(lines_P, samples_P, cost.parts(samples_P))


def of_shares(lines_P: Sequence[Line], n: int, shares_P: Sequence[float], ceilings_P: Ceilings = None,
              least_parts: Parts = 1, same_parts: bool = False) -> BatchPlan:
    """The plan that cuts ``n`` samples in proportion to ``shares_P`` as the sampler does; arguments as in `plan`.

    Errors: `UserError` for unusable shares and for a ceiling below 1.
    """
    a_P, c_P, ceiling_P = _vectors(lines_P, n, ceilings_P)
    assert len(shares_P) == len(lines_P) and _most(least_parts) >= 1
    samples_P = np.diff(cut(n, shares_P))
    parts_P = OwnParts(a_P, c_P, ceiling_P, least_parts, n).parts(samples_P)
    if same_parts:
        parts_P = np.full(len(lines_P), max(_most(least_parts), int(parts_P.max())), np.int64)
    return _made(lines_P, samples_P, parts_P)


def equal(lines_P: Sequence[Line], n: int, ceilings_P: Ceilings = None, least_parts: Parts = 1,
          same_parts: bool = False) -> BatchPlan:
    """The plan with equal shares, to compare with."""
    return of_shares(lines_P, n, [1.0] * len(lines_P), ceilings_P, least_parts, same_parts)


def predicted(of: BatchPlan, lines_P: Sequence[Line]) -> BatchPlan:
    """The same work, with the times that ``lines_P`` predict for it."""
    assert len(of.parts) == len(lines_P)
    return _made(lines_P, of.samples_P, [part.accumulate for part in of.parts])


def speed(of: BatchPlan, n: int) -> float:
    """Samples per second of a step over ``n`` samples, as predicted; without what ranks do together."""
    return n / of.step_s if of.step_s > 0 else 0.0


def advise_drop(lines_P: Sequence[Line], hosts: Sequence[tuple[str, tuple[int, ...]]], n: int, wire_s: float,
                ceilings_P: Ceilings = None, least_parts: Parts = 1, same_parts: bool = False,
                local_wire_s: float = 0.0) -> str:
    """One sentence that names the host without which a step is predicted to be shorter by more than `WORTH`, or "".

    ``hosts``: (name, its ranks). ``wire_s``: what a step waits for the exchange with all hosts.
    Assumptions: the wire is not hidden behind backward; it takes ``wire_s`` with one host less as well, though fewer
    hosts never need longer; where one host stays it takes ``local_wire_s``, and nothing where that is one rank. So
    the advice errs on the side of keeping a host. One host is left out at a time.
    """
    def step_s(ranks: Sequence[int], hosts_left: int) -> float:
        some = [ceilings_P[r] for r in ranks] if ceilings_P else None
        least = least_parts if isinstance(least_parts, int) else [least_parts[r] for r in ranks]
        between_s = wire_s if hosts_left > 1 else local_wire_s if len(ranks) > 1 else 0.0
        return plan([lines_P[r] for r in ranks], n, some, least, same_parts).step_s + between_s

    if len(hosts) < 2:
        return ""
    with_all_s = step_s(range(len(lines_P)), len(hosts))
    without: list[tuple[float, str]] = []
    for name, ranks in hosts:
        others = [r for r in range(len(lines_P)) if r not in ranks]
        if others:
            without.append((step_s(others, len(hosts) - 1), name))
    best_s, name = min(without, default=(with_all_s, ""), key=lambda found: found[0])
    saved = 1.0 - best_s / with_all_s if with_all_s > 0 else 0.0
    if saved <= WORTH:
        return ""
    return (f"without host {name} a step is predicted to take {1e3 * best_s:.3g} ms instead of "
            f"{1e3 * with_all_s:.3g} ms, {saved:.0%} less: leave {name} out")


def table(of: BatchPlan, labels_P: Sequence[RankLabel], ceilings_P: Ceilings = None) -> list[list[str]]:
    """Rows of text under `COLUMNS`, one for each rank; from `FOLD_FROM` ranks, equal neighbours share one ("0-3")."""
    assert len(labels_P) == len(of.parts)
    limits = ceilings_P or [None] * len(of.parts)
    cells = [[label.host, label.device, label.dtype, str(part.samples),
              f"{part.accumulate} x {part.micro_batch}" if part.samples else "-",
              str(limit) if limit else "none", f"{1e3 * part.predicted_s:.4g}"]
             for label, part, limit in zip(labels_P, of.parts, limits)]
    if len(cells) < FOLD_FROM:
        return [[str(rank), *row] for rank, row in enumerate(cells)]
    starts = [r for r, row in enumerate(cells) if r == 0 or row != cells[r - 1]]
    ends = [start - 1 for start in starts[1:]] + [len(cells) - 1]
    return [[str(first) if first == last else f"{first}-{last}", *cells[first]] for first, last in zip(starts, ends)]


def _most(least_parts: Parts) -> int:
    return least_parts if isinstance(least_parts, int) else max(least_parts)


def _vectors(lines_P: Sequence[Line], n: int, ceilings_P: Ceilings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a, c, ceilings) as float64[P], float64[P], int64[P]; no limit is a ceiling of n."""
    assert lines_P and (ceilings_P is None or len(ceilings_P) == len(lines_P))
    assert all(line.a_s >= 0 and line.c_s > 0 for line in lines_P), lines_P
    ceilings = []
    for rank, ceiling in enumerate(ceilings_P or [None] * len(lines_P)):
        if ceiling is not None and (int(ceiling) != ceiling or ceiling < 0):
            raise UserError(f"the memory ceiling of rank {rank} is {ceiling} samples",
                            "a whole number of at least 1, or 0 for no limit",
                            "use a smaller model or sample where a device cannot hold even one")
        ceilings.append(min(int(ceiling or n), max(n, 1)) or 1)
    return (np.array([line.a_s for line in lines_P], np.float64), np.array([line.c_s for line in lines_P], np.float64),
            np.array(ceilings, np.int64))


def _made(lines_P: Sequence[Line], samples_P: Sequence[int] | np.ndarray,
          parts_P: Sequence[int] | np.ndarray) -> BatchPlan:
    """The plan of these samples and micro-batches, with the times that the lines predict."""
    parts = []
    for line, samples, count in zip(lines_P, map(int, samples_P), map(int, parts_P)):
        parts.append(RankShare(samples, -(-samples // count) if count else 0, count, line.seconds(samples, count)))
    return BatchPlan(tuple(parts), max(part.predicted_s for part in parts))


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
