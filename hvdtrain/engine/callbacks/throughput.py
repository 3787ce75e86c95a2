"""Global samples per second over the last steps, for those who report it."""

from __future__ import annotations

import time
from collections import deque

from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class Throughput(Callback):
    """Sets ``run.state.samples_per_s`` from a window of ``window`` steps (wall time, evaluation left out)."""

    def __init__(self, window: int = 50) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def epoch_start(self, run: Run) -> None:
        """Begin a window: what lies between epochs is not training."""
        self._marks.clear()
        self._marks.append((time.perf_counter(), run.timeline.totals.samples))

    def step_end(self, run: Run) -> None:
        """Measure."""
        self._marks.append((time.perf_counter(), run.timeline.totals.samples))
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        if t1 > t0:
            run.state.samples_per_s = (n1 - n0) / (t1 - t0)
