"""Control planes: small Python objects, decisions and agreement on errors among the ranks of a job.

Starts nothing: `hvdtrain.cluster.boot` does. Objects are pickled: they come from ranks of the same job and user.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.carrier import Boxes, HostCarrier, ThreadCarrier, of_host, over_mpi
from hvdtrain.cluster.messages.channel import Mail, MailChannel, MpiChannel
from hvdtrain.cluster.messages.shared_memory import SharedMemoryCarrier
from hvdtrain.core.errors import UserError, WaitTimeout
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.processes import wait_for
from hvdtrain.core.protocols import Control
from hvdtrain.core.timeline import blocked

T = TypeVar("T")

INLINE = 4096
"""Bytes of the first message of `MpiControl.bcast`: a small object travels in one round."""

CHUNK = 1 << 29
"""Largest message in bytes; MPI 3.1 counts are 31 bits."""


def sum_rows(rows_PK: np.ndarray) -> np.ndarray:
    """Sum over axis 0, strictly in rank order: the same bits wherever it is computed. (P, K) -> (K,).

    ``np.sum`` may add in pairs or in vector lanes; ``accumulate`` is defined to go row by row.
    """
    return np.add.accumulate(rows_PK, axis=0)[-1]


def agreed(control: Control, fn: Callable[[], T], what: str) -> T:
    """Run ``fn`` on this rank; raise `UserError` on every rank if it raised one on any; collective.

    The error names the first failing rank and its host, unless all ranks failed alike. ``what`` ("reading the
    data") names the place in the error of a wait that ran out. Other exceptions pass through: they end the job.
    """
    value, failure, cause = None, None, None
    pulse.at(what)
    try:
        value = fn()
    except UserError as error:
        failure, cause = (error.got, error.expected, error.do, error.kind), error.__cause__
    try:
        rows = control.gather((failure, control.node))
    except WaitTimeout as error:
        raise WaitTimeout(f"{what}: {error}") from None
    failed = [(rank, row) for rank, row in enumerate(rows) if row[0] is not None]
    if not failed:
        return value  # type: ignore[return-value]
    rank, ((got, expected, do, kind), node) = failed[0]
    if len(failed) < len(rows) or len({row[0] for row in rows}) > 1:
        got = f"rank {rank} on host {node}: {got}"
    raise UserError(got, expected, do).of_kind(kind) from cause


def flush_streams() -> None:
    """Flush stdout and stderr, closed ones too, so that nothing is lost when the process is ended hard."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


class SoloControl:
    """Control of a job of one process, without MPI: every answer is the question."""

    def __init__(self, node: str | None = None) -> None:
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        self.node = node or socket.gethostname()
        self.notes: list[str] = []
        self.timeout_s = 600.0

    def bcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return [obj]

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Return: there is no other rank."""

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        return np.array(values_k, dtype=np.float64)

    def agree(self, flag: bool) -> bool:
        return bool(flag)

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        """Return."""

    def channel(self, longest_sleep_s: float = 200e-6) -> MailChannel:
        return MailChannel(Mail(), longest_sleep_s=longest_sleep_s)

    def carrier(self) -> ThreadCarrier:
        return ThreadCarrier(Boxes(), 0, 1)

    def shared_carrier(self) -> None:
        return None

    def abort(self, code: int) -> None:
        """Raise SystemExit(``code``): with nobody else to end, ending this process in order is enough."""
        flush_streams()
        raise SystemExit(code)


class MpiControl:
    """Control over an mpi4py communicator of its own (a duplicate, so that no other traffic mixes with it).

    Uses non-blocking collectives, polled: a wait can be bounded and interrupted, and an idle rank sleeps instead of
    taking a core from its neighbours. ``timeout_s`` bounds each wait.
    """

    def __init__(self, comm: Any, timeout_s: float, local_rank: int = 0, local_size: int = 1,
                 node: str | None = None) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.local_rank, self.local_size = local_rank, local_size
        self.node = node or socket.gethostname()
        self.notes: list[str] = []
        self.timeout_s = timeout_s
        self._comm = comm
        self._stuck: list[Any] = []

    def bcast(self, obj: Any) -> Any:
        first = np.zeros(INLINE, np.uint8)
        data = np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8) if self.rank == 0 else first[:0]
        if self.rank == 0:
            first[:8] = np.frombuffer(np.int64(data.size).tobytes(), np.uint8)
            inline = data[:INLINE - 8]
            first[8:8 + inline.size] = inline
        self._wait(self._comm.Ibcast(first, root=0), "bcast", first)
        size = int(first[:8].view(np.int64)[0])
        if size > INLINE - 8:
            whole = np.array(data) if self.rank == 0 else np.empty(size, np.uint8)
            self.send([whole], 0)
        else:
            whole = first[8:8 + size]
        return obj if self.rank == 0 else pickle.loads(whole.tobytes())

    def gather(self, obj: Any) -> list[Any]:
        data = np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8)
        sizes_P = self._allgather(np.array([data.size], np.int64), "gather").ravel()
        ends = np.cumsum(sizes_P)
        if ends[-1] <= CHUNK:
            whole = np.empty(int(ends[-1]), np.uint8)
            counts, starts = sizes_P.tolist(), (ends - sizes_P).tolist()
            byte = _mpi().BYTE
            request = self._comm.Iallgatherv([data, data.size, byte], [whole, counts, starts, byte])
            self._wait(request, "gather", data, whole)
            parts = np.split(whole, ends[:-1])
        else:
            parts = [np.array(data) if r == self.rank else np.empty(int(n), np.uint8) for r, n in enumerate(sizes_P)]
            for r, part in enumerate(parts):
                self.send([part], r)
        return [obj if r == self.rank else pickle.loads(part.tobytes()) for r, part in enumerate(parts)]

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Wait for each message by itself; ranks other than source and target take no part."""
        if target is not None and self.rank not in (source, target):
            return
        for array in arrays:
            data = array.view(np.uint8)
            for start in range(0, data.size, CHUNK):
                part = data[start:start + CHUNK]
                if target is None:
                    request = self._comm.Ibcast(part, root=source)
                elif self.rank == source:
                    request = self._comm.Isend(part, dest=target)
                else:
                    request = self._comm.Irecv(part, source=source)
                self._wait(request, "send", part)

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        own_k = np.ascontiguousarray(values_k, dtype=np.float64)
        return sum_rows(self._allgather(own_k, "sum")).reshape(own_k.shape)

    def agree(self, flag: bool) -> bool:
        return bool(self.sum(np.array([float(bool(flag))]))[0] > 0)

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        self._wait(self._comm.Ibarrier(), f"barrier {tag!r}", timeout_s=timeout_s)

    def channel(self, longest_sleep_s: float = 200e-6) -> MpiChannel | None:
        """Duplicate the communicator; None where MPI lets one thread in only."""
        if _mpi().Query_thread() < _mpi().THREAD_MULTIPLE:
            return None
        with deadline(self.timeout_s, "duplicating MPI's communicator for a channel"):
            return MpiChannel(self._comm.Dup(), self.timeout_s, longest_sleep_s)

    def carrier(self) -> HostCarrier | None:
        return over_mpi(self._comm, self.timeout_s) if _mpi().Query_thread() == _mpi().THREAD_MULTIPLE else None

    def shared_carrier(self) -> SharedMemoryCarrier | None:
        return of_host(self._comm, self.timeout_s)

    def abort(self, code: int) -> None:
        """End every rank at once through MPI_Abort; mpirun's exit status becomes ``code`` (1 for 0)."""
        pulse.leaving()
        flush_streams()
        self._comm.Abort(code or 1)

    def _allgather(self, own_k: np.ndarray, what: str) -> np.ndarray:
        """Gather (k,) of equal k from every rank -> (P, k)."""
        rows = np.empty((self.size, own_k.size), own_k.dtype)
        self._wait(self._comm.Iallgather(own_k, rows), what, own_k, rows)
        return rows

    def _wait(self, request: Any, what: str, *buffers: np.ndarray, timeout_s: float | None = None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with blocked(what):  # also one that is done at once: who comes last has waited for nobody
            if request.Test():
                return
            self._poll(request, what, limit_s, buffers)

    def _poll(self, request: Any, what: str, limit_s: float, buffers: tuple[np.ndarray, ...]) -> None:
        with pulse.waiting(f"{what} of the control plane"):
            if wait_for(request.Test, limit_s):
                return
            self._stuck += [request, buffers]  # MPI may still write into them
            raise WaitTimeout(f"rank {self.rank} on host {self.node} waited {limit_s:g} s in {what} of the control "
                              f"plane for the other {self.size - 1} rank(s). {pulse.missing()}".rstrip())


class ObjectControl:
    """Control over a framework's object collectives, where there is no MPI (horovodrun --gloo).

    ``bcast_object(obj, name=...)`` returns rank 0's object, ``allgather_object(obj, name=...)`` the list of all, as
    Horovod's do. Such a wait cannot be interrupted, so when it runs out the process ends (see `deadline`).
    """

    def __init__(self, facts: LaunchFacts, bcast_object: Callable[..., Any], allgather_object: Callable[..., list[Any]],
                 timeout_s: float = 600.0) -> None:
        self.rank, self.size = facts.rank, facts.size
        self.local_rank, self.local_size = max(0, facts.local_rank), max(1, facts.local_size)
        self.node = socket.gethostname()
        self.notes: list[str] = []
        self.timeout_s = timeout_s
        self._bcast, self._allgather = bcast_object, allgather_object

    def bcast(self, obj: Any) -> Any:
        what = "bcast of the control plane"
        with deadline(self.timeout_s, what), pulse.waiting(what), blocked("bcast"):
            return self._bcast(obj, name="hvdtrain.control.bcast")

    def gather(self, obj: Any) -> list[Any]:
        return self._gather(obj, "gather", self.timeout_s)

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Send to all ranks, of which those that need nothing drop it: Horovod has no point-to-point messages."""
        own = [x.tobytes() for x in arrays] if self.rank == source else []
        sent = self._gather(own, "send", self.timeout_s)[source]
        if self.rank != source and target in (None, self.rank):
            for mine, theirs in zip(arrays, sent):
                mine[...] = np.frombuffer(theirs, mine.dtype)

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        return sum_rows(np.stack(self._gather(np.array(values_k, np.float64), "sum", self.timeout_s)))

    def agree(self, flag: bool) -> bool:
        return any(self._gather(bool(flag), "agree", self.timeout_s))

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        """End the process with ``tag`` in its message after ``timeout_s``."""
        self._gather(None, f"barrier {tag!r}", self.timeout_s if timeout_s is None else timeout_s)

    def channel(self, longest_sleep_s: float = 200e-6) -> None:
        return None

    def carrier(self) -> None:
        return None

    def shared_carrier(self) -> None:
        return None

    def abort(self, code: int) -> None:
        """End this process with ``code``; horovodrun then ends the others."""
        pulse.leaving()
        flush_streams()
        os._exit(code or 1)

    def _gather(self, obj: Any, what: str, timeout_s: float) -> list[Any]:
        call = f"{what} of the control plane"
        with deadline(timeout_s, call), pulse.waiting(call), blocked(what):
            return self._allgather(obj, name="hvdtrain.control.gather")


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def in_turn(control: Control, work: Callable[[], T], what: str) -> T:
    """Return ``work()``, done by one rank of each host after the other, as it takes memory. Collective, as `agreed`."""
    found: list[T] = []
    for turn in range(max(control.gather(control.local_size))):
        agreed(control, lambda: found.append(work()) if turn == control.local_rank else None, what)
    return found[0]


class ReplicaControl:
    """Control with one rank for each replica of the model: ``leads[c]`` speaks for replica c.

    All ranks of the job take part in every call, so that there is one order; what ranks that do not lead send is left
    out. `agree` is that of all ranks of the job: an error of one is one of all.
    """

    def __init__(self, control: Control, leads: Sequence[int], copy: int) -> None:
        self._whole = control
        self._leads, self.rank, self.size = list(leads), copy, len(leads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def bcast(self, obj: Any) -> Any:
        return self.gather(obj)[0]

    def gather(self, obj: Any) -> list[Any]:
        rows = self._whole.gather(obj)
        return [rows[lead] for lead in self._leads]

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        own_k = np.array(values_k, np.float64)
        return self._whole.sum(own_k if self._whole.rank in self._leads else np.zeros_like(own_k))


def every_rank(control: Control) -> Control:
    """Return the control plane of all ranks of the job, of which ``control`` may be a view."""
    return control._whole if isinstance(control, ReplicaControl) else control


def control_of_replicas(control: Control, mesh: Mesh) -> Control:
    """Return the control plane of the replicas; ``control`` itself where no replica is partitioned over ranks."""
    return ReplicaControl(control, mesh.leads, mesh.copy) if mesh.deepest > 1 else control
