"""Who writes a checkpoint once its state is copied: a thread while the run goes on, or the run itself."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Outcome
from hvdtrain.core.timeline import Timeline, active, current, span


class BackgroundSaver:
    """Implements `hvdtrain.core.protocols.run.Saver`: one thread, started with the first save, and one save at a
    time.

    The thread is a daemon, so that a disk or a rank that does not answer keeps no process alive; what it has written by
    then is no checkpoint yet, and the next save sweeps it up. It is kept from save to save: to start one costs the run
    milliseconds, in which it waits for Python's lock.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._settled: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Start ``work``; every exception that it raises is an outcome, since nobody else would see it."""
        assert self._idle.is_set(), "the last save is still under way"
        self._idle.clear()
        self._orders.put((step, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(current(),), name="hvdtrain-save", daemon=True)
            self._thread.start()

    def settled(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        return [self._settled.get() for _ in range(self._settled.qsize())]

    def wait(self, timeout_s: float) -> bool:
        """Return whether nothing is left to do, within ``timeout_s``."""
        return self._idle.wait(timeout_s)

    def end(self) -> None:
        """Let the thread go, which ends when what it does is done; a later save has its own."""
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
    """Call ``work`` and tell what came of it."""
    begin, cpu = time.perf_counter(), time.thread_time()
    error = ""
    try:
        work()
    except (OSError, UserError) as problem:
        error = str(problem)
    except BaseException as problem:  # noqa: BLE001  (see `BackgroundSaver.save`)
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(step, error, time.perf_counter() - begin, time.thread_time() - cpu)


class InlineSaver:
    """Implements `hvdtrain.core.protocols.run.Saver` in the thread that calls it."""

    def __init__(self) -> None:
        self._settled: list[Outcome] = []

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Call ``work``, or note why it cannot be done; what is not about the disk or the state is raised."""
        begin, error = time.perf_counter(), ""
        try:
            work()
        except (OSError, UserError) as problem:
            error = str(problem)
        self._settled.append(Outcome(step, error, time.perf_counter() - begin))

    def settled(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self._settled = self._settled, []
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Return True at once: a save is over when `save` returns."""
        return True

    def end(self) -> None:
        """There is no thread."""
