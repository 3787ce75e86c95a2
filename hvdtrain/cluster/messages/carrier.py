"""Carriers of a pipeline's messages: over MPI between hosts, by host, and between threads.

`hvdtrain.cluster.messages.progress` advances what is under way over MPI; `hvdtrain.cluster.messages.shared_memory`
carries messages within a host.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.channel import ALIGNED, KINDS, ROOM, begins, chunks, copied, room_for
from hvdtrain.cluster.messages.progress import Operation, progress_of_process
from hvdtrain.cluster.messages.shared_memory import SharedMemoryCarrier
from hvdtrain.core.errors import PeerFailed, WaitTimeout
from hvdtrain.core.protocols import PendingMessage

FIRST = 16384
"""Bytes of a message's first part at most, which begins with the message's length: a small one takes no second."""


class OutgoingMessage(Operation):
    """A copy of ``parts`` that is sent; lives until it has left."""

    def __init__(self, carrier: MpiCarrier, parts: Sequence[np.ndarray], to: int, tag: int) -> None:
        super().__init__()
        places, total = begins(parts)
        whole = room_for(ALIGNED + total)
        whole[:8] = np.frombuffer(np.int64(total).tobytes(), np.uint8)
        copied(parts, places, whole[ALIGNED:])
        self._carrier, self._to, self._tag = carrier, to, tag
        self._parts = [whole[:FIRST], *chunks(whole[FIRST:])]
        self._left = len(self._parts)

    def begin(self) -> None:
        comm = self._carrier.comm
        for i, part in enumerate(self._parts):
            self._carrier.progress.post(self, comm.Isend(part, dest=self._to, tag=2 * self._tag + (i > 0)), self._sent)

    def _sent(self) -> None:
        self._left -= 1
        if not self._left:
            self._parts.clear()  # the carrier may hold the message until its next put
            self.end()


class IncomingMessage(Operation):
    """`hvdtrain.core.protocols.PendingMessage` over MPI; its rest is asked for as soon as its first part is there.

    ``line``: messages of that sender and tag whose rest has yet to be asked for. ``begun``: this one's has been.
    """

    def __init__(self, carrier: MpiCarrier, source: int, tag: int, line: deque[IncomingMessage]) -> None:
        super().__init__()
        self._carrier, self._source, self._tag, self._line = carrier, source, tag, line
        self._first, self._whole = room_for(FIRST), np.empty(0, np.uint8)
        self._came, self._left = False, 0
        self._begun = Operation()
        self._what = f"a message with {KINDS[tag]} from rank {source}"

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        super().end(value, error)
        self._begun.end(error=error)

    def begin(self) -> None:
        self._line.append(self)
        first = self._carrier.comm.Irecv(self._first, source=self._source, tag=2 * self._tag)
        self._carrier.progress.post(self, first, self._first_came)

    def _first_came(self) -> None:
        """Ask for the rests of messages with a first part here, in MPI's order of requests."""
        self._came = True
        while self._line and self._line[0]._came:
            message = self._line.popleft()
            self._carrier.progress.guarded(message, message._ask_for_rest)

    def _ask_for_rest(self) -> None:
        total = int(self._first[:8].view(np.int64)[0])
        if ALIGNED + total <= FIRST:
            self.end(self._first[ALIGNED:ALIGNED + total])
            return
        self._whole = room_for(total)
        self._whole[:FIRST - ALIGNED] = self._first[ALIGNED:]
        parts = chunks(self._whole[FIRST - ALIGNED:])
        self._left = len(parts)
        for part in parts:
            rest = self._carrier.comm.Irecv(part, source=self._source, tag=2 * self._tag + 1)
            self._carrier.progress.post(self, rest, self._rest_came)
        self._begun.end()

    def _rest_came(self) -> None:
        self._left -= 1
        if not self._left:
            self.end(self._whole)

    def wait_begun(self) -> None:
        self._carrier.wait(self._begun, self._what)

    def wait(self) -> np.ndarray:
        self._carrier.wait(self, self._what)
        assert isinstance(self.value, np.ndarray)
        return self.value


