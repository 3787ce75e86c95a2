"""Announce phases longer than 3 s with their duration: the start, the first graph, a probe.

Owns the thread on rank 0 that checks the run's phase (`hvdtrain.cluster.liveness.pulse`) twice a second. It is silent
while steps are made and after a run's last message.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.terminal import say
from hvdtrain.reports.progress.line import Line, clock, line_terminal

SILENT_S = 3.0
LOOK_S = 0.5
AGAIN_S = (10.0, 30.0, 60.0)
"""Seconds of a phase at which plain lines speak of it again; then once a minute."""
STEPS = 4.0
"""A step is spoken of when it takes so many times as long as the longest before it, and over `SILENT_S`."""
NOTICED_S = 0.2
"""Parts of the time to the first step that are shorter are told together."""

F = TypeVar("F", bound=Callable[..., Any])
_current: Watch | None = None
_watched = False
"""Whether this process had a watch already: what is before its first one is Python and the user's script."""


def current() -> Watch | None:
    """Return the watch over the call under way; None on other ranks, and with progress off."""
    return _current


def told(method: F) -> F:
    """Watch over a method of `hvdtrain.Trainer` while it runs, on rank 0, as ``config.progress`` says. A decorator."""
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        facts = launch_facts(os.environ)
        if _current is not None or facts.rank != 0 or self.config.progress == "off":
            return method(self, *args, **kwargs)
        with Watch(self.config.progress, facts.kind != "solo"):
            return method(self, *args, **kwargs)

    return cast(F, watched)


