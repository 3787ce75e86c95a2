"""P ranks as threads of one process: control plane and collectives in memory, to test an exchange without MPI."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.control import sum_rows
from hvdtrain.cluster.messages.carrier import Boxes, ThreadCarrier
from hvdtrain.cluster.messages.channel import Mail, MailChannel
from hvdtrain.comm.collectives.base import ReadyHandle, WithoutMemory, add_rows
from hvdtrain.core.errors import PeerFailed, WaitTimeout
from hvdtrain.core.mesh import Group
from hvdtrain.core.timeline import blocked

Key = tuple[Any, ...]

DTYPES = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})


def ring_bytes(kind: str, nbytes: int, size: int, rank: int = 0, root: int = 0) -> int:
    """Return the bytes that ``rank`` sends, for ``nbytes`` of argument on each of ``size`` ranks. Pure.

    The bandwidth-optimal ring algorithms, as in nccl-tests' PERFORMANCE.md: allreduce 2(P-1)/P, reducescatter and
    alltoall (P-1)/P, allgather P-1 times its argument; in a broadcast every rank passes the vector on but the last of
    the ring. Fractions are rounded up.
    """
    if kind == "allreduce":
        return -(-2 * (size - 1) * nbytes // size)
    if kind in ("reducescatter", "alltoall"):
        return -(-(size - 1) * nbytes // size)
    if kind == "allgather":
        return (size - 1) * nbytes
    assert kind == "broadcast", kind
    return 0 if (rank - root) % size == size - 1 else nbytes


ENDS_S = 20.0
"""Longest wait for the other ranks after the failure of one."""


class LockstepWorld:
    """World of ``size`` ranks in one process. ``sent_bytes[r]``: what rank r has sent so far (`ring_bytes`)."""

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self.sent_bytes = [0] * size

    def run(self, fn: Callable[[LockstepControl, LockstepCollectives], Any], timeout_s: float = 60.0) -> list[Any]:
        """Call ``fn(control, collectives)`` on every rank at once; return the results by rank.

        ``timeout_s`` bounds each wait of a rank for the others. The first error of a rank ends the waits of all and is
        raised here.
        """
        meeting = _Rendezvous(self.size, timeout_s)
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            control, wire = LockstepControl(meeting, rank), LockstepCollectives(meeting, rank, self.sent_bytes)
            try:
                results[rank] = fn(control, wire)
            except BaseException as error:  # raised again in the caller's thread
                meeting.fail(error)
            else:
                meeting.finish(rank)

        threads = [threading.Thread(target=work, args=(r,), name=f"lockstep-{r}", daemon=True)
                   for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and meeting.failure is None:
                thread.join(0.2)
        if meeting.failure is not None:
            ends_at = time.monotonic() + ENDS_S
            for thread in threads:
                thread.join(max(0.0, ends_at - time.monotonic()))
            raise meeting.failure
        return results


class _Rendezvous:
    """Rendezvous of all ranks, one after another; each rank brings a key, which must be equal, and a value."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.finished: set[int] = set()
        self.brought: dict[int, tuple[Key, Any]] = {}
        self.meeting = 0
        self.outcome: Any = None
        self._below: dict[tuple[int, ...], _Rendezvous] = {}
        self._boxes: list[Boxes] = []

    def among(self, ranks: tuple[int, ...]) -> _Rendezvous:
        with self.changed:
            self._raise_failure()  # a new one would not hear of it
            return self._below.setdefault(ranks, _Rendezvous(len(ranks), self.timeout_s))

    def boxes(self) -> Boxes:
        self._boxes.append(Boxes())
        return self._boxes[-1]

    def meet(self, rank: int, key: Key, value: Any, combine: Callable[[list[Any]], list[Any]],
             timeout_s: float | None = None) -> Any:
        """Bring ``value``; the last to come combines all, by rank, to one result each. Returns this rank's."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        ends_at = time.monotonic() + limit_s
        with blocked(" ".join(str(part) for part in key[:2])), self.changed:
            self._raise_failure()
            self.brought[rank] = (key, value)
            mine = self.meeting
            self._check_alive()
            if len(self.brought) == self.size:
                self._combine(combine)
            while self.meeting == mine and self.failure is None:
                if not self.changed.wait(ends_at - time.monotonic()) and self.meeting == mine and self.failure is None:
                    missing = sorted(set(range(self.size)) - set(self.brought))
                    self._set_failure(WaitTimeout(f"rank {rank} waited {limit_s:g} s in {_show(key)} "
                                                  f"for rank(s) {missing}"))
            if self.meeting == mine:
                self._raise_failure()
            return self.outcome[rank]

    def _combine(self, combine: Callable[[list[Any]], list[Any]]) -> None:
        """Check that all ranks came for the same call (law 5), compute, let all go."""
        keys = [self.brought[r][0] for r in range(self.size)]
        odd = next((r for r in range(self.size) if keys[r] != keys[0]), None)
        if odd is not None:
            self._set_failure(RuntimeError(f"ranks disagree: rank 0 entered {_show(keys[0])}; rank {odd} entered "
                                           f"{_show(keys[odd])}"))
            return
        try:
            self.outcome = combine([self.brought[r][1] for r in range(self.size)])
        except Exception as error:  # all ranks must hear of it
            self._set_failure(error)
            return
        self.brought = {}
        self.meeting += 1
        self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Release all ranks with ``error``."""
        with self.changed:
            self._set_failure(error)

    def finish(self, rank: int) -> None:
        """Note that a rank is done: waits for it fail."""
        with self.changed:
            self.finished.add(rank)
            self._check_alive()

    def _check_alive(self) -> None:
        if self.finished and self.brought and self.failure is None:
            rank, (key, _) = next(iter(self.brought.items()))
            self._set_failure(RuntimeError(f"rank {rank} waits in {_show(key)}, "
                                           f"but rank {min(self.finished)} has finished"))

    def _set_failure(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            for below in self._below.values():
                below.fail(error)
            for boxes in self._boxes:
                boxes.fail()
        self.changed.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise PeerFailed(f"the lockstep world has failed: {self.failure}") from self.failure


def _show(key: Key) -> str:
    """("allreduce", "w", (3,), "float32") -> allreduce 'w' (3,) float32."""
    kind, *rest = key
    return " ".join([str(kind), *(repr(x) if i == 0 else str(x) for i, x in enumerate(rest))])


class LockstepControl:
    """Control between the threads. Objects are pickled, as between processes, so that ranks share none."""

    def __init__(self, meeting: _Rendezvous, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self.local_rank, self.local_size = rank, meeting.size
        self.node = "lockstep"
        self.notes: list[str] = []
        self.timeout_s = meeting.timeout_s
        self._meeting = meeting

    def bcast(self, obj: Any) -> Any:
        data = pickle.dumps(obj, protocol=5) if self.rank == 0 else b""
        data = self._meeting.meet(self.rank, ("bcast",), data, lambda rows: [rows[0]] * self.size)
        return obj if self.rank == 0 else pickle.loads(data)

    def gather(self, obj: Any) -> list[Any]:
        rows = self._meet_all(("gather",), pickle.dumps(obj, protocol=5))
        return [obj if r == self.rank else pickle.loads(data) for r, data in enumerate(rows)]

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        own = [x.copy() for x in arrays] if self.rank == source else None
        sent = self._meeting.meet(self.rank, ("send", source, target), own, lambda rows: [
            rows[source] if target in (None, rank) else [] for rank in range(self.size)])
        for mine, theirs in zip(arrays, sent if self.rank != source else []):
            mine[...] = theirs

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        own_k = np.array(values_k, np.float64)
        return sum_rows(np.stack(self._meet_all(("sum", "", own_k.shape), own_k)))

    def agree(self, flag: bool) -> bool:
        return any(self._meet_all(("agree",), bool(flag)))

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        self._meeting.meet(self.rank, ("barrier", tag), None, lambda rows: rows, timeout_s)

    def channel(self, longest_sleep_s: float = 200e-6) -> MailChannel:
        mail = self._meeting.meet(self.rank, ("channel",), None, lambda rows: [Mail()] * self.size)
        return MailChannel(mail, self.rank, self.size, self.timeout_s, longest_sleep_s)

    def carrier(self) -> ThreadCarrier:
        """Return a carrier between the threads, which fails with them; collective."""
        boxes = self._meeting.meet(self.rank, ("carrier",), None, lambda rows: [self._meeting.boxes()] * self.size)
        return ThreadCarrier(boxes, self.rank, self.size, self.timeout_s)

    def shared_carrier(self) -> None:
        return None

    def abort(self, code: int) -> None:
        """Raise SystemExit(``code``) on this rank, which releases the others."""
        raise SystemExit(code)

    def _meet_all(self, key: Key, value: Any) -> list[Any]:
        return self._meeting.meet(self.rank, key, value, lambda rows: [rows] * self.size)


class LockstepCollectives(WithoutMemory):
    """Collectives between the threads: blocking, sums in rank order, results that no two ranks share."""

    name = "lockstep"
    dtypes = DTYPES
    reductions: frozenset[str] = frozenset()
    overlaps = False
    in_graph = False
    host = True

    def __init__(self, meeting: _Rendezvous, rank: int, sent_bytes: list[int]) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting, self._sent = meeting, sent_bytes

    def among(self, group: Group) -> LockstepCollectives:
        return LockstepCollectives(self._meeting.among(group.ranks), group.index, [0] * group.size)

    def allreduce(self, flat_N: np.ndarray, name: str, op: str = "sum") -> ReadyHandle:
        assert op == "sum", op
        return self._meet("allreduce", flat_N, name, lambda rows: [_sum(rows)] * self.size)

    def allgather(self, x_K: np.ndarray, name: str) -> ReadyHandle:
        return self._meet("allgather", x_K, name, lambda rows: [np.stack(rows)] * self.size)

    def alltoall(self, x_PK: np.ndarray, name: str) -> ReadyHandle:
        assert x_PK.shape[0] == self.size, f"alltoall of {x_PK.shape} over {self.size} ranks"
        return self._meet("alltoall", x_PK, name,
                          lambda rows: [np.stack([row[p] for row in rows]) for p in range(self.size)])

    def alltoallv(self, flat_N: np.ndarray, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> ReadyHandle:
        assert flat_N.size == sum(sent_P), f"alltoallv of {flat_N.size} elements into {list(sent_P)}"

        def combine(rows: list[list[np.ndarray]]) -> list[np.ndarray]:
            return [np.concatenate([row[p] for row in rows]) for p in range(self.size)]

        self._sent[self.rank] += (flat_N.size - sent_P[self.rank]) * flat_N.itemsize
        parts = np.split(flat_N.copy(), np.cumsum(sent_P)[:-1])
        received = self._meeting.meet(self.rank, ("alltoallv", name, (), flat_N.dtype.name), parts, combine)
        assert received.size == sum(got_P), f"alltoallv {name!r} brought {received.size} elements, not {list(got_P)}"
        return ReadyHandle(received)

    def reducescatter(self, flat_N: np.ndarray, name: str) -> ReadyHandle:
        assert flat_N.size % self.size == 0, f"reducescatter of {flat_N.size} elements over {self.size} ranks"
        return self._meet("reducescatter", flat_N, name, lambda rows: np.split(_sum(rows), self.size))

    def reducescatterv(self, flat_N: np.ndarray, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        assert flat_N.size == sum(sizes_P), f"reducescatterv of {flat_N.size} elements into {list(sizes_P)}"
        ends = np.cumsum(sizes_P)[:-1]
        return self._meet("reducescatterv", flat_N, name, lambda rows: np.split(_sum(rows), ends), sizes_P)

    def allgatherv(self, part_K: np.ndarray, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        assert part_K.size == sizes_P[self.rank], f"allgatherv of {part_K.size} elements as one of {list(sizes_P)}"
        return self._meet("allgatherv", part_K, name, lambda rows: [np.concatenate(rows)] * self.size, sizes_P)

    def broadcast(self, x_N: np.ndarray, name: str, root: int = 0) -> ReadyHandle:
        return self._meet("broadcast", x_N, name, lambda rows: [rows[root]] * self.size, root=root)

    def _meet(self, kind: str, x: np.ndarray, name: str, combine: Callable[[list[Any]], list[Any]],
              sizes_P: Sequence[int] = (), root: int = 0) -> ReadyHandle:
        self._sent[self.rank] += ring_bytes(kind.removesuffix("v"), x.nbytes, self.size, self.rank, root)
        shape = tuple(sizes_P) or x.shape
        key = (kind, name, shape, x.dtype.name, *([f"root {root}"] if kind == "broadcast" else []))
        return ReadyHandle(np.array(self._meeting.meet(self.rank, key, np.array(x), combine)))


def _sum(rows: list[np.ndarray]) -> np.ndarray:
    total = np.empty_like(rows[0])
    add_rows([row.reshape(-1) for row in rows], total.reshape(-1))
    return total
