"""Move the rows of a stream from the rank that reads it to the other ranks of its host, through shared memory.

Owns these messages and their waits. `hvdtrain.data.batches` decides which ranks read, and cuts batches into shares.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.messages.channel import ALIGNED
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout
from hvdtrain.core.protocols import SharedCarrier
from hvdtrain.data.stream import Arrays, between

_TAG = 3
_ROWS, _END, _FAILED, _READING = range(4)
_WORDS = 8
"""Numbers at the start of a message: number of the walk, kind, n, checksum, low, high, bytes of the rest's description;
one is free."""
MOST_AHEAD = 48
"""Batches that a reader may fetch before it needs them: the others of its host have to have room for its messages."""
_MORE = 8
"""Messages beyond these that may be under way: of an evaluation, in which ranks wait for each other at its end only."""


SIGNS = 8
"""Signs of life of a reader within the longest wait for it, while it reads but has no batch yet."""


class Rows(NamedTuple):
    """Rows [low, high) of the ``n`` samples that a reader has read for a step, and the ``check``sum of all of them.

    ``runs``: numbers of the ``n`` samples (`hvdtrain.data.stream.RowQueue.take`).
    """

    n: int
    check: int
    low: int
    high: int
    arrays: Arrays
    runs: Sequence[tuple[int, int]]


class HostReader:
    """Messages of the rank ``reader`` to the others of its host, whose place in the cut ``places`` gives by rank.

    A walk through the stream has a number, the same on all ranks, which each message carries: what an abandoned walk
    has left in the memory is dropped. ``wanted_since``: when this rank began to wait for its next batch; None while it
    computes, evaluates or saves, so that the wait of a fetching thread has no bound then. ``ahead``: batches that each
    rank fetches before it needs them.
    """

    def __init__(self, carrier: SharedCarrier, rank: int, places: Mapping[int, int], timeout_s: float,
                 ahead: int = MOST_AHEAD) -> None:
        self.reader = min(carrier.ranks)
        self.reads = rank == self.reader
        self.ranks = sorted(carrier.ranks)
        self.wanted_since: float | None = None
        self._carrier, self._rank, self._timeout_s, self._room = carrier, rank, timeout_s, ahead + _MORE
        self._said = self._heard = time.monotonic()
        if not self.reads:
            carrier.timeout_s = timeout_s / SIGNS  # so that `rows` looks often at how long it has waited
        self._others = [(other, places[other]) for other in self.ranks if other != rank] if self.reads else []

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Have the body, which takes the next batch, count as a wait for the reader."""
        self.wanted_since = time.monotonic()
        try:
            with contextlib.nullcontext() if self.reads else pulse.waiting(
                    f"taking rows of the stream, which rank {self.reader} reads"):
                yield
        finally:
            self.wanted_since = None

    @contextlib.contextmanager
    def walk(self, number: int) -> Iterator[None]:
        """Tell the other ranks of the end of the body, or of its error."""
        kind, text = _END, b""
        try:
            yield
        except UserError as error:
            kind, text = _FAILED, pickle.dumps((error.got, error.expected, error.do, error.kind))
            raise
        except GeneratorExit:
            raise
        except BaseException as error:
            kind, text = _FAILED, pickle.dumps(f"rank {self._rank}, which reads the stream for this host, failed: "
                                               f"{type(error).__name__}: {error}")
            raise
        finally:
            for rank, _ in self._others:
                self._put(rank, (number, kind, 0, 0, 0, 0, len(text)), [np.frombuffer(text, np.uint8)])

    def send(self, number: int, parts: list[Arrays], n: int, check: int,
             bounds: Callable[[int], tuple[int, int]], runs: Sequence[tuple[int, int]] = ()) -> None:
        """Give each other rank its rows of the ``n`` of a step, numbered ``runs``; ``bounds``: place in the cut ->
        rows [low, high).
        """
        self._said = time.monotonic()
        text = pickle.dumps(([(array.dtype, array.shape[1:]) for array in parts[0]], runs))
        for rank, place in self._others:
            low, high = bounds(place)
            rows = [one for column in zip(*between(parts, low, high)) for one in _contiguous(column)]
            self._put(rank, (number, _ROWS, n, check, low, high, len(text)),
                      [np.frombuffer(text, np.uint8), *(row.reshape(-1).view(np.uint8) for row in rows)])

    def reading(self, number: int) -> None:
        """Tell the other ranks that the stream gives samples, where a batch takes long: a replay, or a slow source."""
        now = time.monotonic()
        if now - self._said >= self._timeout_s / SIGNS:
            self._said = now
            for rank, _ in self._others:
                self._put(rank, (number, _READING), [])

    def rows(self, number: int) -> Iterator[Rows]:
        """Yield this rank's rows of the walk's batches, in memory that the host shares.

        Errors: `UserError` of the reader, `PeerFailed` for another one of it, `WaitTimeout` where it reads nothing.
        """
        while True:
            message = self._next()
            self._heard = time.monotonic()
            words = message[:8 * _WORDS].view(np.int64).tolist()
            if words[0] != number or words[1] == _READING:
                continue
            n, check, low, high, nbytes = words[2:7]
            at = 8 * _WORDS
            what: Any = pickle.loads(message[at:at + nbytes].tobytes()) if nbytes else None
            if words[1] == _FAILED:
                if isinstance(what, str):
                    raise PeerFailed(what)
                got, expected, do, kind = what
                raise UserError(got, expected, do).of_kind(kind)
            if words[1] == _END:
                return
            layout, runs = what
            yield Rows(n, check, low, high, _arrays(message, at + _padded(nbytes), layout, high - low), runs)

    def _put(self, rank: int, words: tuple[int, ...], parts: list[np.ndarray]) -> None:
        head = np.zeros(_WORDS, np.int64)
        head[:len(words)] = words
        self._carrier.put([head.view(np.uint8), *parts], rank, _TAG, self._room)

    def _next(self) -> np.ndarray:
        message = self._carrier.take(self.reader, _TAG)
        while True:
            try:
                return message.wait()
            except WaitTimeout:
                since = self.wanted_since
                if since is not None and time.monotonic() - max(since, self._heard) >= self._timeout_s:
                    raise WaitTimeout(f"rank {self._rank} waited {self._timeout_s:g} s for its rows of the stream, "
                                      f"which rank {self.reader} reads for this host, and the stream gave none. "
                                      f"{pulse.missing()}".rstrip()
                                      ) from None


def _contiguous(column: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the pieces of a column in such a form that a message holds their rows one after the other."""
    if all(array.nbytes % ALIGNED == 0 for array in column[:-1]):
        return [np.ascontiguousarray(array) for array in column]
    return [np.concatenate(column)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _arrays(message: np.ndarray, at: int, what: list[tuple[np.dtype, tuple[int, ...]]], n: int) -> Arrays:
    """Return views of ``n`` rows of each column, whose (dtype, shape of a row) ``what`` lists, from byte ``at`` on."""
    arrays = []
    for dtype, shape in what:
        nbytes = n * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(message[at:at + nbytes].view(dtype).reshape(n, *shape))
        at += _padded(nbytes)
    return tuple(arrays)
