"""Positions of a stream that keeps its state (``state_dict``, ``load_state_dict``): `Positions`.

Owns when states are taken, which one a checkpoint holds, and how a restored one is checked. `hvdtrain.data.stream_walk`
opens the stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

import numpy as np

from hvdtrain.data.stream import Arrays, fingerprint

CHECKED_ROWS = 16
"""Rows that follow a state and are compared after it has been restored."""
LEAST_INTERVAL = 20
"""Shortest time between two states, in times that the latest one took: 5 % of the reading at most."""
MOST_BYTES = 1 << 22
"""Largest state that a checkpoint's manifest holds."""
MOST_STATES = 32
"""States that are kept; with more of them every second one is dropped."""
CANNOT = "the stream cannot seek"
_TUPLE = "tuple of a stream's state"
_NEVER: Any = object()


class NotStorable(Exception):
    """A state holds a value that a checkpoint cannot store."""


class Mark:
    """A ``state`` after ``samples`` of ``epoch``, and checksums of the rows that followed it."""

    def __init__(self, epoch: int, samples: int, state: Any, checks: Iterable[int] = ()) -> None:
        self.epoch, self.samples, self.state, self.checks = epoch, samples, state, list(checks)


class Positions:
    """States of the stream ``data`` at ends of chunks, since reading ahead leaves ``data`` itself beyond the run.

    ``restored``: what `saved` gave to a checkpoint. ``why``: why there are no states, "" where there may be.
    Errors of the user's ``state_dict`` end in ``why``, since the stream can be read without.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        able = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
        self.why = "" if able else CANNOT
        self.restored: Mapping[str, Any] | None = None
        self._marks: deque[Mark] = deque()
        self._origin, self._left = _NEVER, False
        self._lock = Lock()
        self._took_s = self._ended_s = 0.0

    def noted(self, chunks: Iterable[Arrays], epoch: int, at: int) -> Iterator[Arrays]:
        """Yield ``chunks``, which begin at sample ``at`` of ``epoch``, and take states where they end."""
        self._keep_origin()
        self._left = True
        with self._lock:
            self._marks.clear()
        for chunk in chunks:
            if not self.why and isinstance(chunk, tuple) and all(map(np.ndim, chunk)):
                at += len(chunk[0])
                self._follow(chunk)
                self._take(epoch, at)
            yield chunk
        self._left = False

    def chunks_at(self, mark: Mark, counted: Callable[[Iterable[Arrays]], Iterator[Arrays]]
                  ) -> Generator[Arrays, None, None]:
        """Yield the chunks after ``mark``, which ``counted`` counts; `ValueError` where other rows follow it."""
        self._keep_origin()
        self._left = True
        self._data.load_state_dict(unpacked(mark.state))
        chunks = self._data.chunks(mark.epoch)
        try:
            yield from self.noted(checked(counted(chunks), mark.checks), mark.epoch, mark.samples)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def rewind(self) -> None:
        """Have the next epoch begin at its start, also where the one before was left in its middle."""
        if self._left and self._origin is not _NEVER and self._origin is not None:  # None: it had no state then
            self._data.load_state_dict(unpacked(self._origin))

    def find(self, epoch: int, samples: int) -> Mark | None:
        """Return the latest state at or before a position, of this process or of the checkpoint."""
        with self._lock:
            found = [mark for mark in self._marks if mark.checks]
        kept = self.restored
        if kept and kept.get("checks"):
            found.insert(0, Mark(kept["epoch"], kept["samples"], kept["state"], kept["checks"]))
        fits = [mark for mark in found if mark.epoch == epoch and 0 < mark.samples <= samples]
        return max(fits, key=lambda mark: mark.samples) if fits else None

    def saved(self, epoch: int, samples: int) -> dict[str, Any] | None:
        """Return the state for a checkpoint at a position, or why there is none; None for a stream without states."""
        mark = self.find(epoch, samples) if samples else None
        if mark is not None:
            return {"epoch": epoch, "samples": mark.samples, "state": mark.state, "checks": list(mark.checks)}
        return {"why": self.why} if self.why not in ("", CANNOT) else None

    def forget(self, samples: int) -> None:
        """Drop the states that no position from ``samples`` on needs."""
        with self._lock:
            while len(self._marks) > 1 and self._marks[1].samples <= samples and self._marks[1].checks:
                self._marks.popleft()

    def _keep_origin(self) -> None:
        if self._origin is _NEVER and not self.why:
            state = self._state()
            self._origin = _NEVER if self.why else state

    def _follow(self, chunk: Arrays) -> None:
        """Add checksums of the rows of ``chunk`` to the states before it."""
        begin = time.perf_counter()
        with self._lock:
            lacking = [mark for mark in self._marks if len(mark.checks) < CHECKED_ROWS]
            if lacking:
                checks = row_checks(chunk, CHECKED_ROWS - min(len(mark.checks) for mark in lacking))
                for mark in lacking:
                    mark.checks += checks[:CHECKED_ROWS - len(mark.checks)]
                self._took_s += time.perf_counter() - begin

    def _take(self, epoch: int, at: int) -> None:
        begin = time.perf_counter()
        if begin - self._ended_s < LEAST_INTERVAL * self._took_s:
            return
        state = self._state()
        with self._lock:
            if state is not None:
                self._marks.append(Mark(epoch, at, state))
            if len(self._marks) > MOST_STATES:
                self._marks = deque([*list(self._marks)[:-1:2], self._marks[-1]])
        self._ended_s = time.perf_counter()
        self._took_s = self._ended_s - begin

    def _state(self) -> Any:
        """Return the stream's state as a checkpoint can store it; None, with ``why``, where it cannot."""
        try:
            state = self._data.state_dict()
            return None if state is None else packed(state, [MOST_BYTES])
        except NotStorable as error:
            self.why = f"the stream's state {error}"
        except Exception as error:
            self.why = f"the stream's state_dict() raised {type(error).__name__}: {error}"
        return None


