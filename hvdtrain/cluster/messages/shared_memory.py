"""Memory that the ranks of one host share: segments of vectors, and the messages of a pipeline within a host.

All of it is memory without a name (memfd), gone with its last process. A message is copied once to be sent.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.channel import KINDS, ROOM, begins, copied
from hvdtrain.cluster.messages.message_slots import (
    SLOT_HEAD,
    MessageSlot,
    files_limited,
    freed_with,
    more_files,
    opened,
)
from hvdtrain.core.errors import PeerFailed, WaitTimeout
from hvdtrain.core.processes import AWAKE_S, SPINS

TOKEN_BYTES = 16

TAGS = 4
"""Kinds of messages."""

LONGEST_S = 0.01
"""Longest sleep of a rank before it looks again, in case another of its threads has heard its doorbell."""

_RECORD = 4
"""Words of a record: slot, its descriptor, its bytes, the message's bytes."""
_TAIL, _RECORDS_AT = 8, 16
_LANE = _RECORDS_AT + _RECORD * ROOM
"""Words of a lane: messages sent so far, at `_TAIL` messages taken, each on a line of the cache of its own, records."""
_order = threading.Lock()


@dataclass(frozen=True)
class SegmentLayout:
    """Layout of shared memory ``number``: a choice of each of L ranks, then S vectors of n elements each."""

    L: int
    slots: int
    n: int
    dtype: str
    number: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one vector, in whole pages: no two ranks' vectors on one page."""
        return _pages(self.n * np.dtype(self.dtype).itemsize)

    @property
    def begin(self) -> int:
        """Begin of the vectors, in bytes."""
        return _pages(8 * self.L)

    def chosen_L(self, raw: np.ndarray) -> np.ndarray:
        """Return the vector that each rank hands to a sum."""
        return raw[:8 * self.L].view(np.int64)

    def rows_LSN(self, raw: np.ndarray) -> np.ndarray:
        """Return the vectors, (L, S, n)."""
        rows = raw[self.begin:self.begin + self.L * self.slots * self.row_bytes]
        own = self.n * np.dtype(self.dtype).itemsize
        return rows.reshape(self.L, self.slots, self.row_bytes)[:, :, :own].view(self.dtype)


class SharedUnavailable(Exception):
    """The ranks of a host cannot share memory, for ``reason``. Raised on every rank of the job."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_of(host: Any, nbytes: int) -> tuple[mmap.mmap | None, str]:
    """Return memory of ``nbytes`` zeros that all ranks of ``host`` map, or (None, why not). Collective over ``host``.

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
            reason = f"no shared memory can be created: {error}"
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


def _fence() -> None:
    """Make what was written so far visible before what is written next, on processors that may reorder stores.

    Taking a lock twice is the one way to it that Python has; where stores are seen in order (x86) it costs 0.1 us.
    """
    with _order:
        pass
    with _order:
        pass


class _Sending:
    """Messages to one rank under one tag: a ring of records in the host's memory, and slots."""

    def __init__(self, lane: np.ndarray, number: Callable[[], int]) -> None:
        self._lane, self._number = lane, number
        self._slots: list[MessageSlot] = []

    def count(self) -> int:
        return int(self._lane[0] - self._lane[_TAIL])

    def put(self, parts: Sequence[np.ndarray]) -> None:
        places, total = begins(parts)
        slot = self._slot(total)
        slot.words[0] = 1
        copied(parts, places, slot.data)
        n = int(self._lane[0])
        at = _RECORDS_AT + _RECORD * (n % ROOM)
        self._lane[at:at + _RECORD] = slot.number, slot.fd, slot.nbytes, total
        _fence()
        self._lane[0] = n + 1

    def _slot(self, total: int) -> MessageSlot:
        """Return the smallest free slot that is large enough, a new one where there is none."""
        free = [slot for slot in self._slots if not slot.words[0]]
        for slot in free:
            slot.close()
        fits = [slot for slot in free if slot.nbytes >= total]
        if not fits:
            fits = [MessageSlot(self._number(), max(total, mmap.PAGESIZE))]
            self._slots += fits
        return min(fits, key=lambda slot: slot.nbytes)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class _Taking:
    """Messages from ``source``, process ``pid``, under one tag; ``asked``: how many have been asked for."""

    def __init__(self, lane: np.ndarray, source: int, pid: int, mapped: dict[tuple[int, int], mmap.mmap]) -> None:
        self._lane, self._source, self._pid, self._mapped = lane, source, pid, mapped
        self.asked = 0

    def came(self, number: int) -> bool:
        return int(self._lane[0]) > number

    def take(self, number: int) -> np.ndarray:
        """Return the message's memory. Errors: `PeerFailed` where the sender has ended with it."""
        _fence()
        lane = self._lane
        assert lane[_TAIL] == number, f"message {number} is received after {lane[_TAIL]} others"
        at = _RECORDS_AT + _RECORD * (number % ROOM)
        slot, fd, nbytes, total = lane[at:at + _RECORD].tolist()
        memory = self._mapped.get((self._pid, slot))
        if memory is None:
            try:
                with files_limited():
                    memory = self._mapped[self._pid, slot] = opened(self._pid, fd, SLOT_HEAD + nbytes)
            except (FileNotFoundError, PermissionError, ProcessLookupError) as error:  # of a process that ends, or has
                raise PeerFailed(f"rank {self._source} ended before its message was read") from error
        data = freed_with(memory, total)
        _fence()
        lane[_TAIL] = number + 1
        return data


