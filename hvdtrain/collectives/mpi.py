"""Collectives over plain MPI with numpy buffers: what trains where Horovod is not built.

Owns the blocking calls, their bound in time and the check that ranks agree. Does not start MPI: it is given a
communicator (`hvdtrain.cluster.boot.mpi_comm`).

Every rank gets the same bits: the MPI standard requires it of reductions that return to all processes (MPI 3.1,
section 5.9.6); each known algorithm adds a chunk in one place or in a mirror-image order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.group import Group, spans
from hvdtrain.cluster.patience import wait_for
from hvdtrain.collectives.parts import Scratch, add_rows, begins, windows
from hvdtrain.faults import pulse
from hvdtrain.timeline import blocked


LONGEST_SLEEP_S = 50e-6
"""Between two looks at a collective that others have not entered: what such a sleep costs is late by as much."""


class _Pending:
    """Handle that runs its collective when it is waited for, once."""

    __slots__ = ("_run", "_value")

    def __init__(self, run: Callable[[], np.ndarray]) -> None:
        self._run: Callable[[], np.ndarray] | None = run
        self._value: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        """Run the collective, or return the result of the run before."""
        if self._run is not None:
            self._value, self._run = self._run(), None
        assert self._value is not None
        return self._value


class MpiCollectives:
    """Collectives over an mpi4py communicator. Handles must be waited for in the same order on every rank.

    ``dtypes`` are those that MPI adds by itself; float16, which MPI lacks, is accepted and summed in float32.
    ``timeout_s``: longest time of one collective (`deadline`). ``chunk``: elements of one MPI call, whose counts have
    31 bits. With ``check`` each call first compares its kind, name, shape and dtype between ranks (law 5), by an
    8-byte allgather: a few microseconds against a hang or a silently wrong sum.
    """

    name = "mpi"
    reductions: frozenset[str] = frozenset()
    dtypes = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})
    overlaps = False
    in_graph = False
    host = True

    def __init__(self, comm: Any, timeout_s: float = 600.0, check: bool = True, chunk: int = 1 << 28) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.timeout_s, self.chunk = timeout_s, chunk
        self._comm, self._check = comm, check
        self._lent = Scratch()  # one for all calls: what the last one returned is good until the next

    def among(self, group: Group) -> MpiCollectives:
        """The same kind of wire between the ranks of ``group`` alone."""
        return MpiCollectives(self._comm_of(group), self.timeout_s, self._check, self.chunk)

    def _comm_of(self, group: Group) -> Any:
        with deadline(self.timeout_s, f"making a communicator of the ranks {spans(group.ranks)}"):
            return self._comm.Create_group(self._comm.Get_group().Incl(list(group.ranks)))

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        """No memory of its own."""
        return None

    def flight(self, n: int, dtype: str) -> np.ndarray | None:
        """No memory of its own."""
        return None

    def allreduce(self, flat_N: np.ndarray, name: str, op: str = "sum") -> _Pending:
        """Sum over ranks: (N,) -> (N,); in place where the memory allows it."""
        assert op == "sum", op

        def run() -> np.ndarray:
            total_N = _writable(_summable(flat_N))
            for part in self._spans(total_N.size):
                self._comm.Allreduce(_mpi().IN_PLACE, total_N[part])
            return total_N.astype(flat_N.dtype, copy=False)

        return self._later("allreduce", name, flat_N, run)

    def allgather(self, x_K: np.ndarray, name: str) -> _Pending:
        """Every rank's vector, by rank: (K,) -> (P, K)."""
        def run() -> np.ndarray:
            own_K = np.ascontiguousarray(x_K)
            rows_PK = np.empty((self.size, own_K.size), own_K.dtype)
            for part in self._spans(own_K.size):
                columns = rows_PK if part == slice(0, own_K.size) else np.empty_like(rows_PK[:, part], order="C")
                self._comm.Allgather(_bytes(own_K[part]), _bytes(columns))
                if columns is not rows_PK:
                    rows_PK[:, part] = columns
            return rows_PK

        return self._later("allgather", name, x_K, run)

    def alltoall(self, x_PK: np.ndarray, name: str) -> _Pending:
        """Row p goes to rank p; row q of the result came from rank q: (P, K) -> (P, K)."""
        def run() -> np.ndarray:
            assert x_PK.shape[0] == self.size, f"alltoall of {x_PK.shape} over {self.size} ranks"
            result_PK = np.empty(x_PK.shape, x_PK.dtype)
            for part in self._spans(x_PK.shape[1]):
                received = np.empty_like(x_PK[:, part], order="C")
                self._comm.Alltoall(_bytes(np.ascontiguousarray(x_PK[:, part])), _bytes(received))
                result_PK[:, part] = received
            return result_PK

        return self._later("alltoall", name, x_PK, run)

    def reducescatter(self, flat_N: np.ndarray, name: str) -> _Pending:
        """This rank's 1/P of the sum over ranks: (N,) -> (N/P,); N is a multiple of P."""
        def run() -> np.ndarray:
            assert flat_N.size % self.size == 0, f"reducescatter of {flat_N.size} elements over {self.size} ranks"
            own_PK = np.ascontiguousarray(_summable(flat_N)).reshape(self.size, -1)
            result_K = np.empty(own_PK.shape[1], own_PK.dtype)
            for part in self._spans(result_K.size):
                self._comm.Reduce_scatter_block(np.ascontiguousarray(own_PK[:, part]), result_K[part])
            return result_K.astype(flat_N.dtype, copy=False)

        return self._later("reducescatter", name, flat_N, run)

    def reducescatterv(self, flat_N: np.ndarray, sizes_P: Sequence[int], name: str) -> _Pending:
        """This rank's part of the sum over ranks, added in rank order: (N,) -> (sizes_P[rank],).

        Every rank sends each other its part (MPI_Alltoallv) and adds what it gets: on one host a quarter of the time
        of MPI_Reduce_scatter. Holds P times its part meanwhile, and keeps that memory.
        """
        assert flat_N.size == sum(sizes_P), f"reducescatterv of {flat_N.size} elements into {list(sizes_P)}"

        def run() -> np.ndarray:
            own_N = np.ascontiguousarray(flat_N)
            total_K = np.empty(sizes_P[self.rank], flat_N.dtype)
            at = 0
            for begin, pieces_P in windows(sizes_P, self.chunk):
                k = pieces_P[self.rank]
                rows_PK = self._lent.vector(self.size * k, own_N.dtype).reshape(self.size, k)
                self._comm.Alltoallv(_parts(own_N[begin:begin + sum(pieces_P)], pieces_P),
                                     _parts(rows_PK, [k] * self.size))
                add_rows(list(rows_PK), total_K[at:at + k])
                at += k
            return total_K

        return self._later("reducescatterv", name, flat_N, run, sizes_P)

    def allgatherv(self, part_K: np.ndarray, sizes_P: Sequence[int], name: str) -> _Pending:
        """The ranks' parts one after the other: (sizes_P[rank],) -> (N,), good until the next call."""
        assert part_K.size == sizes_P[self.rank], f"allgatherv of {part_K.size} elements as one of {list(sizes_P)}"

        def run() -> np.ndarray:
            own_K = np.ascontiguousarray(part_K)
            all_N = self._lent.vector(sum(sizes_P), own_K.dtype)
            at = 0
            for begin, pieces_P in windows(sizes_P, self.chunk):
                k = pieces_P[self.rank]
                self._comm.Allgatherv(_bytes(own_K[at:at + k]), _parts(all_N[begin:begin + sum(pieces_P)], pieces_P))
                at += k
            return all_N

        return self._later("allgatherv", name, part_K, run, sizes_P)

    def broadcast(self, x_N: np.ndarray, name: str, root: int = 0) -> _Pending:
        """``root``'s vector on every rank: (N,) -> (N,); in place where the memory allows it."""
        def run() -> np.ndarray:
            result_N = _writable(x_N)
            for part in self._spans(result_N.size):
                self._comm.Bcast(_bytes(result_N[part]), root=root)
            return result_N

        return self._later(f"broadcast from {root}", name, x_N, run)

    def _later(self, kind: str, name: str, x: np.ndarray, run: Callable[[], np.ndarray],
               sizes_P: Sequence[int] = ()) -> _Pending:
        """Put the check and the bound around ``run``; ``sizes_P`` are compared in place of the shape."""
        if self.size == 1:
            return _Pending(run)
        what = f"{kind} {name!r} {tuple(sizes_P) or x.shape} {x.dtype.name}"

        def bounded() -> np.ndarray:
            with deadline(self.timeout_s, what), pulse.waiting(what), blocked(name):
                if self._check:
                    self._compare(what)
                return run()

        return _Pending(bounded)

    def _compare(self, what: str) -> None:
        """Raise on every rank unless all ranks entered the same collective."""
        own_1 = np.array([zlib.crc32(what.encode())], np.int64)
        all_P = np.empty(self.size, np.int64)
        # The first to come waits here for the last, and should not take its processor time meanwhile.
        self._wait(self._comm.Iallgather(own_1, all_P).Test)
        if (all_P == all_P[0]).all():
            return
        entered = self._comm.allgather(what)
        odd = next(r for r in range(self.size) if entered[r] != entered[0])
        raise RuntimeError(f"ranks disagree: rank 0 entered {entered[0]}; rank {odd} entered {entered[odd]}")

    def _wait(self, test: Callable[[], bool]) -> None:
        """Wait for other ranks until ``test`` is true."""
        wait_for(test, longest_sleep_s=LONGEST_SLEEP_S)

    def _spans(self, n: int) -> Iterator[slice]:
        """Slices of at most ``chunk`` elements that cover n; none for n = 0, where there is nothing to move."""
        for start in range(0, n, self.chunk):
            yield slice(start, min(n, start + self.chunk))


def _summable(x: np.ndarray) -> np.ndarray:
    """float16 as float32; anything else as it is."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _writable(x: np.ndarray) -> np.ndarray:
    """``x`` itself where MPI can write into it, else a copy."""
    return x if x.flags.c_contiguous and x.flags.writeable else np.array(x, order="C")


def _bytes(x: np.ndarray) -> Any:
    """A buffer that moves elements without asking what they are, so that float16 and bool travel too.

    Without a count: mpi4py works it out, and reads one given to an allgather as elements of each rank.
    """
    return [x, _element(x.dtype.itemsize)]


def _parts(x: np.ndarray, sizes_P: Sequence[int]) -> Any:
    """A buffer of consecutive parts, one for each rank."""
    return [x, (list(sizes_P), begins(sizes_P)), _element(x.dtype.itemsize)]


def _element(itemsize: int) -> Any:
    """The MPI type of ``itemsize`` bytes."""
    MPI = _mpi()
    return {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}[itemsize]


def _mpi() -> Any:
    """mpi4py's MPI, which whoever made the communicator has started."""
    from mpi4py import MPI

    return MPI
