"""A generator that runs ahead of its consumer in a background thread.

Owns the thread, its end and the way of an error out of it. Does not know what is made.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from hvdtrain.core.timeline import active, current, span

T = TypeVar("T")

_END: Any = object()

_JOIN_S = 10.0
"""Longest wait for the thread after its stop: it may be inside a user's fetch, which cannot be interrupted."""


class Shelf(Generic[T]):
    """Where a thread puts what it has made: ``ahead`` things at most wait there."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)

    def first(self) -> T | None:
        """Return what is taken next, which stays there; None where nothing lies there now."""
        with self.ready.mutex:
            kind, value = self.ready.queue[0] if self.ready.queue else ("end", None)
        return value if kind == "item" else None


def prefetched(items: Generator[T, None, None], shelf: Shelf[T]) -> Generator[T, None, None]:
    """Yield ``items``, made in advance by one background thread, up to a shelf full; inline where that holds none.

    An exception in the thread is raised here. Closing this generator stops the thread, closes ``items``
    inside it and waits for its end.
    """
    if shelf.ahead == 0:
        with contextlib.closing(items):
            yield from items
        return
    ready, stop = shelf.ready, threading.Event()
    timeline = current()

    def work() -> None:
        last: tuple[str, Any] = ("end", None)
        try:
            with contextlib.closing(items), active(timeline, "input") if timeline else contextlib.nullcontext():
                while True:
                    with span("fetch"):
                        item = next(items, _END)
                    if item is _END:
                        break
                    ready.put(("item", item))
                    if stop.is_set():
                        return
        except BaseException as error:  # handed over whole: the consumer decides
            last = ("error", error)
        ready.put(last)

    thread = threading.Thread(target=work, name="hvdtrain-fetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):  # makes room for the one item the thread may still hold
            while True:
                ready.get_nowait()
        if thread is not threading.current_thread():  # a garbage collection in it may call this
            thread.join(_JOIN_S)