class MpiCarrier:
    """Implements `hvdtrain.core.protocols.Carrier` over an mpi4py communicator of its own, with THREAD_MULTIPLE."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = int(comm.Get_rank()), int(comm.Get_size()), timeout_s
        self.comm, self.progress = comm, progress_of_process()
        self._node = socket.gethostname()
        self._sent: dict[tuple[int, int], deque[OutgoingMessage]] = {}
        self._asked: dict[tuple[int, int], deque[IncomingMessage]] = {}

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        line = self._sent.setdefault((to, tag), deque())
        while len(line) >= room or line and line[0].over:
            self.wait(line[0], f"sending a message with {KINDS[tag]} to rank {to}")
            line.popleft()
        line.append(OutgoingMessage(self, parts, to, tag))
        self.progress.start(line[-1])

    def take(self, source: int, tag: int) -> IncomingMessage:
        message = IncomingMessage(self, source, tag, self._asked.setdefault((source, tag), deque()))
        self.progress.start(message)
        return message

    def flush(self) -> None:
        for line in self._sent.values():
            while line:
                self.wait(line[0], "sending pending messages")
                line.popleft()

    def free(self) -> None:
        self.comm.Free()

    def wait(self, operation: Operation, what: str) -> None:
        """Wait until ``operation`` is over, advancing all that is under way; raises its error."""
        if not operation.over:
            with pulse.waiting(what):
                if not self.progress.wait(operation, self.timeout_s):
                    raise WaitTimeout(f"rank {self.rank} on host {self._node} waited {self.timeout_s:g} s in {what}. "
                                      f"{pulse.missing()}".rstrip())
        if operation.error is not None:
            raise operation.error


class HostCarrier:
    """Implements `hvdtrain.core.protocols.Carrier`: ``near`` for ranks that share memory, ``far`` for others."""

    def __init__(self, far: MpiCarrier, near: SharedMemoryCarrier | None) -> None:
        self.rank, self.size = far.rank, far.size
        self._far, self._near = far, near
        self._of_host = frozenset(near.ranks if near is not None else ()) - {far.rank}

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        self._to(to).put(parts, to, tag, room)

    def take(self, source: int, tag: int) -> PendingMessage:
        return self._to(source).take(source, tag)

    def flush(self) -> None:
        self._far.flush()

    def free(self) -> None:
        self._far.free()
        if self._near is not None:
            self._near.free()

    def _to(self, rank: int) -> MpiCarrier | SharedMemoryCarrier:
        return self._near if self._near is not None and rank in self._of_host else self._far


def over_mpi(comm: Any, timeout_s: float, near: bool = True) -> HostCarrier:
    """Return the carrier of ``comm``'s ranks, over duplicates; ``near``: by shared memory in hosts. Collective."""
    with deadline(timeout_s, "duplicating MPI's communicator for messages"):
        far = MpiCarrier(comm.Dup(), timeout_s)
    return HostCarrier(far, of_host(comm, timeout_s) if near else None)


def of_host(comm: Any, timeout_s: float) -> SharedMemoryCarrier | None:
    """Return the carrier of the ranks of ``comm`` that share this host's memory, or None. Collective."""
    from mpi4py import MPI

    with deadline(timeout_s, "sharing memory for messages on this host"):
        host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
        carrier = SharedMemoryCarrier.make(host, comm.Get_rank(), timeout_s)
        host.Free()
    return carrier


class Boxes:
    """Messages between threads. ``broken``: set where one of them has failed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque[np.ndarray]] = {}
        self.broken = False

    def fail(self) -> None:
        """End the waits of all."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class ThreadCarrier:
    """Implements `hvdtrain.core.protocols.Carrier` between ranks that are threads of one process."""

    def __init__(self, boxes: Boxes, rank: int, size: int, timeout_s: float = 60.0) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.boxes = boxes

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        places, total = begins(parts)
        message = room_for(total)
        copied(parts, places, message)
        box = self._box(self.rank, to, tag)
        self.until(lambda: len(box) < room, f"sending a message with {KINDS[tag]} to rank {to}")
        with self.boxes.changed:
            box.append(message)
            self.boxes.changed.notify_all()

    def take(self, source: int, tag: int) -> _InBox:
        return _InBox(self, self._box(source, self.rank, tag), f"a message with {KINDS[tag]} from rank {source}")

    def flush(self) -> None:
        pass

    def free(self) -> None:
        """Return: the carrier holds nothing."""

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Wait until ``test`` is true."""
        until = time.monotonic() + self.timeout_s
        with self.boxes.changed:
            while not test():
                if self.boxes.broken:
                    raise PeerFailed(f"another rank failed while rank {self.rank} waited in {what}")
                if not self.boxes.changed.wait(until - time.monotonic()) and not test():
                    raise WaitTimeout(f"rank {self.rank} waited {self.timeout_s:g} s in {what}")

    def _box(self, source: int, to: int, tag: int) -> deque[np.ndarray]:
        with self.boxes.changed:
            return self.boxes.boxes.setdefault((source, to, tag), deque())


class _InBox:
    """`hvdtrain.core.protocols.PendingMessage` of a `ThreadCarrier`; messages are taken in the order of their waits."""

    def __init__(self, carrier: ThreadCarrier, box: deque[np.ndarray], what: str) -> None:
        self._carrier, self._box, self._what = carrier, box, what
        self._data: np.ndarray | None = None

    def wait_begun(self) -> None:
        if self._data is None:
            self._carrier.until(lambda: bool(self._box), self._what)

    def wait(self) -> np.ndarray:
        self.wait_begun()
        if self._data is None:
            with self._carrier.boxes.changed:
                self._data = self._box.popleft()
                self._carrier.boxes.changed.notify_all()
        return self._data
