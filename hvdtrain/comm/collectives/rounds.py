"""Collectives as messages between pairs of ranks, in pieces, so that both directions of each link are busy at once.

A sum is reduce-scatter and all-gather in rounds of one piece a rank, several under way: the bytes of a ring all-reduce,
2 (P-1)/P of the vector (Patarasuk and Yuan 2009), in two steps in place of 2 (P-1). Pieces are added in the order of
the ranks, so that any number of ranks and every transport have the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.messages.progress import SEQUENCES, MpiProgress, Operation
from hvdtrain.comm.collectives.base import add_rows, begins

PIECE, LEAST_PIECE = 256 << 10, 16 << 10
"""Bytes of a message at most: so much at the end of an operation is not overlapped with anything. Of many ranks less,
so that a round does not grow with them."""

DEPTH = 8
"""Rounds of one operation under way at once."""

STAGES = 32
"""Stages of an operation whose tags differ. MPI promises tags up to 32767."""

MOST_IDLE = 32
"""Pieces' memory that is kept for the next operation."""

_CALL = 256
"""Bytes of a rank's call: a checksum of all of its text, then the text as far as it goes."""

SCATTER, GATHER = 0, 1


class Peers:
    """The ranks of ``comm``, used for nothing else, as peers; numbers of operations count alike on all."""

    def __init__(self, comm: Any, progress: MpiProgress) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]  # not all to one at first
        self.progress, self._comm = progress, comm
        self.piece = max(LEAST_PIECE, min(PIECE, 2 * PIECE // self.size))
        self._idle: list[np.ndarray] = []

    def lend(self) -> np.ndarray:
        """Return memory for a piece of each rank, uint8 (P, piece), to be taken back."""
        return self._idle.pop() if self._idle else np.empty((self.size, self.piece), np.uint8)

    def take_back(self, memory: np.ndarray) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(memory)

    def send(self, operation: Operation, raw: np.ndarray, to: int, tag: int, then: Callable[[], None]) -> None:
        """Send contiguous bytes; ``then`` is called once they may be written to again."""
        self.progress.post(operation, self._comm.Isend(raw, dest=to, tag=tag), then)

    def receive(self, operation: Operation, raw: np.ndarray, source: int, tag: int, then: Callable[[], None]) -> None:
        """Receive exactly the contiguous bytes ``raw``; ``then`` is called once they are there."""
        self.progress.post(operation, self._comm.Irecv(raw, source=source, tag=tag), then)


class Call(Operation):
    """Exchange of ``what`` each rank of ``peers`` has entered (law 5), before anything else; no value.

    ``sequence``, ``stage``: number of the operation, the same on every rank. A subclass continues in `met`. Errors:
    RuntimeError on every rank where two have entered different ones.
    """

    def __init__(self, peers: Peers, what: str, sequence: int, stage: int = 0) -> None:
        super().__init__()
        self.peers, self.what = peers, what
        place = sequence % SEQUENCES * STAGES + stage % STAGES
        self._called_by, self.tag = 2 * SEQUENCES * STAGES + place, 2 * place
        self._heard: dict[int, np.ndarray] = {}
        self._left = 0

    def begin(self) -> None:
        own, peers = _said(self.what), self.peers
        self._heard[peers.rank] = own
        self._left = 2 * len(peers.others)
        for q in peers.others:
            self._heard[q] = np.empty(_CALL, np.uint8)
            peers.receive(self, self._heard[q], q, self._called_by, self._answered)
        for q in peers.others:
            peers.send(self, own, q, self._called_by, self._answered)
        if not self._left:
            self.met()

    def _answered(self) -> None:
        self._left -= 1
        if self._left:
            return
        first = self._heard[0]
        odd = next((q for q in range(self.peers.size) if not np.array_equal(self._heard[q], first)), None)
        if odd is not None:
            raise RuntimeError(f"ranks disagree: rank 0 entered {_words(first)}; rank {odd} entered "
                               f"{_words(self._heard[odd])}")
        self._heard.clear()
        self.met()

    def met(self) -> None:
        """Continue: all ranks have entered the same."""
        self.end()


class _Line:
    """Actions in the order of rounds: the next one's number, and those that wait for their turn."""

    def __init__(self) -> None:
        self.turn = 0
        self.waiting: dict[int, Callable[[], None]] = {}


class Rounds(Call):
    """An operation of ``rounds`` rounds, of which `DEPTH` are under way at once.

    A subclass posts the messages of one in `open`, each by `send` or `receive`, and gives the result in `result`.
    """

    rounds = 0

    def met(self) -> None:
        self._opened = self._closed = 0
        self._opening = False
        self._unfinished: dict[int, int] = {}
        self._lines: dict[int, _Line] = {}
        self.begun()
        self._go_on()

    def begun(self) -> None:
        """Do what comes before the first round."""

    def open(self, j: int) -> None:
        """Post the first messages of round ``j``."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the value; all messages are through."""
        raise NotImplementedError

    def closing(self) -> None:
        self.end(self.result())

    def send(self, j: int, raw: np.ndarray, to: int, phase: int, then: Callable[[], None] | None = None) -> None:
        """Send a piece of round ``j``; none of no bytes."""
        self._post(self.peers.send, j, raw, to, phase, then)

    def receive(self, j: int, raw: np.ndarray, source: int, phase: int,
                then: Callable[[], None] | None = None) -> None:
        """Receive a piece of round ``j``; one of no bytes is there at once."""
        self._post(self.peers.receive, j, raw, source, phase, then)

    def _post(self, post: Callable[..., None], j: int, raw: np.ndarray, peer: int, phase: int,
              then: Callable[[], None] | None) -> None:
        self._unfinished[j] += 1

        def through() -> None:
            if then is not None:
                then()
            self._finished(j)

        if raw.size:
            post(self, raw, peer, self.tag + phase, through)
        else:
            through()

    def hold(self, j: int) -> None:
        """Keep round ``j`` open until something is done `in_order` for it."""
        self._unfinished[j] += 1

    def in_order(self, line: int, j: int, act: Callable[[], None]) -> None:
        """Do ``act`` for round ``j``, which was held for it, after the same of all rounds before it.

        Messages to a rank under one tag are matched in the order of posting, while they come through in any.
        """
        place = self._lines.setdefault(line, _Line())
        place.waiting[j] = act
        while place.turn in place.waiting:
            turn = place.turn
            place.waiting.pop(turn)()
            # Before the round is let go, which may open another one and come here again.
            place.turn = turn + 1
            self._finished(turn)

    def _finished(self, j: int) -> None:
        self._unfinished[j] -= 1
        if not self._unfinished[j]:
            del self._unfinished[j]
            self._closed += 1
            self._go_on()

    def _go_on(self) -> None:
        if self._opening:  # from within a round that is being opened: all of its messages come before the next one's
            return
        self._opening = True
        while self._opened < self.rounds and len(self._unfinished) < DEPTH:
            j = self._opened
            self._opened += 1
            self._unfinished[j] = 1  # itself, so that a round of nothing closes once, here
            self.open(j)
            self._finished(j)
        self._opening = False
        if self._closed == self.rounds and not self.over:
            self.closing()


class Exchanged(Rounds):
    """Exchange of rows: row q of ``sent`` goes to rank q, row q of ``got`` comes from it; of any lengths.

    Rows are contiguous; ``got`` is the value, or ``value`` if that is given.
    """

    def __init__(self, peers: Peers, what: str, sequence: int, stage: int, sent: Sequence[np.ndarray],
                 got: Sequence[np.ndarray], value: Any = None) -> None:
        super().__init__(peers, what, sequence, stage)
        self._sent, self._got, self._value = [_raw(x) for x in sent], [_raw(x) for x in got], value
        # Not more than one of the others may estimate with: each pair has its own number of pieces.
        self.rounds = -(-max((x.size for x in (*self._sent, *self._got)), default=0) // PIECE)

    def begun(self) -> None:
        own = self.peers.rank
        if self._got[own].size:
            np.copyto(self._got[own], self._sent[own])

    def open(self, j: int) -> None:
        at = slice(j * PIECE, (j + 1) * PIECE)
        for q in self.peers.others:
            self.receive(j, self._got[q][at], q, SCATTER)
        for q in self.peers.others:
            self.send(j, self._sent[q][at], q, SCATTER)

    def result(self) -> Any:
        return self._got if self._value is None else self._value


class Reduced(Rounds):
    """This rank's part of the sum of the ranks' ``x_N``, cut into ``sizes_P``, added in the order of the ranks.

    Written to ``into_K`` (None: new memory), which may be that part of ``x_N``; the value. With ``spread`` all parts
    come together again in ``x_N``, the value then. ``divisor``: of the sums. ``ready(begin, end)`` is called before
    elements of ``x_N`` are read for the first time, ``arrived(begin, end)`` once they are the sum.
    """

    def __init__(self, peers: Peers, what: str, sequence: int, stage: int, x_N: np.ndarray, sizes_P: Sequence[int],
                 into_K: np.ndarray | None = None, spread: bool = False, divisor: int = 1,
                 ready: Callable[[int, int], None] | None = None,
                 arrived: Callable[[int, int], None] | None = None) -> None:
        super().__init__(peers, what, sequence, stage)
        self._x_N, self._raw, self._item = x_N, _raw(x_N), x_N.dtype.itemsize
        self._sizes_P, self._begins_P, self._spread, self._divisor = sizes_P, begins(sizes_P), spread, divisor
        own, k = self._begins_P[peers.rank], sizes_P[peers.rank]
        self._into_K = x_N[own:own + k] if spread else np.empty(k, x_N.dtype) if into_K is None else into_K
        self._ready, self._arrived = ready, arrived
        self.squares, self.looks = 0.0, x_N.dtype.name in ("float32", "float64")
        self._step = peers.piece // self._item
        self.rounds = -(-max(sizes_P, default=0) // self._step)

    def _place(self, q: int, j: int) -> tuple[int, int]:
        first, end = self._begins_P[q], self._begins_P[q] + self._sizes_P[q]
        return min(end, first + j * self._step), min(end, first + (j + 1) * self._step)

    def _bytes(self, begin: int, end: int) -> np.ndarray:
        return self._raw[begin * self._item:end * self._item]

    def open(self, j: int) -> None:
        peers = self.peers
        begin, end = self._place(peers.rank, j)
        memory, waiting = peers.lend(), [len(peers.others)]
        self.hold(j)

        def came() -> None:
            waiting[0] -= 1
            if not waiting[0]:
                self.in_order(peers.rank, j, lambda: self._add(j, memory))

        for q in peers.others:
            self.receive(j, memory[q, :(end - begin) * self._item], q, SCATTER, came)
        for q in peers.others:
            self._hand_over(j, q)

    def _hand_over(self, j: int, q: int) -> None:
        """Send rank ``q`` its piece, and ask for its sum once that has left: it comes to where the piece lay."""
        begin, end = self._place(q, j)
        if self._ready and end > begin:
            self._ready(begin, end)
        if self._spread:
            self.hold(j)
            self.send(j, self._bytes(begin, end), q, SCATTER, lambda: self.in_order(q, j, lambda: self._ask(j, q)))
        else:
            self.send(j, self._bytes(begin, end), q, SCATTER)

    def _add(self, j: int, memory: np.ndarray) -> None:
        """Add the pieces of this rank's part, and send the sum to all where it is wanted."""
        rank = self.peers.rank
        begin, end = self._place(rank, j)
        if end > begin:
            if self._ready:
                self._ready(begin, end)
            rows = [self._x_N[begin:end] if q == rank else memory[q, :(end - begin) * self._item].view(self._x_N.dtype)
                    for q in range(self.peers.size)]
            at = begin - self._begins_P[rank]
            sum_K = self._into_K[at:at + end - begin]
            add_rows(rows, sum_K)
            with np.errstate(all="ignore"):  # who looks at the squares tells what is not finite
                if self._divisor != 1:
                    sum_K /= self._divisor
                if self.looks:
                    self.squares += float(np.dot(sum_K, sum_K))
            if self._arrived:
                self._arrived(begin, end)
        self.peers.take_back(memory)
        for q in self.peers.others if self._spread else ():
            self.send(j, self._bytes(begin, end), q, GATHER)

    def _ask(self, j: int, q: int) -> None:
        begin, end = self._place(q, j)
        arrived = self._arrived if end > begin else None
        self.receive(j, self._bytes(begin, end), q, GATHER,
                     None if arrived is None else lambda: arrived(begin, end))

    def result(self) -> np.ndarray:
        return self._x_N if self._spread else self._into_K


def even_parts(n: int, size: int, align: int = 64) -> list[int]:
    """Return the elements of each rank's part of ``n``: alike but for some, each but the last a multiple of ``align``.

    >>> even_parts(200, 2), even_parts(10, 3)
    ([64, 136], [0, 0, 10])
    """
    edges = [n * r // size // align * align for r in range(size)] + [n]
    return [end - begin for begin, end in zip(edges, edges[1:])]


def _raw(x: np.ndarray) -> np.ndarray:
    assert x.flags.c_contiguous, "messages are contiguous"
    return x.reshape(-1).view(np.uint8)


def _said(what: str) -> np.ndarray:
    words = what.encode()
    call = np.zeros(_CALL, np.uint8)
    call[:8] = np.frombuffer(zlib.crc32(words).to_bytes(8, "little"), np.uint8)
    words = words[:_CALL - 8]
    call[8:8 + len(words)] = np.frombuffer(words, np.uint8)
    return call


def _words(said: np.ndarray) -> str:
    return bytes(said[8:]).rstrip(b"\0").decode(errors="replace")
