"""A sum over several hosts of vectors that lie in memory which the ranks of each host share.

Owns its order: each rank adds one stripe of its host's vectors, the ranks with the same stripe on all hosts add theirs
(`hvdtrain.comm.collectives.rounds.Reduced`), and each writes what comes of it to all vectors of its host, piece by
piece, while other pieces travel. So each host sends and receives the bytes of one vector, however many ranks it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.cluster.messages.progress import Operation
from hvdtrain.comm.collectives.base import add_rows
from hvdtrain.comm.collectives.rounds import Call, Peers, Reduced, even_parts


class Striped(Call):
    """Sum of the vectors of all ranks on several hosts, which share memory within a host, in place; the value is
    ``value``.

    Each rank adds one stripe of its host's vectors, the ranks with the same stripe on all hosts add theirs (`Reduced`),
    and each writes the result to all vectors of its host, piece by piece, while other pieces travel: each host sends
    and receives the bytes of one vector. ``across``: the ranks that have this one's stripe on all hosts; None: it has
    none. ``near``: the other ranks of this host, by their numbers in ``peers``; ``owners``: those of them that have a
    stripe. ``rows``: gives this host's vectors once all ranks have come; ``mine``: which is this rank's. ``divisor``:
    of the sums. ``squares``: of the part of the sum that this rank has added, where it ``looks``.
    """

    def __init__(self, peers: Peers, across: Peers | None, what: str, sequence: int, near: Sequence[int],
                 owners: Sequence[int], rows: Callable[[], list[np.ndarray]], mine: int, stripe: slice, divisor: int,
                 value: np.ndarray) -> None:
        super().__init__(peers, what, sequence)
        self._across, self._sequence, self._near, self._owners = across, sequence, near, owners
        self._rows_of, self._mine, self._stripe, self._divisor, self._given = rows, mine, stripe, divisor, value
        self._awaited, self.squares, self.looks = 0, 0.0, value.dtype.name in ("float32", "float64")

    def met(self) -> None:
        """Add: all vectors are there."""
        rows, token = self._rows_of(), np.zeros(1, np.uint8)
        self._awaited = len(self._owners) + 1
        for q in self._owners:
            self.peers.receive(self, token, q, self.tag, self._done)
        if self._across is None:
            self._done()
            return
        pieces = [row_N[self._stripe] for row_N in rows]
        own_K, others = pieces[self._mine], [x for i, x in enumerate(pieces) if i != self._mine]

        def ready(begin: int, end: int) -> None:
            if others:
                add_rows([x[begin:end] for x in pieces], own_K[begin:end])

        def arrived(begin: int, end: int) -> None:
            for x in others:
                np.copyto(x[begin:end], own_K[begin:end])

        summed = Reduced(self._across, self.what, self._sequence, 0, own_K, even_parts(own_K.size, self._across.size),
                         spread=True, divisor=self._divisor, ready=ready, arrived=arrived)
        summed.followers.append(self._stripe_done)
        self.peers.progress.guarded(summed, summed.met)  # they have met here

    def _stripe_done(self, summed: Operation) -> None:
        """Tell the others of this host, whose vectors hold the sum of this stripe now."""
        if summed.error is not None:
            self.end(error=summed.error)
            return
        assert isinstance(summed, Reduced)
        self.squares = summed.squares
        self._awaited += len(self._near)
        for q in self._near:
            self.peers.send(self, np.zeros(1, np.uint8), q, self.tag, self._done)
        self._done()

    def _done(self) -> None:
        self._awaited -= 1
        if not self._awaited:
            self.end(self._given)
