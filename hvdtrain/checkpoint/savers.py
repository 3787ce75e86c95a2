"""Save in the background: how often, disk space, host memory for copies, and the thread that writes."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.cluster.machine.memory import host_room_bytes
from hvdtrain.config import CheckpointConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Outcome
from hvdtrain.core.timeline import Timeline, active, current, span
from hvdtrain.core.units import format_bytes
from hvdtrain.planning.simulator.scene import SAVES_COST


class BackgroundSaver:
    """Implement `hvdtrain.core.protocols.run.Saver` by one thread, for one save at a time.

    The thread is a daemon, so that a disk or a rank that does not answer keeps no process alive; the next save removes
    its unfinished files. It lasts from save to save: to start one costs milliseconds of waiting for Python's lock.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._settled: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def save(self, step: int, work: Callable[[], None]) -> None:
        assert self._idle.is_set(), "the last save is still running"
        self._idle.clear()
        self._orders.put((step, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(current(),), name="hvdtrain-save", daemon=True)
            self._thread.start()

    def settled(self) -> list[Outcome]:
        return [self._settled.get() for _ in range(self._settled.qsize())]

    def wait(self, timeout_s: float) -> bool:
        return self._idle.wait(timeout_s)

    def end(self) -> None:
        """Let the thread end after its work; a later save starts another."""
        if self._thread is not None:
            self._orders.put(None)
            if self._idle.is_set():
                self._thread.join(1.0)
            self._thread = None

    def _serve(self, timeline: Timeline | None) -> None:
        with active(timeline, "save") if timeline else contextlib.nullcontext():
            while (order := self._orders.get()) is not None:
                with span(f"save of step {order[0]}"):
                    self._settled.put(_done(*order))
                del order  # it holds copies of the state
                self._idle.set()


def _done(step: int, work: Callable[[], None]) -> Outcome:
    begin, cpu = time.perf_counter(), time.thread_time()
    error = ""
    try:
        work()
    except (OSError, UserError) as problem:
        error = str(problem)
    except BaseException as problem:  # see `BackgroundSaver.save`
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(step, error, time.perf_counter() - begin, time.thread_time() - cpu)


class InlineSaver:
    """Implement `hvdtrain.core.protocols.run.Saver` in the thread that calls it."""

    def __init__(self) -> None:
        self._settled: list[Outcome] = []

    def save(self, step: int, work: Callable[[], None]) -> None:
        begin, error = time.perf_counter(), ""
        try:
            work()
        except (OSError, UserError) as problem:
            error = str(problem)
        self._settled.append(Outcome(step, error, time.perf_counter() - begin))

    def settled(self) -> list[Outcome]:
        outcomes, self._settled = self._settled, []
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        return True

    def end(self) -> None:
        pass


class NoRoom(Exception):
    """Host memory has no room for a copy: ``needed_bytes`` were requested so far, ``room_bytes`` are left."""

    def __init__(self, needed_bytes: int, room_bytes: int) -> None:
        self.needed_bytes, self.room_bytes = needed_bytes, room_bytes
        super().__init__(f"{needed_bytes} bytes of {room_bytes}")


class HostCopies:
    """Host memory for a rank's copies, reused in each save. ``local_size``: ranks that share this host's memory."""

    def __init__(self, local_size: int) -> None:
        self.bytes = 0
        self._local_size = local_size
        self._kept: dict[tuple[str, str], np.ndarray] = {}
        self._used: set[tuple[str, str]] = set()
        self._room_bytes = 0

    def begin(self) -> None:
        """Begin a save: free what the last one did not use, and measure the host's room at the first need."""
        for key in set(self._kept) - self._used:
            self.bytes -= self._kept.pop(key).nbytes
        self._used = set()
        self._room_bytes = -1

    def place(self, group: str, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the memory for an array, implements `hvdtrain.core.protocols.run.Place`. `NoRoom`."""
        key, dtype = (group, name), np.dtype(dtype)
        kept = self._kept.get(key)
        if kept is None or kept.shape != shape or kept.dtype != dtype:
            self._take(math.prod(shape) * dtype.itemsize - (0 if kept is None else kept.nbytes))
            kept = self._kept[key] = np.empty(shape, dtype)
        self._used.add(key)
        return kept

    def forget(self) -> None:
        self._kept, self._used, self.bytes = {}, set(), 0

    def _take(self, n_bytes: int) -> None:
        """Count new memory as used, though the system gives its pages later."""
        if self._room_bytes < 0:
            room = host_room_bytes(self._local_size)
            self._room_bytes = 2**62 if room is None else room
        if n_bytes > self._room_bytes:
            raise NoRoom(self.bytes + n_bytes, self._room_bytes)
        self._room_bytes -= n_bytes
        self.bytes += n_bytes


def view(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Request no copy; implements `hvdtrain.core.protocols.run.Place`."""


def often(settings: CheckpointConfig) -> str:
    """Describe when a run is saved, "" for never. Pure.

    >>> often(CheckpointConfig(every_steps=100, at_end=False))
    'every 100 steps'
    """
    words = []
    if settings.every_steps:
        words.append("every step" if settings.every_steps == 1 else f"every {settings.every_steps} steps")
    if settings.every_s:
        words.append(f"every {settings.every_s:g} s")
    if not words and settings.every == "auto":
        words.append(f"after {FIRST_S:g} s, then as often as keeps their cost below {100 * SAVES_COST:g} % of the time")
    return ", ".join(words + ["at the end"] * settings.at_end)


def most_bytes(one_bytes: int, keep: int) -> int:
    """Return the bytes of checkpoints at most: those kept, and the next one while it is written. Pure."""
    return one_bytes * (keep + 1)


def free_bytes(out: Path) -> int | None:
    """Return the free bytes where a run is saved; None where unknown."""
    with contextlib.suppress(OSError):
        return files.free_bytes(out)
    return None


def line(settings: CheckpointConfig, one_bytes: int, free: int | None, n_best: int = 0) -> str:
    """Return the line about checkpoints at a run's start; ``n_best``: metrics whose best one is kept. Pure."""
    who = ", each rank its shard" if settings.layout == "sharded" else ""
    room = "" if free is None else f"; {format_bytes(free)} free"
    most, best = format_bytes(most_bytes(one_bytes, settings.keep + n_best)), " and the best" if n_best else ""
    return (f"checkpoints: {often(settings) or 'of the best evaluation'}; about {format_bytes(one_bytes)} each{who}, "
            f"the newest {settings.keep}{best} are kept, at most {most}{room}")


def warning(settings: CheckpointConfig, one_bytes: int, free: int | None, n_best: int = 0) -> str:
    """Return the warning about a disk that is too small, "" where it is not. Pure."""
    needed = most_bytes(one_bytes, settings.keep + n_best)
    if free is None or free >= needed:
        return ""
    return (f"checkpoints may not fit: {format_bytes(needed)} for {settings.keep + n_best} and one more during a save, "
            f"{format_bytes(free)} free; free some space, set checkpoint.keep lower, or choose another --out")


FIRST_S = 60.0
"""When the first save of a run is made whose cost nobody knows yet; runs of seconds save at their end only."""
