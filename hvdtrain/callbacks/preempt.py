"""Ends a run in time where its job is about to end: saved, with status 75, for another job to go on.

Owns the three ways to learn of it: SIGUSR2 to any rank, a wish of the supervisor, a known wall limit. Each only sets a
flag; the next vote tells all ranks (`Run.tell_all`), and all save and end together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.callbacks.base import Callback
from hvdtrain.faults import causes
from hvdtrain.wall_limit import reserve_s

TOPIC = "requeue"

LOOK_S = 1.0
"""How often the supervisor's wish and the clock are looked at."""

_early: list[int] = []
"""What `heed` has heard."""


def heed() -> None:
    """Keep a SIGUSR2 that comes from here on for the fit to come, where it would end this process; main thread only.

    For a program that is ours from its start to its end: one that is starting, or writes its model, must not die of it.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, lambda number, frame: _early.append(number))
        signal.siginterrupt(signal.SIGUSR2, False)  # nothing that starts waits in vain, or fails, for it


class Preempt(Callback):
    """Runs on all ranks, each of which may be the one that is told. ``limit_s``: the wall limit, 0 without one.

    ``clock``: unix seconds. The handler of SIGUSR2 is installed while a fit lasts; a handler of the user's is called
    after it, and returns when the fit ends.
    """

    where = "all"

    def __init__(self, limit_s: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._signalled, self._asked = False, False
        self._before: Any = None
        self._installed = False
        self._look_at = 0.0
        self._step_at = self._save_at = self._longest_step_s = self._longest_save_s = 0.0
        self._ends_at = _ends_at(limit_s)

    def fit_start(self, run: Any) -> None:
        """Listen from here on, and see what was wished for while the run was assembled."""
        self._install()
        self._step_at = self._clock()
        self._look(run)

    def step_end(self, run: Any) -> None:
        """Note the step, and look whether the run is to end."""
        now = self._clock()
        self._longest_step_s = max(self._longest_step_s, now - self._step_at)
        self._step_at = now
        self._look(run)

    def checkpoint(self, run: Any) -> None:
        """Begin to measure the save, whose own callback comes after this one."""
        self._save_at = self._clock()

    def step_start(self, run: Any) -> None:
        """End the measurement of a save; steps are counted without it."""
        if self._save_at:
            self._longest_save_s = max(self._longest_save_s, self._clock() - self._save_at)
            self._save_at, self._step_at = 0.0, self._clock()

    def epoch_end(self, run: Any) -> None:
        """Look here too: an evaluation may have taken long."""
        self._step_at = self._clock()
        self._look(run)

    def told(self, run: Any) -> None:
        """Agree to save and to end where a rank asked for it."""
        words = [word for word in run.state.told if word.topic == TOPIC]
        if words and not run.state.requeue:
            run.state.requeue = True
            run.state.stop = run.state.stop or f"requeue: {words[0].text} (rank {words[0].rank})"
            run.state.save_due = run.state.cursor.step > 0

    def continued(self, run: Any) -> None:
        """Forget the signal that ended the fit before; a wall limit and the supervisor's request still hold."""
        self._asked = self._signalled = False
        self._look_at = 0.0
        _early.clear()

    def close(self, run: Any) -> None:
        """Give SIGUSR2 back to whom it belonged to."""
        if self._installed:
            signal.signal(signal.SIGUSR2, self._before)
            self._installed = False

    def _install(self) -> None:
        if self._installed or threading.current_thread() is not threading.main_thread():
            return  # Python takes handlers in the main thread only
        before = signal.getsignal(signal.SIGUSR2)
        if before is None:
            return  # not installed from Python: it could not be given back
        self._before, self._installed = before, True
        signal.signal(signal.SIGUSR2, self._heard)

    def _heard(self, number: int, frame: Any) -> None:
        self._signalled = True
        if callable(self._before):
            self._before(number, frame)

    def _look(self, run: Any) -> None:
        """Tell all ranks, once, that the run is to end."""
        if self._asked:
            return
        why = "SIGUSR2" if self._signalled or _early else ""
        now = self._clock()
        if not why and now >= self._look_at:
            self._look_at = now + LOOK_S
            why = "the supervisor was asked to end" if causes.requeue_asked() else self._late(run, now)
        if why:
            self._asked = True
            run.tell_all(TOPIC, why)

    def _late(self, run: Any, now: float) -> str:
        """Why the wall limit asks for the end, "" while it does not. Rank 0's clock counts."""
        if not self._ends_at or run.control.rank != 0:
            return ""
        limit_s = self._limit_s or max(0.0, self._ends_at - now)
        left_s = self._ends_at - now
        save_s = max(self._longest_save_s, run.saver.spent.longest_s if run.saver is not None else 0.0)
        if left_s > reserve_s(limit_s, save_s, self._longest_step_s) + LOOK_S:
            return ""
        return f"{max(0.0, left_s):.0f} s are left of the time limit"


def _ends_at(limit_s: float) -> float:
    """When the wall limit ends the run, in unix seconds: as the supervisor counts it, else from this process' start."""
    with contextlib.suppress(ValueError):
        told = float(os.environ.get(causes.ENDS_AT, ""))
        return told
    return causes.started_at() + limit_s if limit_s else 0.0
