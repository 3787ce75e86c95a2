"""Sums of many vectors of the ranks of one host, all of them in two barriers, and a note of each rank in the first.

Owns the vectors' memory; `hvdtrain.comm.collectives.shared` has the barrier, its bound and the order of additions. For
ranks that may bring different things to an exchange, and have to know it before anything is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.base import TILE
from hvdtrain.comm.collectives.shared import SharedCollectives, _add
from hvdtrain.core.timeline import blocked


class RankNotes:
    """A number that each rank of ``wire`` brings to a barrier, after which all read it. Collective to make."""

    def __init__(self, wire: SharedCollectives) -> None:
        self._wire = wire
        # Two, by turns: a rank may bring its next number while another one reads.
        raw, layout = wire._segment(2, "int64")
        self._notes_P2 = layout.rows_LSN(raw)[:, 0]
        self._turn = 0

    def exchange(self, note: int, what: str, bounded: bool = True) -> list[int]:
        """Return the number of each rank. Whatever the ranks wrote to shared memory before is there.

        ``what``: the wait, for messages. ``bounded``: the transport's timeout holds.
        """
        self._turn = 1 - self._turn
        self._notes_P2[self._wire.rank, self._turn] = note
        with deadline(self._wire.timeout_s if bounded else float("inf"), what), pulse.waiting(what), blocked(what):
            self._wire._meet()
        return [int(x) for x in self._notes_P2[:, self._turn]]


class HostSums:
    """Vectors of each rank of one host, by (elements, dtype); ``own``: this rank's. Collective to make.

    A rank fills its own, meets the others in `RankNotes.exchange`, and calls `add` if all of them do.
    """

    def __init__(self, wire: SharedCollectives, sizes: Sequence[tuple[int, str]]) -> None:
        self._wire = wire
        made = [wire._segment(n, dtype) for n, dtype in sizes]
        self._rows = [list(layout.rows_LSN(raw)[:, 0]) for raw, layout in made]
        self.own = [rows[wire.rank] for rows in self._rows]
        self._tiles = {dtype: np.empty(TILE, dtype) for _, dtype in sizes}

    def add(self, divisor: int, what: str) -> None:
        """Replace every rank's vectors by their sum over ``divisor``, a stripe of them by each rank: equal bits."""
        rank, size = self._wire.rank, self._wire.size
        for rows in self._rows:
            n = rows[0].size
            stripe = slice(n * rank // size, n * (rank + 1) // size)
            _add(rows, stripe, divisor, self._tiles[rows[0].dtype.name], False)
        with deadline(self._wire.timeout_s, what), pulse.waiting(what), blocked(what):
            self._wire._meet()
