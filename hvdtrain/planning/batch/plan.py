"""Shares of a global batch and micro-batches of each rank. Pure.

`hvdtrain.planning.batch.minmax` finds the best division, `hvdtrain.engine.balance_probe` measures. Every rank computes
the same plan from the same lines, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.planning.batch.minmax import OwnParts, fewest_common_parts, solve
from hvdtrain.planning.batch.sampler import cut
from hvdtrain.planning.linear import LinearTime

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
    """Share of one rank: ``samples`` in ``accumulate`` micro-batches, the largest of ``micro_batch`` samples.

    All are 0 for a rank without samples, except ``accumulate`` if all ranks run the same number of micro-batches.
    """

    samples: int
    micro_batch: int
    accumulate: int
    predicted_s: float


@dataclass(frozen=True)
class BatchPlan:
    """Share of every rank, and the predicted seconds of the slowest."""

    parts: tuple[RankShare, ...]
    step_s: float

    @property
    def samples_P(self) -> tuple[int, ...]:
        """Samples of each rank; their sum is the global batch."""
        return tuple(part.samples for part in self.parts)

    def same(self, other: BatchPlan) -> bool:
        """Return whether ``other`` gives every rank the same work, whatever either predicts."""
        mine = [(p.samples, p.micro_batch, p.accumulate) for p in self.parts]
        return mine == [(p.samples, p.micro_batch, p.accumulate) for p in other.parts]


@dataclass(frozen=True)
class RankLabel:
    """Host, device and compute type of a rank, for the table."""

    host: str
    device: str
    dtype: str


Plan = BatchPlan
"""The name in earlier releases, to which `hvdtrain.balance.plan` leads."""


def plan(lines_P: Sequence[LinearTime], n: int, ceilings_P: Ceilings = None, least_parts: Parts = 1,
         same_parts: bool = False) -> BatchPlan:
    """Return the plan for exactly ``n`` samples with the shortest predicted step.

    A rank runs as few micro-batches as its ceiling allows, but at least ``least_parts`` (fewer if it has fewer
    samples). ``same_parts``: all ranks run one number of micro-batches, as synchronised BatchNorm needs; it is chosen
    with the samples. A straggler that only delays the others gets no samples. Errors: `UserError` for a ceiling below
    1.
    """
    a_P, c_P, ceiling_P = _vectors(lines_P, n, ceilings_P)
    assert n >= 0 and _most(least_parts) >= 1
    if same_parts:
        k, samples_P = fewest_common_parts(a_P, c_P, ceiling_P, _most(least_parts), n)
        return _made(lines_P, samples_P, np.full(len(lines_P), k, np.int64))
    cost = OwnParts(a_P, c_P, ceiling_P, least_parts, n)
    samples_P = solve(cost, n)
    return _made(lines_P, samples_P, cost.parts(samples_P))


def of_shares(lines_P: Sequence[LinearTime], n: int, shares_P: Sequence[float], ceilings_P: Ceilings = None,
              least_parts: Parts = 1, same_parts: bool = False) -> BatchPlan:
    """Return the plan that divides ``n`` samples in proportion to ``shares_P``; other arguments as in `plan`.

    Errors: `UserError` for unusable shares and for a ceiling below 1.
    """
    a_P, c_P, ceiling_P = _vectors(lines_P, n, ceilings_P)
    assert len(shares_P) == len(lines_P) and _most(least_parts) >= 1
    samples_P = np.diff(cut(n, shares_P))
    parts_P = OwnParts(a_P, c_P, ceiling_P, least_parts, n).parts(samples_P)
    if same_parts:
        parts_P = np.full(len(lines_P), max(_most(least_parts), int(parts_P.max())), np.int64)
    return _made(lines_P, samples_P, parts_P)


def equal(lines_P: Sequence[LinearTime], n: int, ceilings_P: Ceilings = None, least_parts: Parts = 1,
          same_parts: bool = False) -> BatchPlan:
    return of_shares(lines_P, n, [1.0] * len(lines_P), ceilings_P, least_parts, same_parts)


def predicted(of: BatchPlan, lines_P: Sequence[LinearTime]) -> BatchPlan:
    """Return the same work with the times that ``lines_P`` predict."""
    assert len(of.parts) == len(lines_P)
    return _made(lines_P, of.samples_P, [part.accumulate for part in of.parts])


def speed(of: BatchPlan, n: int) -> float:
    """Return samples per second of a predicted step over ``n`` samples, without the exchange."""
    return n / of.step_s if of.step_s > 0 else 0.0


def advise_drop(lines_P: Sequence[LinearTime], hosts: Sequence[tuple[str, tuple[int, ...]]], n: int, wire_s: float,
                ceilings_P: Ceilings = None, least_parts: Parts = 1, same_parts: bool = False,
                local_wire_s: float = 0.0) -> str:
    """Return a sentence that names the host without which a step is predicted to be shorter by more than `WORTH`, or
    "".

    ``hosts``: (name, its ranks). ``wire_s``: what a step waits for the exchange with all hosts, assumed not hidden and
    the same with one host less; ``local_wire_s``: with one host left.
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
    """Return rows of text under `COLUMNS`; from `FOLD_FROM` ranks, equal neighbours share one ("0-3")."""
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


def _vectors(lines_P: Sequence[LinearTime], n: int, ceilings_P: Ceilings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (a, c, ceilings) as float64[P], float64[P], int64[P]; no limit is a ceiling of n."""
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


def _made(lines_P: Sequence[LinearTime], samples_P: Sequence[int] | np.ndarray,
          parts_P: Sequence[int] | np.ndarray) -> BatchPlan:
    """Return the plan of these samples and micro-batches, with the times that the lines predict."""
    parts = []
    for line, samples, count in zip(lines_P, map(int, samples_P), map(int, parts_P)):
        parts.append(RankShare(samples, -(-samples // count) if count else 0, count, line.seconds(samples, count)))
    return BatchPlan(tuple(parts), max(part.predicted_s for part in parts))
