"""What carries the messages of a pipeline: by host over memory or MPI, between threads, and how it is opened."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.messages.far import FarCarrier
from hvdtrain.cluster.messages.near import NearCarrier
from hvdtrain.cluster.messages.packing import KINDS, ROOM, begins, copied, room_for
from hvdtrain.core.errors import PeerFailed, WaitTimeout
from hvdtrain.core.protocols import Coming


class ByHost:
    """Implements `hvdtrain.core.protocols.Carrier`: over ``near`` to the ranks that share memory, over ``far`` to
    others."""

    def __init__(self, far: FarCarrier, near: NearCarrier | None) -> None:
        self.rank, self.size = far.rank, far.size
        self._far, self._near = far, near
        self._beside = frozenset(near.ranks if near is not None else ()) - {far.rank}

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        """Send a copy."""
        self._to(to).put(parts, to, tag, room)

    def take(self, source: int, tag: int) -> Coming:
        """Ask for a message."""
        return self._to(source).take(source, tag)

    def flush(self) -> None:
        """Wait until all has left."""
        self._far.flush()

    def free(self) -> None:
        """Give back what it holds."""
        self._far.free()
        if self._near is not None:
            self._near.free()

    def _to(self, rank: int) -> FarCarrier | NearCarrier:
        return self._near if self._near is not None and rank in self._beside else self._far


def over_mpi(comm: Any, timeout_s: float, near: bool = True) -> ByHost:
    """Return the carrier of the ranks of ``comm``, over duplicates of it; collective.

    ``near``: use memory that ranks of a host share.
    """
    from mpi4py import MPI

    with deadline(timeout_s, "duplicating MPI's communicator for messages"):
        far = FarCarrier(comm.Dup(), timeout_s)
        if not near:
            return ByHost(far, None)
        host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=far.rank)
        carrier = NearCarrier.make(host, far.rank, timeout_s)
        host.Free()
    return ByHost(far, carrier)


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
        """Send a copy."""
        places, total = begins(parts)
        message = room_for(total)
        copied(parts, places, message)
        box = self._box(self.rank, to, tag)
        self.until(lambda: len(box) < room, f"sending a message with {KINDS[tag]} to rank {to}")
        with self.boxes.changed:
            box.append(message)
            self.boxes.changed.notify_all()

    def take(self, source: int, tag: int) -> _InBox:
        """Ask for a message; those asked for are taken in the order in which they are waited for."""
        return _InBox(self, self._box(source, self.rank, tag), f"a message with {KINDS[tag]} from rank {source}")

    def flush(self) -> None:
        """Return: all has left."""

    def free(self) -> None:
        """Return: it holds nothing."""

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Wait until ``test`` is true."""
        until = time.monotonic() + self.timeout_s
        with self.boxes.changed:
            while not test():
                if self.boxes.broken:
                    raise PeerFailed(f"another rank has failed while rank {self.rank} waited in {what}")
                if not self.boxes.changed.wait(until - time.monotonic()) and not test():
                    raise WaitTimeout(f"rank {self.rank} waited {self.timeout_s:g} s in {what}")

    def _box(self, source: int, to: int, tag: int) -> deque[np.ndarray]:
        with self.boxes.changed:
            return self.boxes.boxes.setdefault((source, to, tag), deque())


class _InBox:
    """`hvdtrain.core.protocols.Coming` of a `ThreadCarrier`."""

    def __init__(self, carrier: ThreadCarrier, box: deque[np.ndarray], what: str) -> None:
        self._carrier, self._box, self._what = carrier, box, what
        self._data: np.ndarray | None = None

    def wait_begun(self) -> None:
        """Wait until it is there."""
        if self._data is None:
            self._carrier.until(lambda: bool(self._box), self._what)

    def wait(self) -> np.ndarray:
        """Return it."""
        self.wait_begun()
        if self._data is None:
            with self._carrier.boxes.changed:
                self._data = self._box.popleft()
                self._carrier.boxes.changed.notify_all()
        return self._data
