"""Collectives over plain MPI with numpy buffers, which advance while the program computes.

Each call is an operation of `hvdtrain.comm.collectives.rounds`, moved by `hvdtrain.cluster.messages.progress`. Every
rank gets the same bits: each element is added by one rank, in the order of the ranks, and sent to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.progress import MpiProgress, Operation, progress_of_process
from hvdtrain.comm.collectives.base import Scratch, WithoutMemory, begins
from hvdtrain.comm.collectives.rounds import Call, Exchanged, Peers, Reduced, even_parts
from hvdtrain.core.mesh import Group, spans
from hvdtrain.core.protocols import AllGather, AllReduce, AllToAllV, Exchange, Request
from hvdtrain.core.timeline import blocked

LONGEST_SLEEP_S = 50e-6
"""Longest sleep between two looks at a collective that others have not entered; it is late by as much."""


class Pending:
    """Handle that runs its collective when it is waited for, once."""

    __slots__ = ("_run", "_value")

    def __init__(self, run: Callable[[], np.ndarray]) -> None:
        self._run: Callable[[], np.ndarray] | None = run
        self._value: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        if self._run is not None:
            self._value, self._run = self._run(), None
        assert self._value is not None
        return self._value

    def done(self) -> bool:
        return self._run is None


class OpenCollective:
    """Handle of an operation of ``wire``, issued when this is made. ``then``: gives the result from its value."""

    __slots__ = ("_operation", "_wire", "_what", "_name", "_came_s", "_then", "_value")

    def __init__(self, operation: Operation, wire: MpiCollectives, what: str, name: str,
                 then: Callable[[Any], Any] | None = None) -> None:
        self._operation, self._wire, self._what, self._name = operation, wire, what, name
        self._then, self._value = then, None
        self._came_s = time.perf_counter()
        wire.moves.issue(operation)

    def wait(self) -> Any:
        if self._value is None:
            stands = blocked(self._name, self._came_s)
            with deadline(self._wire.timeout_s, self._what), pulse.waiting(self._what), stands:
                self._wire.await_over(self._operation)
            if self._operation.error is not None:
                raise self._operation.error
            value = self._operation.value
            self._value = value if self._then is None else self._then(value)
        return self._value

    def done(self) -> bool:
        return self._operation.over

    @property
    def taken(self) -> bool:
        """Return whether the result has been waited for."""
        return self._value is not None


class _Loans:
    """Memory for results that are good until the next call: each handle's own until that is waited for."""

    def __init__(self) -> None:
        self._lent: list[tuple[Scratch, Any]] = []

    def vector(self, n: int, dtype: np.dtype) -> tuple[int, np.ndarray]:
        """Return (place, (n,)) of memory whose call is over and was taken."""
        for place, (scratch, handle) in enumerate(self._lent):
            if handle is None or not isinstance(handle, OpenCollective) or handle.taken:
                return place, scratch.vector(n, dtype)
        self._lent.append((Scratch(), None))
        return len(self._lent) - 1, self._lent[-1][0].vector(n, dtype)

    def lend(self, place: int, handle: Any) -> None:
        self._lent[place] = self._lent[place][0], handle


