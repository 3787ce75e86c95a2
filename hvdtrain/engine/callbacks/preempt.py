"""Save a run and end it on all ranks: on a signal (SIGINT, SIGTERM, SIGUSR2), at the supervisor's request, or before
a known limit of time or money.

Owns the signal handlers and the request to the other ranks (`Run.tell_all`), which the next agreement of a step
decides. Exit statuses are left to `hvdtrain.cluster.exit`: 130 after SIGINT, else 75.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from hvdtrain.cluster.liveness import causes
from hvdtrain.core.terminal import say
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.limits import RunLimit, limit_of
from hvdtrain.engine.run import Run

TOPIC = "requeue"

LOOK_S = 1.0
"""How often the supervisor's wish is looked at."""

AGAIN_S = 0.1
"""Seconds within which a further SIGINT counts as the same one: wrappers (``timeout``, ``uv run``) deliver it twice."""

INTERRUPT = "SIGINT"

_early: list[int] = []
"""Signals that came before the fit, of those that `heed` keeps."""


def heed() -> None:
    """Keep a first SIGUSR2 or SIGTERM from here on for the fit, where it would end this process; main thread only.

    For a program that is ours from its start to its end: its start, and the export of its model, must survive it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR2, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _Early())
                signal.siginterrupt(number, False)  # system calls of the start neither fail nor return early


class _Early:
    """The handler of a signal before the fit: the first is kept; a second SIGTERM ends the process."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGTERM and number in _early
        if again or os.getpid() != self._pid:  # or in a child that was forked
            _default(number)
        else:
            _early.append(number)


