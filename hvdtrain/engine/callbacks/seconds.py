"""Compare the time breakdown of all ranks about every five seconds, by rank 0's clock, and at the end of a fit.

What a rank's seconds are spent on is left to `hvdtrain.core.timeline`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from hvdtrain.cluster import clocks
from hvdtrain.cluster.clocks import Ahead
from hvdtrain.core.timeline import CAUSES, spans
from hvdtrain.core.timeline.spans import Packed, packed
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run

EVERY_S = 5.0

LATER_ROUNDS = 8
"""Of comparing the clocks of several machines again, which drift apart by up to half a millisecond in a second."""

MOST_WAITS = 4
"""Ranks waited for that a record names for each rank."""

TOPIC = "seconds"


class Seconds(Callback):
    """Records "seconds" and "clocks", as the last callback. ``clocks``: of all ranks, compared last."""

    where = "all"

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.clocks: list[Ahead] = []
        self._every_s = every_s
        self._told = dict.fromkeys(CAUSES, 0.0)
        self._from_step = 0
        self._last = time.monotonic()
        self._asked = False

    def fit_start(self, run: Run) -> None:
        self._from_step = run.state.cursor.step
        run.timeline.stood.among(run.control.size)
        self._compare_clocks(run)
        self._record_clocks(run)

    def step_end(self, run: Run) -> None:
        if run.control.rank == 0 and not self._asked and time.monotonic() - self._last >= self._every_s:
            self._asked = True
            run.tell_all(TOPIC, "")

    def told(self, run: Run) -> None:
        if any(word.topic == TOPIC for word in run.state.told):
            self._close(run)

    def fit_end(self, run: Run) -> None:
        if any(clock.within_s for clock in self.clocks):
            self._compare_clocks(run)
            self._record_clocks(run)
        self._close(run)

    def _compare_clocks(self, run: Run, n_rounds: int = clocks.ROUNDS) -> None:
        self.clocks = clocks.compared(run.control, n_rounds=n_rounds)

    def _record_clocks(self, run: Run) -> None:
        run.record("clocks", ranks=[clock._asdict() for clock in self.clocks])

    def _close(self, run: Run) -> None:
        """Bring the ranks' seconds and exchanges together; collective."""
        timeline = run.timeline
        if any(clock.within_s for clock in self.clocks):
            self._compare_clocks(run, LATER_ROUNDS)
        before, self._told = self._told, timeline.clock.seconds()
        spent = {cause: self._told[cause] - before[cause] for cause in CAUSES}
        idle_s, timeline.idle_s = timeline.idle_s, {}
        rows_P = run.control.gather((spent, packed(timeline.stood.take()), idle_s, run.feed.walk.decodes))
        self._asked, self._last = False, time.monotonic()
        if run.control.rank == 0:
            self._record(run, *map(list, zip(*rows_P)))
        self._from_step = run.state.cursor.step

    def _record(self, run: Run, spent_P: list[dict[str, float]], stood_P: Sequence[Packed],
                idle_P: Sequence[dict[int, float]], decodes_P: Sequence[int]) -> None:
        waits = spans.compare(stood_P, [spent["wait"] for spent in spent_P], [c.offset_s for c in self.clocks],
                             max(c.within_s for c in self.clocks))
        for rank, spent in enumerate(spent_P):
            spent["wait"] = float(waits.wait_PP[rank].sum())
            spent["wire"] += float(waits.wire_P[rank])  # beside what went in messages from rank to rank
            spent["compute"] += float(waits.own_P[rank])
        run.record("seconds", from_step=self._from_step, window_s=sum(spent_P[0].values()),
                   ranks=[{cause: round(s, 6) for cause, s in spent.items()} for spent in spent_P],
                   waits=longest(waits.wait_PP), decodes=sum(decodes_P),
                   idles=[[rank, source, round(s, 6)] for rank, own in enumerate(idle_P) for source, s in own.items()])


def longest(wait_PP: np.ndarray, most: int = MOST_WAITS) -> list[list[float]]:
    """Return [rank, for whom, seconds] of the ``most`` ranks that each rank waited for longest, the longest first."""
    found = []
    for rank, wait_P in enumerate(wait_PP):
        ranks = [int(k) for k in np.argsort(-wait_P, kind="stable")[:most] if wait_P[k] > 0]
        found += [[rank, k, round(float(wait_P[k]), 6)] for k in ranks]
    return sorted(found, key=lambda row: -row[2])


class Throughput(Callback):
    """Sets ``run.state.samples_per_s`` from a window of ``window`` steps (wall time, evaluation left out)."""

    def __init__(self, window: int = 50) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def epoch_start(self, run: Run) -> None:
        self._marks.clear()
        self._marks.append((time.perf_counter(), run.timeline.totals.samples))

    def step_end(self, run: Run) -> None:
        self._marks.append((time.perf_counter(), run.timeline.totals.samples))
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        if t1 > t0:
            run.state.samples_per_s = (n1 - n0) / (t1 - t0)

    def eval_end(self, run: Run) -> None:
        """Begin a window: the evaluation may be within an epoch."""
        self.epoch_start(run)
