"""Point-to-point messages apart from all collectives: `MpiChannel`, and `MailChannel` between threads of one process.

A header before each message says what it is, so that two ranks that have come apart get an error and not each other's
numbers. Owns the packing of several arrays into one message, too; whole messages are
`hvdtrain.cluster.messages.carrier`'s.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.processes import wait_for
from hvdtrain.core.timeline import span

CHUNK = 1 << 29
"""Largest piece of a message in bytes; MPI 3.1 counts are 31 bits."""

MOST_TAG = 1 << 14
"""Tags are below it: MPI promises 32767, and a message takes two."""

ALIGNED = 64
"""Each array of a packed message begins at a multiple of it: TensorFlow reads it without a copy; a cache line."""

ROOM = 64
"""Packed messages of one sender, receiver and kind that may be under way; who sends one more waits."""

KINDS = ("outputs", "gradients of outputs", "outputs in evaluation", "test messages")
"""Content of packed messages, by their tag, for errors."""

_HEADER = 5


def begins(parts: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the byte at which each part begins, and the bytes of the whole message."""
    places, total = [], 0
    for part in parts:
        places.append(total)
        total += -(-part.nbytes // ALIGNED) * ALIGNED
    return places, total


def copied(parts: Sequence[np.ndarray], places: Sequence[int], into: np.ndarray) -> None:
    """Copy the contiguous ``parts`` to their places in ``into``, uint8 (n,)."""
    for part, place in zip(parts, places, strict=True):
        into[place:place + part.nbytes] = _bytes(part)


def room_for(nbytes: int) -> np.ndarray:
    """Return memory for a message, uint8 (nbytes,), that begins at a multiple of `ALIGNED`."""
    memory = np.empty(nbytes + ALIGNED, np.uint8)
    at = -memory.ctypes.data % ALIGNED
    return memory[at:at + nbytes]


def chunks(data: np.ndarray) -> list[np.ndarray]:
    """Cut uint8 (n,) into pieces of `CHUNK`."""
    return [data[start:start + CHUNK] for start in range(0, data.size, CHUNK)]


class ChannelClosed(RuntimeError):
    """The channel was closed on this rank while a message was under way."""


def header(x: np.ndarray, tag: int) -> np.ndarray:
    """Return the header of a message, int64 (5,): tag, dimensions, bytes, checks of dtype and shape."""
    words = zlib.crc32(x.dtype.str.encode()), zlib.crc32(repr(x.shape).encode())
    return np.array([tag, x.ndim, x.nbytes, *words], np.int64)


def _check(got: np.ndarray, like: np.ndarray, tag: int, source: int) -> None:
    """Raise RuntimeError unless a header is that of the message that was expected."""
    if not np.array_equal(got, header(like, tag)):
        raise RuntimeError(f"rank {source} sent a message of tag {got[0]} with {got[1]} dimensions and {got[2]} bytes "
                           f"where {like.dtype}{list(like.shape)} of tag {tag} was expected")


def _bytes(x: np.ndarray) -> np.ndarray:
    """Return the memory of a contiguous array as uint8 (n,)."""
    assert x.flags.c_contiguous, "a channel moves contiguous arrays"
    return x.reshape(-1).view(np.uint8)


class _Wait:
    """`hvdtrain.core.protocols.Handle` of a message: polls ``step`` until it returns True."""

    def __init__(self, step: Callable[[], bool], value: np.ndarray, channel: Any, what: str) -> None:
        self._step, self._value, self._channel, self._what = step, value, channel, what
        self._over = False

    def done(self) -> bool:
        """Return whether the message has gone or come, without waiting; advances it."""
        if not self._over:
            if self._channel.closed:
                raise ChannelClosed(f"the channel was closed in {self._what}")
            self._over = self._step()
        return self._over

    def wait(self) -> np.ndarray:
        channel = self._channel
        if not self.done():
            with pulse.waiting(self._what), span("message", "wire"):
                if not wait_for(self.done, channel.timeout_s, channel.longest_sleep_s):
                    raise WaitTimeout(f"rank {channel.rank} on host {channel.node} waited {channel.timeout_s:g} s in "
                                      f"{self._what}. {pulse.missing()}".rstrip())
        return self._value


class MpiChannel:
    """Implements `hvdtrain.core.protocols.Channel` over an mpi4py communicator of its own.

    MPI must have been started with THREAD_MULTIPLE. ``timeout_s`` bounds each wait; ``longest_sleep_s``: how long a
    waiting thread sleeps between two looks at most.
    """

    def __init__(self, comm: Any, timeout_s: float, longest_sleep_s: float = 200e-6) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.timeout_s, self.longest_sleep_s = timeout_s, longest_sleep_s
        self.node, self.closed = socket.gethostname(), False
        self._comm = comm
        self._open: list[tuple[Any, Any]] = []

    def send(self, x: np.ndarray, to: int, tag: int) -> _Wait:
        assert 0 <= tag < MOST_TAG, f"tag {tag}"
        first = header(x, tag)
        requests = [self._comm.Isend(first, dest=to, tag=2 * tag)]
        requests += [self._comm.Isend(part, dest=to, tag=2 * tag + 1) for part in chunks(_bytes(x))]
        return self._handle(requests, x, first, f"a message of tag {tag} to rank {to}")

    def receive(self, like: np.ndarray, source: int, tag: int) -> _Wait:
        first = np.zeros(_HEADER, np.int64)
        requests = [self._comm.Irecv(first, source=source, tag=2 * tag)]
        requests += [self._comm.Irecv(part, source=source, tag=2 * tag + 1) for part in chunks(_bytes(like))]

        def check() -> None:
            _check(first, like, tag, source)

        return self._handle(requests, like, first, f"a message of tag {tag} from rank {source}", check)

    def close(self) -> None:
        self.closed = True

    def free(self) -> None:
        self.closed = True
        self._comm.Free()

    def _handle(self, requests: list[Any], x: np.ndarray, first: np.ndarray, what: str,
                check: Callable[[], None] | None = None) -> _Wait:
        left = deque(requests)
        self._open.append((left, (x, first)))  # MPI may use the memory of a message that nobody waits for any more
        self._open = [entry for entry in self._open if entry[0]]

        def step() -> bool:
            while left and left[0].Test():
                if check is not None and len(left) == len(requests):
                    check()  # before the rest is looked at: a longer message than expected is MPI's error there
                left.popleft()
            return not left

        return _Wait(step, x, self, what)


class Mail:
    """Messages between ranks that are threads of one process."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], deque[tuple[np.ndarray, np.ndarray]]] = {}
        self._lock = threading.Lock()

    def put(self, x: np.ndarray, source: int, to: int, tag: int) -> None:
        """Keep a copy of ``x`` for rank ``to``."""
        with self._lock:
            self._boxes.setdefault((source, to, tag), deque()).append((header(x, tag), _bytes(x).copy()))

    def take(self, source: int, to: int, tag: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the oldest message (header, bytes), or None where there is none."""
        with self._lock:
            box = self._boxes.get((source, to, tag))
            return box.popleft() if box else None


class MailChannel:
    """Implements `hvdtrain.core.protocols.Channel` within one process; a rank may send to itself."""

    def __init__(self, mail: Mail, rank: int = 0, size: int = 1, timeout_s: float = 60.0,
                 longest_sleep_s: float = 200e-6) -> None:
        self.rank, self.size, self.timeout_s, self.longest_sleep_s = rank, size, timeout_s, longest_sleep_s
        self.node, self.closed = "this process", False
        self._mail = mail

    def send(self, x: np.ndarray, to: int, tag: int) -> _Wait:
        """Send a copy of ``x``; done at once."""
        self._mail.put(x, self.rank, to, tag)
        return _Wait(lambda: True, x, self, f"a message of tag {tag} to rank {to}")

    def receive(self, like: np.ndarray, source: int, tag: int) -> _Wait:
        def step() -> bool:
            found = self._mail.take(source, self.rank, tag)
            if found is None:
                return False
            _check(found[0], like, tag, source)
            _bytes(like)[...] = found[1]
            return True

        return _Wait(step, like, self, f"a message of tag {tag} from rank {source}")

    def close(self) -> None:
        self.closed = True

    def free(self) -> None:
        self.closed = True