class Preempt(Callback):
    """Runs on all ranks, each of which may hear of it. ``clock``: unix seconds.

    The handlers are installed while a fit lasts. A handler of the user's is called too; an ignored signal (nohup, a
    job in the background) stays ignored. The first SIGINT saves and ends the run, a second one does what it did before
    the fit: it raises KeyboardInterrupt. Further SIGTERMs change nothing: Slurm sends one at both ends of its grace.
    """

    where = "all"

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(limit_of(run))

    def __init__(self, limit: RunLimit | None = None, clock: Callable[[], float] = time.time) -> None:
        self._limit, self._clock = limit or RunLimit(), clock
        self._asked = self._over = False
        self._run: Run | None = None
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._interrupted_at = -math.inf
        self._look_at = 0.0
        self._step_at = self._save_at = 0.0

    def fit_start(self, run: Run) -> None:
        """Listen from here on, and see what was wished for while the run was assembled."""
        self._run, self._over = run, False
        self._install()
        self._step_at = self._clock()
        self._limit.begin(self._step_at, self._step_at - causes.started_at(), run.control.size)
        self._end_before(run)
        self._look(run)

    def _end_before(self, run: Run) -> None:
        """End a run before its first step where a limit leaves no time for one, by rank 0's clock; collective.

        Errors: `UserError` where no job with this limit could train.
        """
        why = self._late(run, self._step_at)
        why, problem = run.control.bcast((why, self._limit.impossible(run) if why else None))
        if problem is not None:
            raise problem
        if why:
            run.state.requeue, run.state.stop = True, f"requeue: {why}"
            if run.control.rank == 0:
                say(f"{why}, too little for a step: the run ends; --resume auto continues it")

    def step_end(self, run: Run) -> None:
        now = self._clock()
        self._limit.step(now - self._step_at, run.state.outcome.met)
        self._step_at = now
        self._look(run)

    def eval_end(self, run: Run) -> None:
        now = self._clock()
        self._limit.evaluation_s = max(self._limit.evaluation_s, now - self._step_at)
        self._step_at = now

    def checkpoint(self, run: Run) -> None:
        self._save_at = self._clock()

    def step_start(self, run: Run) -> None:
        if self._save_at:
            self._limit.save_s = max(self._limit.save_s, self._clock() - self._save_at)
            self._save_at, self._step_at = 0.0, self._clock()

    def epoch_end(self, run: Run) -> None:
        self._step_at = self._clock()
        self._look(run)

    def told(self, run: Run) -> None:
        words = [word for word in run.state.told if word.topic == TOPIC]
        if words and not run.state.requeue and not self._over:
            word = next((one for one in words if one.text == INTERRUPT), words[0])
            run.state.requeue, run.state.interrupted = True, word.text == INTERRUPT
            what = "interrupted" if run.state.interrupted else "requeue"
            run.state.stop = run.state.stop or f"{what}: {word.text} (rank {word.rank})"
            run.state.save_due = run.state.cursor.step > 0
            heard = run.state.interrupted and word.rank == 0  # its handler has printed this already
            if run.control.rank == 0 and not heard:  # now: a launcher may leave a second, and no time for a summary
                say(f"{word.text} (rank {word.rank}): the run saves after this step and ends; --resume auto continues "
                    "it")

    def fit_end(self, run: Run) -> None:
        """Agree for the last time, before others write that the run has ended. Collective."""
        run.hear_last()
        self._over = True

    def continued(self, run: Run) -> None:
        """Forget the signal that ended the fit before; a wall limit and the supervisor's request still hold."""
        self._asked, self._interrupted_at = False, -math.inf
        self._look_at = 0.0
        _early.clear()

    def close(self, run: Run) -> None:
        """Give the signals back to their owners before the fit, but for one that has got another handler since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, before)
        self._before = {}
        self._asked, self._interrupted_at = False, -math.inf  # another fit listens again, also after an exception
        run.state.wishes.words = [word for word in run.state.wishes.words if word.topic != TOPIC]

    def _install(self) -> None:
        if self._before or threading.current_thread() is not threading.main_thread():
            return  # Python takes handlers in the main thread only
        self._pid = os.getpid()
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if before is None or before is signal.SIG_IGN and number != signal.SIGUSR2:
                continue  # None: not installed from Python, so that it could not be given back
            self._before[number] = before
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._pid:  # a child that was forked in the fit, such as a worker that is being terminated
            _hand_on(before, number, frame)
            return
        if number == signal.SIGINT and self._interrupted(before, frame):
            return
        if not self._asked and self._run is not None:
            self._ask(self._run, signal.Signals(number).name)
        if callable(before) and before is not signal.default_int_handler and not isinstance(before, _Early):
            before(number, frame)

    def _interrupted(self, before: Any, frame: FrameType | None) -> bool:
        """Count a SIGINT and print what it does; return whether there is nothing left to do for it."""
        first, self._interrupted_at = self._interrupted_at, time.monotonic()
        if self._interrupted_at < first + AGAIN_S:
            return True
        if first > -math.inf:
            _hand_on(before, signal.SIGINT, frame)
            return True
        what = "the run finishes its last save" if self._over else "the run saves after this step and ends"
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # RuntimeError: within a write
            sys.stderr.write(f"\nhvdtrain: interrupted: {what}; interrupt again to end it at once\n")
            sys.stderr.flush()
        return False

    def _ask(self, run: Run, why: str) -> None:
        """Tell all ranks, once, that the run is to end: those of a step under way at its own agreement."""
        self._asked = True
        run.tell_all(TOPIC, why)

    def _look(self, run: Run) -> None:
        if self._asked:
            return
        why = signal.Signals(_early[0]).name if _early else ""
        now = self._clock()
        if not why and now >= self._look_at:
            self._look_at = now + LOOK_S
            why = "the supervisor was asked to end" if causes.requeue_asked() else ""
        why = why or self._late(run, now)
        if why:
            self._ask(run, why)

    def _late(self, run: Run, now: float) -> str:
        """Return why the limit asks for the end, "" while it does not. Rank 0's clock counts."""
        limit = self._limit
        if not limit.ends_at or run.control.rank != 0:
            return ""
        left_s = limit.ends_at - now
        if left_s > limit.needed_s(run):
            if limit.probes(run, now):
                run.want_save()
            return ""
        return f"{max(0.0, left_s):.0f} s are left of the {limit.what}"


def _hand_on(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        _default(number)


def _default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class Supervised(Callback):
    """Runs on all ranks: each keeps its step for its last words, rank 0 writes it down in every step (microseconds)."""

    where = "all"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(causes.folder())

    def __init__(self) -> None:
        self._first = True

    def fit_start(self, run: Run) -> None:
        causes.mark("fit", run.state.cursor.step)
        causes.progress(run.state.cursor.step, False)

    def step_end(self, run: Run) -> None:
        causes.progress(run.state.cursor.step, run.control.rank == 0)
        if self._first:
            self._first = False
            causes.mark("step", run.state.cursor.step)
