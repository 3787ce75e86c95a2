"""Hands records to a tracker in a thread of its own, so that training waits for no disk, server or library of it.

Owns the queue, its bound and the end. What the tracker raises is raised to the stream with the next record, which says
so once.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable

from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.protocols import Record, Tracker

MOST_WAITING = 1000
"""Records that wait for a slow tracker; beyond these the newest are lost, and counted."""

CLOSE_S = 30.0
"""Longest time that the end of a fit waits for what is left to write."""


class Beside:
    """Gives records to the tracker that ``make`` returns; it is made, used and closed in one thread.

    ``name``: what it is called where it fails. ``every``: which "step" records it takes. Nothing is made before the
    first record, which comes when the run has begun. ``close_s``: longest wait at the end.
    ``apart_s``: "step" records that follow one sooner than this are left out, since taking one costs that much.
    """

    at_once = False

    def __init__(self, name: str, make: Callable[[], Tracker], every: str, close_s: float = CLOSE_S,
                 apart_s: float = 0.0) -> None:
        self.name, self.every, self.close_s, self._apart_s, self._last_s = name, every, close_s, apart_s, -math.inf
        self._make = make
        self._records: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lost = 0

    def write(self, record: Record) -> None:
        """Put one record into the queue; raise what the tracker has raised over one before."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        if record.event == "step":
            if record.time_s - self._last_s < self._apart_s:
                return
            self._last_s = record.time_s
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Wait for what is left, ``close_s`` at most; raise what went wrong."""
        if self._thread is None:
            return
        pulse.at(f"the end of {self.name}")
        ends_at = time.monotonic() + self.close_s
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=self.close_s)
        self._thread.join(max(0.0, ends_at - time.monotonic()))
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"it still writes {self.close_s:g} s after the end and is left behind")
        if self._lost:
            raise RuntimeError(f"it was too slow for {self._lost} records, which it lacks")

    def _raise(self) -> None:
        """Raise what went wrong, as an `Exception`: a library's sys.exit ends its thread, not the run."""
        error = self._error
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"{type(error).__name__} {error}".rstrip()) from error

    def _work(self) -> None:
        """Make the tracker, feed it and close it; keep the first error, after which it gets nothing more."""
        tracker: Tracker | None = None
        try:
            tracker = self._make()
            while (record := self._records.get()) is not None:
                tracker.write(record)
        except BaseException as error:  # noqa: BLE001  (whatever a tracker's library raises, sys.exit too)
            self._error = error
        try:
            if tracker is not None:
                tracker.close()
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