class Watch:
    """Looks at one call. ``line``: drawn on a terminal, or None; ``before_s``: uncounted seconds before."""

    def __init__(self, kind: str, launched: bool, now: Callable[[], float] = time.monotonic) -> None:
        terminal = line_terminal(kind, launched)
        self.line = None if terminal is None else Line(terminal)
        self._clock = now
        self._begin = self._shown = now()
        self._at: tuple[str, int, float] = ("start", -1, self._begin)
        self._early: list[tuple[str, float]] | None = [("start", self._begin)]
        self._first: list[tuple[str, float]] = []
        self._pace = _Pace()
        self._said = ""
        self._said_from = self._next_s = 0.0
        self.pid = os.getpid()
        self.before_s = 0.0
        self._end, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> Watch:
        global _current, _watched
        _current = pulse.listener = self
        if not _watched:
            _watched, self.before_s = True, time.time() - causes.started_at()
        pulse.at("start")
        threading.Thread(target=self._look, name="hvdtrain-progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Say nothing from now on; called at the end, and before a run's last words, by any thread."""
        global _current
        self._end.set()
        held = self._lock.acquire(timeout=1.0)
        if self.line is not None:
            self.line.close()
        if held:
            self._lock.release()
        if pulse.listener is self:
            pulse.listener = None
        if _current is self:
            _current = None

    def at(self, phase: str, step: int | None) -> None:
        """Take note of a phase; called often, by the run's thread, so it does next to nothing."""
        before = self._at
        if phase != before[0]:
            now = self._clock()
            self._at = (phase, before[1] if step is None else step, now)
            if self._said:
                self._ended(now)
            if self._early is not None:
                self._early_at(before[0], phase, now)

    def shown(self) -> None:
        """Take note that a person has just been told something."""
        self._shown = self._clock()

    def first_step(self) -> str:
        """Return, once, how long it took to the end of the first step, by part; "" where that was no silence."""
        parts, self._first = self._first, []
        total_s = sum(seconds for _, seconds in parts)
        if total_s < SILENT_S:
            return ""
        told = [f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= NOTICED_S]
        rest_s = sum(seconds for _, seconds in parts if seconds < NOTICED_S)
        told += [f"other {rest_s:.1f}"] if rest_s >= NOTICED_S else []
        return f"first step ended {total_s:.1f} s after the start: {', '.join(told)} s"

    def _early_at(self, before: str, phase: str, now: float) -> None:
        """Keep the phases up to the end of the first step."""
        assert self._early is not None
        self._early.append((phase, now))
        if before not in STEP or phase in STEP:
            return
        seconds = {"Python and the script": self.before_s} if self.before_s else {}
        for (name, begin), (_, end) in zip(self._early, self._early[1:]):
            what = of(name, -1, True)
            seconds[what] = seconds.get(what, 0.0) + end - begin
        self._first, self._early = list(seconds.items()), None

    def _ended(self, now: float) -> None:
        """Say what a phase that was spoken of has taken; of the way to the first step `first_step` tells."""
        if of(self._at[0], self._at[1], self._pace.steps <= 1) == self._said:
            return
        with self._lock:
            if self._early is None and not self._end.is_set():
                say(f"{self._said}: took {now - self._said_from:.1f} s")
                self._shown = now
            self._said = ""

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            with self._lock:
                if self._end.is_set():
                    return
                self.look()

    def look(self) -> None:
        """Say what is to be said now."""
        (phase, step, since), now = self._at, self._clock()
        stepping = phase in STEP or phase == INPUT and step >= 0
        self._pace.look(step, now, stepping)
        limit_s = SILENT_S
        if stepping and self._pace.steps > 1:
            limit_s = max(SILENT_S, STEPS * self._pace.longest_s)
        silent = now - max(self._shown, self._pace.moved) > limit_s
        doing, wait = of(phase, step, self._pace.steps <= 1), pulse.own_wait()
        what = f"{doing}, waiting for other ranks" if wait else doing
        if self.line is not None:
            goes_on = bool(self.line.doing) and now - since > 1
            self.line.say(f"{what}  {clock(now - since)}" if silent or goes_on else "")
        else:
            self._plain(doing, what, since, now, silent)

    def _plain(self, doing: str, what: str, since: float, now: float, silent: bool) -> None:
        age_s = now - since
        if self._said:
            silent = age_s >= self._next_s
        if silent and age_s >= 1.0:
            say(f"{what}: {int(age_s)} s so far")
            self._said_from = self._said_from if self._said else since
            self._said, self._shown = doing, now
            self._next_s = next((s for s in AGAIN_S if s > age_s), age_s + AGAIN_S[-1])
            if self._at[2] != since:  # the run's thread has gone on meanwhile, and saw nothing said
                self._said = ""


class _Pace:
    """Duration of steps, as seen twice a second; ``moved``: when a new step was seen last, 0: never."""

    def __init__(self) -> None:
        self.steps = 0
        self.moved = self.longest_s = 0.0
        self._step, self._since = -1, 0.0

    def look(self, step: int, now: float, stepping: bool) -> None:
        """Take note of the number of the step under way; time in which no step is under way counts for none."""
        if step > self._step:
            if self.steps > 1:
                self.longest_s = max(self.longest_s, (now - self._since) / (step - self._step))
            self.moved = now if self.steps else 0.0  # the first number is that of a step to come
            self.steps += 1
            self._step, self._since = step, now
        elif not stepping:
            self._since = now


STEP = ("backward and exchange", "vote", "update")
INPUT = "data"

_PHASES = {
    "start": "starting",
    "claiming devices": "starting",
    "MPI": "starting MPI",
    "Horovod": "starting Horovod",
    "model": "loading the framework and building the model",
    "data": "reading the data",
    "split": "partitioning the model over devices",
    "transforms": "preparing the model",
    "first sample": "trying the first sample",
    "exchange": "preparing the gradient exchange",
    "remat": "choosing blocks for activation checkpointing",
    "resume": "looking for a checkpoint",
    "restore": "restoring a checkpoint",
    "probe": "measuring each rank's speed",
    "memory": "measuring memory",
    "evaluation": "evaluating",
    "saving": "saving a checkpoint",
    "export": "writing the final model",
    "the completion record": "writing the final record",
    "out": "creating the run's directory",
}
_EVENTS = re.compile(r"([a-z_]+) of (\w+)")


def of(phase: str, step: int, first: bool) -> str:
    """Return what a rank does in ``phase``, during or after ``step`` (-1: none yet); ``first``: of those it makes."""
    if phase in STEP:
        return "first step" if first else f"step {step + 1}"
    if phase == INPUT and step >= 0:
        return "waiting for the first batch" if first else "waiting for the next batch"
    found = _EVENTS.fullmatch(phase)
    if found is None:
        return _PHASES.get(phase, phase)
    event, callback = found.groups()
    return pulse.doing.get(phase, f"{event.replace('_', ' ')} of {callback}")
