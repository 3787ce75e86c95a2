"""Who waited for whom, from the moments at which the ranks came to their exchanges. Pure.

In an exchange no rank is done before the last one has come. So a rank that stood in it from ``begin`` to ``end`` waited
for the last of those who came before its ``end``, from ``begin`` until that one came; the rest was the exchange itself,
the wire's. In a broadcast, which nobody has to wait for to its end, one who comes after ``end`` was waited for by
nobody: the same rule. Where a rank's own device hands over later than the rank begins to wait (a GPU), it computes
until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.core.timeline.stood import Packed


@dataclass(frozen=True)
class Waits:
    """Seconds: ``wait_PP[r, k]`` that rank r waited for rank k, ``wire_P[r]`` of r in exchanges that all had come to,
    ``own_P[r]`` in which r's own device had not handed over yet."""

    wait_PP: np.ndarray
    wire_P: np.ndarray
    own_P: np.ndarray


def split(came_PN: np.ndarray, begin_PN: np.ndarray, end_PN: np.ndarray, within_s: float = 0.0) -> Waits:
    """Split what P ranks stood in N exchanges; seconds on one clock, good to ``within_s``; NaN where one took no part.
    """
    n_ranks = len(came_PN)
    wait_PP, wire_P, own_P = np.zeros((n_ranks, n_ranks)), np.zeros(n_ranks), np.zeros(n_ranks)
    came_PN = np.where(np.isnan(came_PN), -np.inf, came_PN)
    for rank in range(n_ranks):
        begin_N, end_N = begin_PN[rank], end_PN[rank]
        part_N = ~np.isnan(begin_N)
        ready_N = np.clip(came_PN[rank], begin_N, end_N)
        own_P[rank] = float((ready_N - begin_N)[part_N].sum())
        before_PN = np.where(came_PN <= end_N + within_s, came_PN, -np.inf)
        before_PN[rank] = came_PN[rank]
        last_N = before_PN.argmax(axis=0)
        waited_N = np.clip(before_PN.max(axis=0) - ready_N, 0.0, end_N - ready_N)
        waited_N[last_N == rank] = 0.0
        np.add.at(wait_PP[rank], last_N[part_N], waited_N[part_N])
        wire_P[rank] = float((end_N - ready_N - waited_N)[part_N].sum())
    return Waits(wait_PP, wire_P, own_P)


def compare(stood: Sequence[Packed], stood_P: Sequence[float], offsets_P: Sequence[float],
            within_s: float = 0.0) -> Waits:
    """Match the ranks' exchanges by step, name and order, and split all that each rank stood, ``stood_P`` seconds.

    ``stood``: by rank. ``offsets_P``: how far each rank's clock is ahead. Where only some of the exchanges were kept
    they stand for all; if none of a rank's was, its seconds are told as waiting for itself: for whom is not known.
    """
    table_PN3 = _matched(stood) - np.asarray(offsets_P, np.float64)[:, None, None]
    waits = split(table_PN3[..., 0], table_PN3[..., 1], table_PN3[..., 2], within_s)
    kept_P = waits.wait_PP.sum(axis=1) + waits.wire_P + waits.own_P
    for rank, (kept_s, stood_s) in enumerate(zip(kept_P.tolist(), stood_P)):
        if kept_s > 0:
            for seconds in (waits.wait_PP, waits.wire_P, waits.own_P):
                seconds[rank] *= stood_s / kept_s
        else:
            waits.wait_PP[rank, rank] = stood_s
    return waits


def _matched(stood: Sequence[Packed]) -> np.ndarray:
    """came, begin and end by rank and exchange, (P, N, 3); NaN where a rank took no part."""
    first = stood[0]
    if all(own.names == first.names and np.array_equal(own.keys_N2, first.keys_N2) for own in stood):
        return np.stack([own.times_N3 for own in stood])  # law 5: the same exchanges in the same order
    column: dict[tuple[int, str, int], int] = {}
    places_P = []
    for own in stood:
        counts: Counter[tuple[int, str]] = Counter()
        places = []
        for step, name in own.keys_N2.tolist():
            key = (step, own.names[name])
            counts[key] += 1
            places.append(column.setdefault((*key, counts[key]), len(column)))
        places_P.append(places)
    table_PN3 = np.full((len(stood), len(column), 3), np.nan)
    for rows_N3, own, places in zip(table_PN3, stood, places_P):
        rows_N3[places] = own.times_N3
    return table_PN3