def checked(chunks: Iterable[Arrays], checks: list[int]) -> Iterator[Arrays]:
    """Yield ``chunks`` once their first rows have the checksums ``checks``; `ValueError` where they have others."""
    held: list[Arrays] = []
    found: list[int] = []
    rest = iter(chunks)
    while len(found) < len(checks):
        chunk = next(rest, None)
        if chunk is None:
            break
        held.append(chunk)
        found += row_checks(chunk, len(checks) - len(found))
    if found != checks:
        raise ValueError("other samples follow it than before")
    yield from held
    yield from rest


def row_checks(chunk: Arrays, n: int) -> list[int]:
    """Return the checksums of the first ``n`` rows of ``chunk``."""
    return [fingerprint(tuple(np.asarray(array[i]) for array in chunk)) for i in range(min(n, len(chunk[0])))]


def packed(value: Any, room: list[int]) -> Any:
    """Return a copy of ``value`` whose tuples JSON brings back; arrays and bytes are left to the checkpoint.

    ``room``: the bytes that are left for it. Errors: `NotStorable`.
    """
    if isinstance(value, Mapping):
        return {key: packed(one, room) for key, one in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [packed(one, room) for one in value]}
    if isinstance(value, list):
        return [packed(one, room) for one in value]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = value.copy()
    elif not (value is None or isinstance(value, (bool, int, float, str, bytes, np.number, np.bool_))):
        raise NotStorable(f"holds a {type(value).__qualname__}, which a checkpoint cannot store")
    room[0] -= getattr(value, "nbytes", len(value) if isinstance(value, (str, bytes)) else 8)
    if room[0] < 0:
        raise NotStorable(f"is larger than {MOST_BYTES >> 20} MiB")
    return value


def unpacked(value: Any) -> Any:
    """Undo `packed`."""
    if isinstance(value, Mapping):
        if set(value) == {_TUPLE}:
            return tuple(unpacked(one) for one in value[_TUPLE])
        return {key: unpacked(one) for key, one in value.items()}
    return [unpacked(one) for one in value] if isinstance(value, list) else value
