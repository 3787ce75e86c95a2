"""Collectives over memory that the ranks of one host share, and MPI between hosts.

Owns the shared segments and the sum in them. Everything but the sum is `MpiCollectives`' own. A gradient bucket that
lies in a segment (`buffer`) is summed in place: each rank adds one stripe of all ranks' vectors, a cache-sized tile at
a time, and writes the result back to all of them, so that every element is read and written once per rank. On 2 ranks
and 2 cores 38 MiB take 2.6 ms that way, where MPI_Allreduce took 17.9 and Horovod 16.1. With several hosts the stripes
are then summed across hosts, stripe by stripe in parallel: a hierarchical all-reduce.

A segment is an anonymous file in memory (memfd): it has no name to leak, does not count against /dev/shm, and is gone
with its last process, however that ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.patience import wait_for
from hvdtrain.collectives.mpi import LONGEST_SLEEP_S, MpiCollectives, _mpi, _Pending
from hvdtrain.errors import PeerFailed

TILE = 1 << 15
"""Elements added at a time: with a few ranks' tiles it stays in a core's own cache."""

LOOK_S, GRACE_S = 0.5, 5.0
"""How often a wait looks whether a rank has left, and how long it waits on for one that has."""

TOKEN_BYTES = 16
SUMMED = frozenset({"float32", "float64", "int32", "int64"})


@dataclass(frozen=True)
class _Layout:
    """How shared memory is cut: a choice for each of the L ranks of this host, then for each S vectors of n elements.

    ``number``: of the memory, the same on every rank.
    """

    L: int
    slots: int
    n: int
    dtype: str
    number: int

    @property
    def row_bytes(self) -> int:
        """Of one vector, in whole pages: no two ranks' vectors on one page."""
        return _pages(self.n * np.dtype(self.dtype).itemsize)

    @property
    def begin(self) -> int:
        """Where the vectors begin."""
        return _pages(8 * self.L)

    def chosen_L(self, raw: np.ndarray) -> np.ndarray:
        """Which vector each rank hands to a sum."""
        return raw[:8 * self.L].view(np.int64)

    def rows_LSN(self, raw: np.ndarray) -> np.ndarray:
        """The vectors."""
        rows = raw[self.begin:self.begin + self.L * self.slots * self.row_bytes]
        own = self.n * np.dtype(self.dtype).itemsize
        return rows.reshape(self.L, self.slots, self.row_bytes)[:, :, :own].view(self.dtype)


