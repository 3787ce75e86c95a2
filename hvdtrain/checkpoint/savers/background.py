"""Does the work of a checkpoint in a thread of its own while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hvdtrain.errors import UserError
from hvdtrain.protocols.state import Outcome


class BackgroundSaver:
    """Implements `hvdtrain.protocols.state.Saver`: one thread for each save, one save at a time.

    The thread is a daemon, so that a disk or a rank that does not answer keeps no process alive; what it has written by
    then is no checkpoint yet, and the next save sweeps it up.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._settled: list[Outcome] = []
        self._lock = threading.Lock()

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Start ``work``; every exception that it raises is an outcome, since nobody else would see it."""
        assert self._thread is None or not self._thread.is_alive(), "the last save is still under way"
        self._thread = threading.Thread(target=self._run, args=(step, work), name=f"hvdtrain-save-{step}", daemon=True)
        self._thread.start()

    def settled(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        if not self._settled:
            return []
        with self._lock:
            outcomes, self._settled = self._settled, []
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Return whether the thread has ended, within ``timeout_s``."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, step: int, work: Callable[[], None]) -> None:
        begin, cpu = time.perf_counter(), time.thread_time()
        error = ""
        try:
            work()
        except (OSError, UserError) as problem:
            error = str(problem)
        except BaseException as problem:  # noqa: BLE001  (see `save`)
            error = f"{type(problem).__name__}: {problem}"
        with self._lock:
            self._settled.append(Outcome(step, error, time.perf_counter() - begin, time.thread_time() - cpu))
