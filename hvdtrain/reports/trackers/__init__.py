"""Trackers hand a run's records on to other tools: key ``trackers``, a file each, on rank 0 alone.

Owns the names that the key takes, and what is asked of them before a run starts. A file here has a class of its name
(``Csv`` in csv.py), a `hvdtrain.core.protocols.Tracker` made from the run and what stands after a colon; ``MODULE`` and
``PACKAGE``, the module that it needs and what pip calls that ("" where the standard library will do); ``ARGUMENT``, a
pattern of what may stand after a colon, and ``MEANS``, that in words; ``APART_S``, the least seconds between two steps
that it takes, by what one costs. A file is imported only where its tracker is named, its package with a record.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import pkgutil
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols import Record, Report, Tracker
from hvdtrain.core.resolve import load_callable

if TYPE_CHECKING:
    from hvdtrain.reports import ReportedRun


def choices() -> list[str]:
    """Return the built-in trackers: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(entries: Sequence[str]) -> None:
    """Raise `UserError` for an entry of ``trackers`` that is not built in nor spelt as a callable, or there twice."""
    for n, text in enumerate(entries):
        name, _, argument = text.partition(":")
        if name in choices():
            takes = _module(name)
            if not re.fullmatch(takes.ARGUMENT, argument):
                raise UserError(f"trackers has {text!r}", f"{name}{takes.MEANS}", "correct trackers")
        elif not argument:
            raise UserError(f"trackers has {text!r}", f"{nearest(text, choices())}, or module:callable",
                            "correct trackers")
        if text in entries[:n]:
            raise UserError(f"trackers has {text!r} twice", "each once", "leave one out")


def check_installed(entries: Sequence[str]) -> None:
    """Raise `UserError` where a tracker's package is not installed here, or a callable of the user's is not there."""
    for text in entries:
        name, _, _ = text.partition(":")
        if name not in choices():
            load_callable(text, "trackers")
            continue
        needs = _module(name)
        if needs.MODULE and not _installed(needs.MODULE):
            raise UserError(f"trackers has {name}, and {needs.PACKAGE} is not installed", f"{needs.PACKAGE} on rank 0",
                            f'run pip install {needs.PACKAGE}, or "hvdtrain[trackers]" for all of them')


def make(run: ReportedRun) -> list[Report]:
    """Return the trackers that ``run.config`` names, each in the background in a thread of its own."""
    return [_beside(run, text) for text in run.config.trackers]


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return the text of the file ``path``, the id of a tracker's run; made and written where there is none."""
    if not path.exists():
        path.write_text(make(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _beside(run: ReportedRun, text: str) -> Report:
    name, _, argument = text.partition(":")
    if name in choices():
        factory, apart_s = partial(getattr(_module(name), name.title()), run, argument), _module(name).APART_S
    else:
        factory, apart_s = partial(_own, run, text), 0.0
    # The other ranks wait for rank 0 meanwhile, so all trackers together take half of what that may last at most.
    close_s = min(CLOSE_S, run.config.control_timeout_s / (2 * len(run.config.trackers)))
    return Beside(f"tracker {text}", factory, f"{run.config.log_every} step", close_s, apart_s)


def _own(run: ReportedRun, text: str) -> Tracker:
    made: Any = load_callable(text, "trackers")(run)
    if not (callable(getattr(made, "write", None)) and callable(getattr(made, "close", None))):
        raise TypeError(f"its callable returned a {type(made).__name__} without write(record) and close()")
    return made  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _installed(module: str) -> bool:
    """Return whether ``module`` can be imported; a mere folder of that name, such as W&B leaves, is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


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
        if self._thread is None:
            return
        pulse.at(f"the end of {self.name}")
        ends_at = time.monotonic() + self.close_s
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=self.close_s)
        self._thread.join(max(0.0, ends_at - time.monotonic()))
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"it still writes {self.close_s:g} s after the end and is abandoned")
        if self._lost:
            raise RuntimeError(f"it was too slow for {self._lost} records, which are missing")

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
        except BaseException as error:  # whatever a tracker's library raises, sys.exit too
            self._error = error
        try:
            if tracker is not None:
                tracker.close()
        except BaseException as error:
            self._error = self._error or error