class SharedUnavailable(Exception):
    """The ranks of a host cannot share memory; ``reason`` says why. Raised on every rank of the job."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class SharedCollectives(MpiCollectives):
    """`MpiCollectives` whose sums go through memory within a host. Collective to make: every rank of ``comm`` does.

    ``host``: communicator of the ranks that share memory with this one; None: those that MPI says are on this host.
    Errors: `SharedUnavailable` on every rank where the ranks of any host cannot see each other's memory.
    """

    name = "shared"
    looks = True
    """Whether sums are squared while they are made (`looked`)."""

    def __init__(self, comm: Any, timeout_s: float = 600.0, check: bool = True, chunk: int = 1 << 28,
                 host: Any = None) -> None:
        super().__init__(comm, timeout_s, check, chunk)
        MPI = _mpi()
        with deadline(timeout_s, "splitting MPI's world by host"):
            self._host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank) if host is None else host
            hosts = comm.allreduce(int(self._host.Get_rank() == 0))
            self._stripes = comm.allreduce(self._host.Get_size(), MPI.MIN)
            mine = self._host.Get_rank()
            across = comm.Split(mine if mine < self._stripes else MPI.UNDEFINED, key=self.rank)
            self._across = across if hosts > 1 and mine < self._stripes else None
            self._one_host = hosts == 1
        self._tiles: dict[str, np.ndarray] = {}
        # By the address of a vector; whoever holds one keeps its memory, which goes with the last.
        self._own: dict[int, tuple[weakref.ref[np.ndarray], _Layout, int]] = {}
        self._scratch: dict[tuple[str, int, str], tuple[np.ndarray, _Layout]] = {}
        self._n_looked, self._squares = 0, 0.0
        self._made = 0
        self._ranks_L = self._host.allgather(self.rank)
        raw, layout = self._segment(1, "int64")
        self._left_L = layout.rows_LSN(raw)[:, 0, 0]
        self._leave = weakref.finalize(self, self._left_L.__setitem__, mine, 1)

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        """(n,) zeros in shared memory; None for a dtype that is summed elsewhere. Collective."""
        found = self.buffers(n, dtype, 1)
        return found[0] if found else None

    def buffers(self, n: int, dtype: str, slots: int) -> list[np.ndarray]:
        """``slots`` vectors such as `buffer` gives, [] for a dtype that is summed elsewhere. Collective.

        Each rank may hand any of its own to the next `allreduce`, whichever the other ranks take: a sum that is still
        looked at stays as it is while the next one is made. One that is never written to costs no memory.
        """
        if dtype not in SUMMED or n == 0:
            return []
        raw, layout = self._segment(n, dtype, slots)
        own_SN = layout.rows_LSN(raw)[self._host.Get_rank()]
        self._own = {address: kept for address, kept in self._own.items() if kept[0]() is not None}
        self._own.update({_address(own_N): (weakref.ref(raw), layout, slot) for slot, own_N in enumerate(own_SN)})
        return list(own_SN)

    def allreduce(self, flat_N: np.ndarray, name: str, op: str = "sum") -> _Pending:
        """Sum over ranks: (N,) -> (N,); in place for a vector of `buffer`, else by way of a segment of this name.

        ``op``: "sum", or "mean" of floats, which is the sum divided by the number of ranks.
        """
        if flat_N.dtype.name not in SUMMED or flat_N.size == 0:
            return super().allreduce(flat_N, name, op)
        assert op in ("sum", "mean"), op
        divisor = self.size if op == "mean" else 1

        own = self._memory_of(flat_N)

        def run() -> np.ndarray:
            if own:
                self._squares += self._sum(*own, divisor)
                self._n_looked += flat_N.size
                return flat_N
            key = (name, flat_N.size, flat_N.dtype.name)
            if key not in self._scratch:
                self._scratch[key] = self._segment(flat_N.size, flat_N.dtype.name)
            raw, layout = self._scratch[key]
            own_N = layout.rows_LSN(raw)[self._host.Get_rank(), 0]
            np.copyto(own_N, flat_N)
            self._sum(raw, layout, 0, divisor)
            return own_N.copy()

        # Ranks that sum other vectors of one name and length would each read what the other has left behind.
        return self._later("allreduce", f"{name} of memory {own[1].number}" if own else name, flat_N, run)

    def _memory_of(self, flat_N: np.ndarray) -> tuple[np.ndarray, _Layout, int] | None:
        """The memory of which ``flat_N`` is a vector of `buffers`, and which of them; None for any other."""
        kept, layout, slot = self._own.get(_address(flat_N), (None, None, 0))
        raw = kept() if kept else None
        fits = layout and (layout.n, layout.dtype) == (flat_N.size, flat_N.dtype.name)
        return (raw, layout, slot) if raw is not None and layout and fits else None

    def looked(self) -> tuple[int, float]:
        """Elements of `buffer` vectors summed since the last call, and the sum of squares over this rank's stripes.

        The squares of all ranks of the job add up to those of the sums. (0, 0.0) on several hosts, where a stripe is
        not complete when it is looked at.
        """
        found = (self._n_looked, self._squares) if self._one_host else (0, 0.0)
        self._n_looked, self._squares = 0, 0.0
        return found

    def _sum(self, raw: np.ndarray, layout: _Layout, slot: int, divisor: int) -> float:
        """Replace the row that each rank chose, this one ``slot``, by the sum of all those of all hosts.

        ``divisor``: of the sums. Returns the squares of this rank's stripe, if whole.
        """
        mine, n, chosen_L = self._host.Get_rank(), layout.n, layout.chosen_L(raw)
        squares = 0.0
        chosen_L[mine] = slot
        self._meet()  # every rank's vector is there
        rows = [row_SN[s] for row_SN, s in zip(layout.rows_LSN(raw), chosen_L.tolist())]
        if mine < self._stripes:
            stripe = slice(n * mine // self._stripes, n * (mine + 1) // self._stripes)
            if self._across is None:
                squares = self._add(rows, stripe, rows, divisor)
            else:
                self._add(rows, stripe, rows[mine:mine + 1], 1)
                for part in self._spans(stripe.stop - stripe.start):
                    at = slice(stripe.start + part.start, stripe.start + part.stop)
                    self._across.Allreduce(_mpi().IN_PLACE, rows[mine][at])
                if divisor != 1:
                    rows[mine][stripe] /= divisor
                for row_N in (row for i, row in enumerate(rows) if i != mine):
                    row_N[stripe] = rows[mine][stripe]
        self._meet()  # every stripe is done
        return squares

    def _meet(self) -> None:
        """Wait for the ranks of this host."""
        self._wait(self._host.Ibarrier().Test)

    def _wait(self, test: Callable[[], bool]) -> None:
        """Wait for other ranks; `PeerFailed` where one of this host has ended in order, and so never comes.

        Of ranks that die the launcher ends the job.
        """
        while not wait_for(test, LOOK_S, LONGEST_SLEEP_S):
            gone = [rank for rank, left in zip(self._ranks_L, self._left_L) if left]
            # It may have left after this very call, of which the news is on its way.
            if gone and not wait_for(test, GRACE_S, LONGEST_SLEEP_S):
                raise PeerFailed(f"rank {gone[0]} has ended, or has shut down, while this one waits for it to exchange "
                                 "gradients: every rank has to take the same number of steps")

    def leave(self) -> None:
        """Tell the ranks of this host that this one enters no call any more; also told when it ends."""
        self._leave()

    def _add(self, rows: list[np.ndarray], stripe: slice, targets: list[np.ndarray], divisor: int) -> float:
        """Write the sum of the rows, in their order, over ``divisor`` within ``stripe`` to each target, also a row.

        Returns the sum of its squares: taken while a tile is in the cache it costs a fraction of a pass over memory.
        """
        tile = self._tiles.setdefault(rows[0].dtype.name, np.empty(TILE, rows[0].dtype))
        squares = 0.0
        # A warning made an error would stop this rank alone; who looks at the sums tells what is not finite.
        with np.errstate(all="ignore"):
            for begin in range(stripe.start, stripe.stop, TILE):
                end = min(begin + TILE, stripe.stop)
                sum_T = tile[:end - begin]
                if len(rows) == 1:
                    np.copyto(sum_T, rows[0][begin:end])
                else:
                    np.add(rows[0][begin:end], rows[1][begin:end], out=sum_T)
                for row_N in rows[2:]:
                    sum_T += row_N[begin:end]
                if divisor != 1:
                    sum_T /= divisor
                for target_N in targets:
                    target_N[begin:end] = sum_T
                if self.looks:
                    squares += float(np.dot(sum_T, sum_T))
        return squares

    def _segment(self, n: int, dtype: str, slots: int = 1) -> tuple[np.ndarray, _Layout]:
        """``slots`` vectors of n zeros for each rank of this host, as bytes; collective over all ranks of the job."""
        self._made += 1
        layout = _Layout(self._host.Get_size(), slots, n, dtype, self._made)
        nbytes = layout.begin + layout.L * slots * layout.row_bytes
        with deadline(self.timeout_s, f"sharing {nbytes} bytes of memory on this host"):
            memory, reason = _map(self._host, nbytes)
            reasons = [r for r in self._comm.allgather(reason) if r]
        if reasons or memory is None:
            raise SharedUnavailable(reasons[0])
        return np.frombuffer(memory, np.uint8, nbytes), layout


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold ``nbytes``."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def _map(host: Any, nbytes: int) -> tuple[mmap.mmap | None, str]:
    """Memory of ``nbytes`` zeros that all ranks of ``host`` map, or (None, why not). Collective over ``host``.

    Rank 0 makes the file and writes a random token at its start; the others open it through /proc and must find the
    token there, since in another PID namespace the path means another process.
    """
    first, fd, reason = host.Get_rank() == 0, -1, ""
    path, token = "", b""
    if first:
        try:
            fd = os.memfd_create("hvdtrain-gradients")
            os.ftruncate(fd, max(nbytes, TOKEN_BYTES))
            token = secrets.token_bytes(TOKEN_BYTES)
            os.pwrite(fd, token, 0)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        except (OSError, AttributeError) as error:
            reason = f"no shared memory can be made: {error}"
    path, token = host.bcast((path, token))
    memory = None
    try:
        if path and not first:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path:
            memory = mmap.mmap(fd, max(nbytes, TOKEN_BYTES))
            if memory[:TOKEN_BYTES] != token:
                memory, reason = None, "the ranks of a host do not see the same processes (PID namespaces)"
    except (OSError, ValueError) as error:
        reason = f"a rank cannot open the memory of another: {error}"
    host.Barrier()  # all have looked: the file may be closed, and the token overwritten
    if fd >= 0:
        os.close(fd)
    if first and memory is not None:
        memory[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
    host.Barrier()
    return memory, reason