class MpiCollectives(WithoutMemory):
    """Collectives over an mpi4py communicator, of which it makes a duplicate: collective to make.

    Calls are made in the same order on every rank. They advance in a thread where MPI lets two threads in
    (``overlaps``), else while a handle is waited for. Each first compares its kind, name, shape and dtype between ranks
    (law 5): a message of 256 bytes to each other rank against a hang or a silently wrong sum. ``dtypes`` are those that
    it adds; float16 is summed in float32. ``timeout_s``: longest time of one collective (`deadline`). ``chunk``:
    elements of one call of MPI's own collectives, whose counts have 31 bits.
    """

    name = "mpi"
    reductions: frozenset[str] = frozenset()
    dtypes = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})
    in_graph = False
    host = True
    moves_parts = False
    looks = True
    """Whether sums are squared while they are made (`looked`)."""

    def __init__(self, comm: Any, timeout_s: float = 600.0, chunk: int = 1 << 28) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.timeout_s, self.chunk = timeout_s, chunk
        self._comm, self.moves = comm, progress_of_process()
        self.overlaps = self.moves.threaded
        self.drives = self.overlaps and self.size > 1  # exchanges too, from request to request
        self.moves_parts = self.overlaps  # whether `reducescatterv` and `allgatherv` continue by themselves as well
        with deadline(timeout_s, "duplicating a communicator"):
            self._peers = Peers(comm.Dup(), self.moves)
        self._issued = 0
        self._n_looked, self._squares = 0, 0.0
        self._loans = _Loans()

    def among(self, group: Group) -> MpiCollectives:
        return MpiCollectives(self._comm_of(group), self.timeout_s, self.chunk)

    def _comm_of(self, group: Group) -> Any:
        with deadline(self.timeout_s, f"making a communicator of the ranks {spans(group.ranks)}"):
            return self._comm.Create_group(self._comm.Get_group().Incl(list(group.ranks)))

    def allreduce(self, flat_N: np.ndarray, name: str, op: str = "sum") -> Any:
        """Sum over ranks: (N,) -> (N,), in place where memory allows; ``op``: "sum", or "mean" of floats."""
        assert op in ("sum", "mean"), op
        total_N, divisor = _writable(flat_N), self.size if op == "mean" else 1
        sizes_P = even_parts(total_N.size, self.size)
        return self._issue("allreduce", name, flat_N, lambda what, at: Reduced(
            self._peers, what, at, 0, total_N, sizes_P, spread=True, divisor=divisor), lambda: total_N,
            squared=flat_N.size)

    def allgather(self, x_K: np.ndarray, name: str) -> Any:
        return self._issue("allgather", name, x_K, lambda what, at: _moved(self._peers, "allgather", what, x_K, at),
                           lambda: np.array(x_K).reshape(1, -1))

    def alltoall(self, x_PK: np.ndarray, name: str) -> Any:
        assert x_PK.shape[0] == self.size, f"alltoall of {x_PK.shape} over {self.size} ranks"
        return self._issue("alltoall", name, x_PK, lambda what, at: _moved(self._peers, "alltoall", what, x_PK, at),
                           lambda: np.array(x_PK))

    def alltoallv(self, flat_N: np.ndarray, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> Any:
        return self._issue("alltoallv", name, flat_N[:0], lambda what, at: _moved_parts(
            self._peers, what, flat_N, sent_P, got_P, at), lambda: np.array(flat_N))

    def reducescatter(self, flat_N: np.ndarray, name: str) -> Any:
        assert flat_N.size % self.size == 0, f"reducescatter of {flat_N.size} elements over {self.size} ranks"
        return MpiCollectives.reducescatterv(self, flat_N, [flat_N.size // self.size] * self.size, name)

    def reducescatterv(self, flat_N: np.ndarray, sizes_P: Sequence[int], name: str) -> Any:
        assert flat_N.size == sum(sizes_P), f"reducescatterv of {flat_N.size} elements into {list(sizes_P)}"
        own_N = np.ascontiguousarray(flat_N)
        return self._issue("reducescatterv", name, flat_N, lambda what, at: Reduced(
            self._peers, what, at, 0, own_N, sizes_P), own_N.copy, sizes_P)

    def allgatherv(self, part_K: np.ndarray, sizes_P: Sequence[int], name: str) -> Any:
        assert part_K.size == sizes_P[self.rank], f"allgatherv of {part_K.size} elements as one of {list(sizes_P)}"
        own_K = np.ascontiguousarray(part_K)
        place, all_N = self._loans.vector(sum(sizes_P), own_K.dtype)
        parts = [all_N[begin:begin + k] for begin, k in zip(begins(sizes_P), sizes_P)]
        handle = self._issue("allgatherv", name, part_K, lambda what, at: Exchanged(
            self._peers, what, at, 0, [own_K] * self.size, parts, all_N), own_K.copy, sizes_P)
        self._loans.lend(place, handle)
        return handle

    def broadcast(self, x_N: np.ndarray, name: str, root: int = 0) -> Pending:
        """Broadcast by MPI's own tree; in place where the memory allows it."""
        def run() -> np.ndarray:
            result_N = _writable(x_N)
            for part in spans_of(result_N.size, self.chunk):
                self._comm.Bcast(_bytes(result_N[part]), root=root)
            return result_N

        return self._later(f"broadcast from {root}", name, x_N, run)

    def drive(self, exchange: Exchange, outgoing: Callable[[Any], np.ndarray], arrived: Callable[[Any], Any],
              name: str) -> OpenCollective:
        at = self._number()

        def make(request: Request, stage: int) -> Operation:
            call = f"{name}.r{stage}"
            if isinstance(request, AllReduce):
                assert request.op == "sum", request.op
                x = _writable(outgoing(request.flat_N))
                return Reduced(self._peers, _entered("allreduce", call, x, ()), at, stage, x,
                               even_parts(x.size, self.size), spread=True)
            if isinstance(request, AllGather):
                x = outgoing(request.x_K)
                return _moved(self._peers, "allgather", _entered("allgather", call, x, ()), x, at, stage)
            if isinstance(request, AllToAllV):
                x = outgoing(request.flat_N)
                return _moved_parts(self._peers, _entered("alltoallv", call, x[:0], ()), x,
                                    [int(n) for n in request.sent_P], [int(n) for n in request.got_P], at, stage)
            x = outgoing(request.x_PK)
            return _moved(self._peers, "alltoall", _entered("alltoall", call, x, ()), x, at, stage)

        return OpenCollective(DrivenExchange(exchange, self.moves, make, arrived), self, f"exchange {name!r}", name)

    def _issue(self, kind: str, name: str, x: np.ndarray, make: Callable[[str, int], Operation],
               alone: Callable[[], np.ndarray], sizes_P: Sequence[int] = (), squared: int = 0) -> Any:
        """Issue ``make(words, number)``; ``alone``: one rank's result; ``squared``: elements for `looked`."""
        if self.size == 1:
            return Pending(alone)
        what = _entered(kind, name, x, sizes_P)
        operation = make(what, self._number())
        return OpenCollective(operation, self, what, name, partial(self._look, operation, squared) if squared else None)

    def _look(self, operation: Any, n: int, value: np.ndarray) -> np.ndarray:
        if operation.looks:
            self._n_looked, self._squares = self._n_looked + n, self._squares + operation.squares
        return value

    def looked(self) -> tuple[int, float]:
        found = self._n_looked, self._squares
        self._n_looked, self._squares = 0, 0.0
        return found

    def await_over(self, operation: Operation, longest_sleep_s: float = 200e-6) -> None:
        """Wait until ``operation`` of this transport is over."""
        self.moves.wait(operation, longest_sleep_s=longest_sleep_s)

    def _number(self) -> int:
        self._issued += 1
        return self._issued - 1

    def _later(self, kind: str, name: str, x: np.ndarray, run: Callable[[], np.ndarray],
               sizes_P: Sequence[int] = (), first: Callable[[], None] | None = None) -> Pending:
        """Put check, which compares shapes or ``sizes_P``, and bound around ``run``; ``first`` comes before."""
        what = _entered(kind, name, x, sizes_P)

        def bounded() -> np.ndarray:
            with deadline(self.timeout_s, what), pulse.waiting(what), blocked(name):
                if first is not None:
                    first()
                if self.size > 1:
                    self._compare(what)
                return run()

        return Pending(bounded)

    def _compare(self, what: str) -> None:
        """Raise on every rank unless all ranks entered the same collective; all of them have then come."""
        call = Call(self._peers, what, self._number())
        self.moves.issue(call, beside=False)
        self.await_over(call, LONGEST_SLEEP_S)
        if call.error is not None:
            raise call.error


def _moved(peers: Peers, kind: str, what: str, x: np.ndarray, at: int, stage: int = 0) -> Exchanged:
    """Return the operation of an allgather (K,) -> (P, K), or an alltoall (P, K) -> (P, K)."""
    x = np.ascontiguousarray(x)
    rows_PK = np.empty(x.shape if kind == "alltoall" else (peers.size, x.size), x.dtype)
    sent = list(x) if kind == "alltoall" else [x] * peers.size
    return Exchanged(peers, what, at, stage, sent, list(rows_PK), rows_PK)


def _moved_parts(peers: Peers, what: str, x: np.ndarray, sent_P: Sequence[int], got_P: Sequence[int], at: int,
                 stage: int = 0) -> Exchanged:
    """Return the operation of an alltoallv (N,) -> (N',)."""
    assert x.size == sum(sent_P), f"{what}: {x.size} elements into {list(sent_P)}"
    x, got_N = np.ascontiguousarray(x), np.empty(sum(got_P), x.dtype)
    return Exchanged(peers, what, at, stage, [x[begin:begin + n] for begin, n in zip(begins(sent_P), sent_P)],
                     [got_N[begin:begin + n] for begin, n in zip(begins(got_P), got_P)], got_N)


def spans_of(n: int, chunk: int) -> Iterator[slice]:
    """Yield slices of at most ``chunk`` elements that cover n; none for n = 0, where there is nothing to move."""
    for start in range(0, n, chunk):
        yield slice(start, min(n, start + chunk))


def _entered(kind: str, name: str, x: np.ndarray, sizes_P: Sequence[int]) -> str:
    return f"{kind} {name!r} {tuple(sizes_P) or x.shape} {x.dtype.name}"


def _writable(x: np.ndarray) -> np.ndarray:
    """Return ``x`` itself where MPI can write into it, else a copy."""
    return x if x.flags.c_contiguous and x.flags.writeable else np.array(x, order="C")


def _bytes(x: np.ndarray) -> Any:
    """Return a buffer that moves elements without asking what they are, so that float16 and bool travel too.

    Without a count: mpi4py works it out, and reads one given to an allgather as elements of each rank.
    """
    return [x, _element(x.dtype.itemsize)]


def _parts(x: np.ndarray, sizes_P: Sequence[int]) -> Any:
    return [x, (list(sizes_P), begins(sizes_P)), _element(x.dtype.itemsize)]


def _element(itemsize: int) -> Any:
    MPI = _mpi()
    return {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}[itemsize]


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


class DrivenExchange(Operation):
    """Runs ``exchange`` to its end; the value is what it returns.

    ``make(request, stage)``: the operation of a request; ``arrived``: its value as the exchange wants it. The exchange
    computes in whatever thread moves operations, beside the one that computes gradients.
    """

    def __init__(self, exchange: Exchange, progress: MpiProgress, make: Callable[[Request, int], Operation],
                 arrived: Callable[[Any], Any]) -> None:
        super().__init__()
        self._exchange, self._progress, self._make, self._arrived = exchange, progress, make, arrived
        self._stage = 0

    def begin(self) -> None:
        self._go_on(None)

    def _go_on(self, answer: Any) -> None:
        try:
            request = self._exchange.send(answer)
        except StopIteration as stop:
            self.end(stop.value)
            return
        operation = self._make(request, self._stage)
        self._stage += 1
        operation.followers.append(self._answered)
        self._progress.guarded(operation, operation.begin)

    def _answered(self, operation: Operation) -> None:
        if operation.error is not None:
            self.end(error=operation.error)
        else:
            self._progress.guarded(self, lambda: self._go_on(self._arrived(operation.value)))
