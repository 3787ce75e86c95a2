"""Limits of a run by time and by the budget of its hosts, and the time that saving and ending need before them.

Owns the estimates of a step, an evaluation, a save and the end of the process. Signals and the request to the other
ranks are left to `hvdtrain.engine.callbacks.preempt`.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque

from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import causes
from hvdtrain.config import Config, inventory
from hvdtrain.config.texts import ends_s, reserve_s
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.terminal import say
from hvdtrain.engine.callbacks.eval_steps import evaluates_epoch, evaluates_step
from hvdtrain.engine.run import Run

KEPT_STEPS = 64
"""Latest steps of which the longest counts: the first ones trace and allocate."""

PROBE_AT = 0.5
"""Fraction of the time to the limit after which a run that has never saved does, to learn how long a save takes."""


_trained = threading.Event()
"""Set by the first step of this process: what has passed since its begin is then more than a start."""


class RunLimit:
    """The moment at which the job has to be over; ``ends_at``: unix seconds, 0 without a limit.

    ``limit_s``: its length, for the reserve before the first save. ``what``: names the limit in messages. ``whole``: a
    job that begins again has ``limit_s``; of a scheduler's limit only what was left at the begin of this process is
    known.
    """

    def __init__(self, ends_at: float = 0.0, limit_s: float = 0.0, what: str = "time limit", whole: bool = True
                 ) -> None:
        self.ends_at, self.limit_s, self.what, self.whole = ends_at, limit_s, what, whole
        self.begun_at = self.start_s = self.save_s = self.evaluation_s = 0.0
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)
        self._first_s, self._ends_s = 0.0, ends_s(0.0, limit_s)
        self._apart = self._most_apart = 0

    def begin(self, now: float, start_s: float, ranks: int) -> None:
        """Begin a fit of so many ``ranks``; ``start_s``: how long the process has lasted."""
        self.begun_at, self.start_s, self._ends_s = now, start_s, ends_s(start_s, self.limit_s, ranks)
        self._steps.clear()
        self._first_s = 0.0

    def step(self, seconds: float, met: bool) -> None:
        """Count a step; ``met``: the ranks agreed in it, so that all would have heard of a wish to end."""
        _trained.set()
        if self._first_s:
            self._steps.append(seconds)
        self._first_s = self._first_s or seconds
        self._apart = 0 if met else self._apart + 1
        self._most_apart = max(self._most_apart, self._apart)

    @property
    def step_s(self) -> float:
        """Return the longest of the latest steps; half of the first one, which traces, where there is no other."""
        return max(self._steps, default=self._first_s / 2)

    def needed_s(self, run: Run) -> float:
        """Return how long before the end the ranks have to hear that they are to save and end."""
        saver = run.saver
        save_s = max(self.save_s, saver.spent.longest_s if saver is not None else 0.0)
        reserve = reserve_s(self.limit_s, save_s, (2 + self._most_apart) * self.step_s + self._ends_s)
        # Rank 0's wish is heard in the next step, which an evaluation may follow: nothing ends that one early.
        return reserve + self._evaluation_s(run) if self._evaluates_next(run) else reserve

    def impossible(self, run: Run) -> UserError | None:
        """Return the error where even a job that begins with this limit has no time for a step and a save, or None."""
        needed_s = self.needed_s(run)
        too_long = self.start_s + needed_s >= self.limit_s and self.whole and not _trained.is_set()
        return too_short(self.what, self.limit_s, self.start_s, needed_s) if too_long else None

    def probes(self, run: Run, now: float) -> bool:
        """Return whether a save is to be made now, to learn how long one takes."""
        saver = run.saver
        known = self.save_s or saver is not None and (saver.spent.saves or saver.busy())
        return not known and now - self.begun_at > PROBE_AT * (self.ends_at - self.begun_at)

    def _evaluates_next(self, run: Run) -> bool:
        cursor, config = run.state.cursor, run.config
        if not run.eval_feeds:
            return False
        left = run.feed.steps_left(cursor)
        # Of a stream nobody knows the end.
        ends = left is None or left <= 1 + self._most_apart
        within = any(evaluates_step(config, cursor.step + n) for n in range(1, 2 + self._most_apart))
        return within or ends and evaluates_epoch(config, cursor.epoch + 1)

    def _evaluation_s(self, run: Run) -> float:
        """Return the seconds of an evaluation: the longest so far, else those of as many samples in training."""
        if self.evaluation_s:
            return self.evaluation_s
        samples = sum(feed.samples or 0 for feed in run.eval_feeds.values())
        step_s = statistics.median(self._steps) if self._steps else self._first_s
        return self._first_s + step_s * samples / run.config.global_batch  # the first one traces, too


def too_short(what: str, limit_s: float, start_s: float, needed_s: float) -> UserError:
    """Return the error of a limit that a start of so many seconds, and the end of a job, exceed."""
    used = f"a {what} of {limit_s:.3g} s, of which the start took {start_s:.1f} s and the end needs {needed_s:.1f} s"
    return UserError(used, f"more than {start_s + needed_s:.0f} s", f"raise the {what.partition(' of ')[0]}")


def check_start(config: Config, control: Control) -> None:
    """Raise `UserError` on all ranks once the start has used up ``time_limit``, by rank 0's clock; collective.

    After an earlier fit of this process the run ends before its first step instead, to be continued.
    """
    if limit_s := config.time_limit_s():
        start_s = control.bcast(0.0 if _trained.is_set() else time.time() - causes.started_at())
        needed_s = ends_s(start_s, limit_s, control.size)
        if start_s and start_s + needed_s >= limit_s:
            raise too_short("time limit", limit_s, start_s, needed_s)


def limit_of(run: Run) -> RunLimit:
    """Return the limit of ``run``: the earlier one of ``time_limit`` and ``budget``. Collective.

    Errors: `UserError` on every rank for an inventory that lacks the price of a host of the job.
    """
    config = run.config
    limit_s = config.time_limit_s()
    ends_at = causes.ends_at(limit_s)
    begun = float(os.environ.get(causes.STARTED_AT, causes.started_at()))  # the supervisor's, of several attempts
    by_time = RunLimit(ends_at, limit_s or max(0.0, ends_at - begun), whole=limit_s > 0)
    if not config.budget:
        return by_time

    def priced() -> tuple[float, str, float, float]:
        if run.control.rank != 0:
            return 0.0, "", 0.0, 0.0
        found = inventory.read(config.inventory)
        per_hour = sum(found.price_of(host.node) for host in run.topology.hosts)
        return per_hour, found.currency, causes.spent(per_hour / 3600), time.time()

    per_hour, currency, spent, now = run.control.bcast(agreed(run.control, priced, "budget"))
    if not per_hour:
        run.note(f"budget has no effect: the hosts of this job cost nothing in {config.inventory}")
        return by_time
    left_s = (config.budget - spent) / per_hour * 3600
    if run.control.rank == 0 and config.progress != "off":
        say(f"budget: {config.budget:g} {currency} at {per_hour:g} an hour, {spent:.4g} spent so far: the run ends in "
            f"{max(0.0, left_s):.0f} s at the latest")
    by_budget = RunLimit(now + left_s, config.budget / per_hour * 3600, f"budget of {config.budget:g} {currency}")
    return by_budget if not by_time.ends_at or by_budget.ends_at < by_time.ends_at else by_time
