"""Who waited for whom, from the moments at which the ranks came to their exchanges. Pure.

In an exchange no rank is done before the last one has come. So a rank that stood in it from ``begin`` to ``end`` waited
for the last of those who came before its ``end``, from ``begin`` until that one came; the rest was the exchange itself,
the wire's. In a broadcast, which nobody has to wait for to its end, one who comes after ``end`` was waited for by
nobody: the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.timeline.stood import Blocked


@dataclass(frozen=True)
class Waits:
    """Seconds: ``wait_PP[r, k]`` that rank r waited for rank k, ``wire_P[r]`` of r in exchanges that all had come to.
    """

    wait_PP: np.ndarray
    wire_P: np.ndarray


def split(came_PN: np.ndarray, begin_PN: np.ndarray, end_PN: np.ndarray, within_s: float = 0.0) -> Waits:
    """Split what P ranks stood in N exchanges; seconds on one clock, good to ``within_s``; NaN where one took no part.
    """
    n_ranks = len(came_PN)
    wait_PP, wire_P = np.zeros((n_ranks, n_ranks)), np.zeros(n_ranks)
    came_PN = np.where(np.isnan(came_PN), -np.inf, came_PN)
    for rank in range(n_ranks):
        begin_N, end_N = begin_PN[rank], end_PN[rank]
        part_N = ~np.isnan(begin_N)
        before_PN = np.where(came_PN <= end_N + within_s, came_PN, -np.inf)
        before_PN[rank] = came_PN[rank]
        last_N = before_PN.argmax(axis=0)
        waited_N = np.clip(before_PN.max(axis=0) - begin_N, 0.0, end_N - begin_N)
        waited_N[last_N == rank] = 0.0
        np.add.at(wait_PP[rank], last_N[part_N], waited_N[part_N])
        wire_P[rank] = float((end_N - begin_N - waited_N)[part_N].sum())
    return Waits(wait_PP, wire_P)


def compare(rows_P: Sequence[Sequence[Blocked]], stood_P: Sequence[float], offsets_P: Sequence[float],
            within_s: float = 0.0) -> Waits:
    """Match the ranks' exchanges by step, name and order, and split all that each rank stood, ``stood_P`` seconds.

    ``offsets_P``: how far each rank's clock is ahead. Where only some of the exchanges were kept they stand for all; if
    none of a rank's was, its seconds are told as waiting for itself: for whom is not known.
    """
    came_PN, begin_PN, end_PN = (np.asarray(x) - np.asarray(offsets_P)[:, None] for x in _matched(rows_P))
    waits = split(came_PN, begin_PN, end_PN, within_s)
    kept_P = waits.wait_PP.sum(axis=1) + waits.wire_P
    for rank, (kept_s, stood_s) in enumerate(zip(kept_P.tolist(), stood_P)):
        if kept_s > 0:
            waits.wait_PP[rank] *= stood_s / kept_s
            waits.wire_P[rank] *= stood_s / kept_s
        else:
            waits.wait_PP[rank, rank] = stood_s
    return waits


def _matched(rows_P: Sequence[Sequence[Blocked]]) -> list[np.ndarray]:
    """came, begin and end, (P, N) each; a column is one exchange."""
    keys_P = [[row[:2] for row in rows] for rows in rows_P]
    if all(keys == keys_P[0] for keys in keys_P):  # law 5: every rank enters the same exchanges in the same order
        table = np.array([[row[2:] for row in rows] for rows in rows_P], np.float64).reshape(len(rows_P), -1, 3)
        return [table[:, :, i] for i in range(3)]
    column: dict[tuple[int, str, int], int] = {}
    places_P = []
    for keys in keys_P:
        counts: dict[tuple[int, str], int] = {}
        places = []
        for step, name in keys:
            nth = counts[step, name] = counts.get((step, name), 0) + 1
            places.append(column.setdefault((step, name, nth), len(column)))
        places_P.append(places)
    table = np.full((len(rows_P), len(column), 3), np.nan)
    for own, rows, places in zip(table, rows_P, places_P):
        own[places] = np.array([row[2:] for row in rows], np.float64).reshape(-1, 3)
    return [table[:, :, i] for i in range(3)]
