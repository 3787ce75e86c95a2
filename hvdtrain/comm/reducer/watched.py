"""How buckets travel, told to a trace while one is being taken: when each waits for its turn, when it is on the wire.

Owns the moments. A wire that goes on by itself is done before anybody waits for it: a thread asks its handles, in the
steps of a trace only.
"""

from __future__ import annotations

import threading
import time
from hvdtrain.core.protocols import Handle
from hvdtrain.core.timeline import Taker

ASK_EVERY_S = 100e-6
IDLE_S = 0.05
"""After which the thread that asks ends; the next request has a new one."""


class Watched:
    """One bucket of ``nbytes``, handed over when this is made; a span for each of its requests.

    ``overlaps``: a request is on the wire when it is made, else when it is waited for. ``asker``: asks handles.
    """

    def __init__(self, taker: Taker, nbytes: int, overlaps: bool, asker: Asker) -> None:
        self._taker, self._nbytes, self._overlaps, self._asker = taker, nbytes, overlaps, asker
        self._name = ""
        self._handle: Handle | None = None
        self._queued_s = time.perf_counter()
        self._sent_s = self._arrived_s = 0.0

    def made(self, name: str, handle: Handle) -> None:
        """A request called ``name`` was made."""
        self._name, self._handle, self._arrived_s = name, handle, 0.0
        if not self._overlaps:
            return
        self._send()
        self._asker.ask(handle, self)

    def waits(self) -> None:
        """The request that is open is waited for from here on."""
        if not self._overlaps:
            self._send()

    def waits_for(self, handle: Handle) -> bool:
        """Return whether the result of ``handle`` has not arrived yet."""
        return handle is self._handle and not self._arrived_s

    def arrived(self, handle: Handle) -> None:
        """The result of ``handle`` is there; the first call tells. Called from any thread."""
        if self.waits_for(handle):
            self._arrived_s = time.perf_counter()

    def taken(self) -> None:
        """Whoever waited has the result."""
        assert self._handle is not None
        self.arrived(self._handle)
        args = {"bytes": self._nbytes, "beside": self._overlaps}
        self._taker.take(self._name, "queue", self._queued_s, self._sent_s, args)
        self._taker.take(self._name, "wire", self._sent_s, self._arrived_s, args)
        self._queued_s = time.perf_counter()  # what follows is the way of the next request

    def _send(self) -> None:
        self._sent_s = time.perf_counter()


class Asker:
    """A thread that asks open handles whether they are done."""

    def __init__(self) -> None:
        self._open: list[tuple[Handle, Watched]] = []
        self._changed = threading.Condition()
        self._runs = False

    def ask(self, handle: Handle, watched: Watched) -> None:
        """Tell ``watched`` when ``handle`` is done."""
        with self._changed:
            self._open.append((handle, watched))
            self._changed.notify()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="hvdtrain-trace", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._open and not self._changed.wait(IDLE_S):
                    self._runs = False
                    return
                asked = list(self._open)
            done = [pair for pair in asked if _is_done(pair[0])]
            for handle, watched in done:
                watched.arrived(handle)
            with self._changed:
                self._open = [pair for pair in self._open if pair[1].waits_for(pair[0])]
            time.sleep(ASK_EVERY_S)


def _is_done(handle: Handle) -> bool:
    """Whether it is; one that was waited for meanwhile may know no answer any more."""
    try:
        return bool(handle.done())
    except Exception:  # noqa: BLE001  (Horovod's ValueError of a handle that is gone, or its shutdown)
        return True
