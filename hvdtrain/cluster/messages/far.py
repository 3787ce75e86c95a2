"""Messages of a pipeline over MPI, which go on moving while a rank computes.

MPI moves a message only while somebody calls it: a large one waits for its sender and its receiver to meet. Owns
`FarCarrier`, the thread that calls MPI while something is under way (`Mover`), a message that is sent (`Parcel`) and
one that comes (`Taken`): first a part of at most `FIRST` bytes that begins with how long it is in all, then the rest.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.packing import ALIGNED, KINDS, ROOM, begins, copied, room_for
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.processes import wait_for

FIRST = 16384
"""Bytes of a message's first part at most: a small one takes no second."""

CHUNK = 1 << 29
"""Largest part in bytes; MPI 3.1 counts are 31 bits."""

AWAKE_S, ASLEEP_S, PATIENT = 50e-6, 1e-3, 40
"""How long the thread sleeps between two calls of MPI: at first, and once nothing has moved for the third number of
calls. A rank that waits calls MPI itself."""

Until = Callable[[Callable[[], bool], str], None]
"""Waits for a test to be true, in words."""


class Moving(Protocol):
    """A message under way."""

    def move(self) -> bool:
        """Move it on; return whether it is through. Whoever has been told so does not call again."""
        ...


class Parcel:
    """A copy of ``parts`` that is sent; lives until it has left."""

    def __init__(self, comm: Any, parts: Sequence[np.ndarray], to: int, tag: int) -> None:
        places, total = begins(parts)
        whole = room_for(ALIGNED + total)
        whole[:8] = np.frombuffer(np.int64(total).tobytes(), np.uint8)
        copied(parts, places, whole[ALIGNED:])
        self._left = deque([comm.Isend(whole[:FIRST], dest=to, tag=2 * tag)])
        self._left += [comm.Isend(part, dest=to, tag=2 * tag + 1) for part in _chunks(whole[FIRST:])]
        self._whole = whole

    def move(self) -> bool:
        """Drop the parts that have left."""
        while self._left and self._left[0].Test():
            self._left.popleft()
        return not self._left


class Taken:
    """`hvdtrain.core.protocols.Coming` over MPI; its rest is asked for as soon as its first part is there."""

    def __init__(self, comm: Any, source: int, tag: int, until: Until) -> None:
        self._comm, self._source, self._tag, self._until = comm, source, tag, until
        self._first = room_for(FIRST)
        self._left: deque[Any] = deque([comm.Irecv(self._first, source=source, tag=2 * tag)])
        self._whole: np.ndarray | None = None
        self._through = False
        self._what = f"a message with {KINDS[tag]} from rank {source}"

    def move(self) -> bool:
        """Go on with what has come."""
        while self._left and self._left[0].Test():
            self._left.popleft()
            if self._whole is None:
                self._rest()
        self._through = not self._left
        return self._through

    def _rest(self) -> None:
        total = int(self._first[:8].view(np.int64)[0])
        if ALIGNED + total <= FIRST:
            self._whole = self._first[ALIGNED:ALIGNED + total]
            return
        whole = room_for(total)
        whole[:FIRST - ALIGNED] = self._first[ALIGNED:]
        self._left += [self._comm.Irecv(part, source=self._source, tag=2 * self._tag + 1)
                       for part in _chunks(whole[FIRST - ALIGNED:])]
        self._whole = whole

    def begun(self) -> bool:
        """Return whether the first part is there."""
        return self._whole is not None

    def wait_begun(self) -> None:
        """Wait for the first part."""
        self._until(self.begun, self._what)

    def wait(self) -> np.ndarray:
        """Wait for all of it and return it."""
        self._until(lambda: self._through, self._what)
        assert self._whole is not None
        return self._whole


class Mover:
    """Moves what is under way, of each key in the order in which it was added, in a thread that sleeps without any."""

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lines: dict[tuple[int, int], deque[Moving]] = {}

    def add(self, what: Moving, *key: int) -> None:
        """Move ``what`` on from now on, behind what was added under ``key`` before."""
        with self._changed:
            self._lines.setdefault((key[0], key[1]), deque()).append(what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def count(self, *key: int) -> int:
        """Return how many under ``key`` are under way."""
        return len(self._lines.get((key[0], key[1]), ()))

    def idle(self) -> bool:
        """Return whether nothing is being sent."""
        return not any(line for (_, tag), line in list(self._lines.items()) if tag >= 0)

    def move(self) -> bool:
        """Move all on that can be; return whether something is through."""
        with self._changed:
            some = False
            for line in self._lines.values():
                while line and line[0].move():
                    line.popleft()
                    some = True
            return some

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _work(self) -> None:
        quiet = 0
        while True:
            some = self.move()
            with self._changed:
                quiet = 0 if some else quiet + 1
                if not any(self._lines.values()) and not self._closed:
                    self._changed.wait()
                    quiet = 0
                elif not self._closed:
                    self._changed.wait(AWAKE_S if quiet < PATIENT else ASLEEP_S)
                if self._closed:
                    return


class FarCarrier:
    """Implements `hvdtrain.core.protocols.Carrier` over an mpi4py communicator of its own; MPI must let several threads
    in.
    """

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = int(comm.Get_rank()), int(comm.Get_size()), timeout_s
        self._comm, self._node = comm, socket.gethostname()
        self._mover = Mover(f"messages of rank {self.rank}")

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        """Begin to send a copy."""
        self._until(lambda: self._mover.count(to, tag) < room, f"sending a message with {KINDS[tag]} to rank {to}")
        self._mover.add(Parcel(self._comm, parts, to, tag), to, tag)

    def take(self, source: int, tag: int) -> Taken:
        """Ask for a message, which comes while this rank computes."""
        taken = Taken(self._comm, source, tag, self._until)
        self._mover.add(taken, source, ~tag)
        return taken

    def flush(self) -> None:
        """Wait until all has left."""
        self._until(self._mover.idle, "sending what is under way")

    def free(self) -> None:
        """Give the communicator back."""
        self._mover.close()
        self._comm.Free()

    def _until(self, test: Callable[[], bool], what: str) -> None:
        """Wait until ``test`` is true, moving on what is under way."""
        def moved() -> bool:
            self._mover.move()
            return test()

        if test() or moved():
            return
        with pulse.waiting(what):
            if not wait_for(moved, self.timeout_s):
                raise WaitTimeout(f"rank {self.rank} on host {self._node} waited {self.timeout_s:g} s in {what}. "
                                  f"{pulse.missing()}".rstrip())


def _chunks(data: np.ndarray) -> list[np.ndarray]:
    return [data[start:start + CHUNK] for start in range(0, data.size, CHUNK)]