class Doorbells:
    """Pipes of the ranks of ``host``, into which others write a byte to wake one that sleeps, within 50 us. Collective.

    ``error``: why this rank cannot hear or reach the others; "".
    """

    def __init__(self, host: Any) -> None:
        self.error, self._to, self._poll, self._own, ear = "", {}, select.poll(), -1, -1
        try:
            self._own, ear = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._poll.register(self._own, select.POLLIN)
        except OSError as error:
            self.error = str(error)
        self._ends = tuple(fd for fd in (self._own, ear) if fd >= 0)
        self.pids, ears = map(list, zip(*host.allgather((os.getpid(), ear))))
        try:
            self._to = {i: os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                        for i, (pid, fd) in enumerate(zip(self.pids, ears)) if i != host.Get_rank()}
        except OSError as error:
            self.error = str(error)

    def ring(self, to: int) -> None:
        try:
            os.write(self._to[to], b"\0")
        except BlockingIOError:
            return  # it has not heard the ones before
        except BrokenPipeError:
            return  # it has ended, which others tell

    def sleep(self, longest_s: float) -> None:
        """Sleep until somebody rings, or has rung since the last sleep."""
        if self._poll.poll(1e3 * longest_s):
            try:
                os.read(self._own, 4096)
            except BlockingIOError:
                return  # another thread has heard it

    def close(self) -> None:
        """Close the doorbell pipes. A late writer gets EPIPE and ignores it."""
        for fd in (*self._to.values(), *self._ends):
            os.close(fd)
        self._to, self._ends = {}, ()


class SharedMessage:
    """`hvdtrain.core.protocols.PendingMessage` in a lane."""

    def __init__(self, carrier: SharedMemoryCarrier, lane: _Taking, source: int, tag: int) -> None:
        self._carrier, self._lane, self._source = carrier, lane, source
        self._number, lane.asked = lane.asked, lane.asked + 1
        self._what = f"a message with {KINDS[tag]} from rank {carrier.ranks[source]}"
        self._data: np.ndarray | None = None

    def begun(self) -> bool:
        """Return whether the message is there, all of it then."""
        return self._data is not None or self._lane.came(self._number)

    done = begun

    def wait_begun(self) -> None:
        self._carrier.until(self.begun, self._what)

    def wait(self) -> np.ndarray:
        if self._data is None:
            self.wait_begun()
            self._data = self._lane.take(self._number)
            self._carrier.bells.ring(self._source)  # it may wait for room
        return self._data


class SharedMemoryCarrier:
    """Carrier among ``ranks`` of one host, known by their rank in the job; see `make`.

    ``free`` also runs when the last reference is gone: a `Trainer` may evaluate after its fit, so that nothing but its
    own end says that its pipeline needs the carrier no more.
    """

    def __init__(self, host: Any, memory: mmap.mmap, bells: Doorbells, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks, self.bells, self.timeout_s = list(ranks), bells, timeout_s
        self._own, self._node = host.Get_rank(), socket.gethostname()
        n = len(self.ranks)
        lanes = np.frombuffer(memory, np.int64, n * n * TAGS * _LANE).reshape(n, n, TAGS, _LANE)
        number = itertools.count(1).__next__
        mapped: dict[tuple[int, int], mmap.mmap] = {}
        self._sending = {(i, tag): _Sending(lanes[self._own, i, tag], number)
                         for i in range(n) for tag in range(TAGS)}
        self._taking = {(i, tag): _Taking(lanes[i, self._own, tag], self.ranks[i], bells.pids[i], mapped)
                        for i in range(n) for tag in range(TAGS)}
        self.free = weakref.finalize(self, _close, list(self._sending.values()), bells)
        self.free.atexit = False  # a process that ends closes its files itself

    @classmethod
    def make(cls, host: Any, rank: int, timeout_s: float) -> SharedMemoryCarrier | None:
        """Return the carrier of the ranks of ``host``; None where any of them cannot. Collective over ``host``."""
        n = host.Get_size()
        if n == 1:
            return None
        more_files()
        bells = Doorbells(host)
        memory, _ = map_of(host, n * n * TAGS * _LANE * 8)
        fine = host.allgather(memory is not None and not bells.error)
        return cls(host, memory, bells, host.allgather(rank), timeout_s) if memory is not None and all(fine) else None

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = ROOM) -> None:
        i = self.ranks.index(to)
        sending = self._sending[i, tag]
        self.until(lambda: sending.count() < room,
                   f"sending a message with {KINDS[tag]} to rank {to}, which receives none")
        sending.put(parts)
        self.bells.ring(i)

    def take(self, source: int, tag: int) -> SharedMessage:
        i = self.ranks.index(source)
        return SharedMessage(self, self._taking[i, tag], i, tag)

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Wait until ``test`` is true, which another rank of the host makes so and rings. Errors: `WaitTimeout`."""
        for _ in range(SPINS):
            if test():
                return
        began = time.monotonic()
        until = began + self.timeout_s
        with pulse.waiting(what):
            while time.monotonic() - began < AWAKE_S and not test():
                os.sched_yield()
            while not test():
                if time.monotonic() > until:
                    own = self.ranks[self._own]
                    raise WaitTimeout(f"rank {own} on host {self._node} waited {self.timeout_s:g} s in {what}. "
                                      f"{pulse.missing()}".rstrip())
                self.bells.sleep(LONGEST_S)


def _close(sending: list[_Sending], bells: Doorbells) -> None:
    for one in sending:
        one.close()
    bells.close()
