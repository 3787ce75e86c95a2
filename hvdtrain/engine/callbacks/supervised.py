"""Tells a supervisor outside of MPI how far a run has come (`hvdtrain.cluster.liveness.causes`); nothing without
one."""

from __future__ import annotations

from hvdtrain.cluster.liveness import causes
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class Supervised(Callback):
    """Runs on all ranks: each keeps its step for its last words, rank 0 writes it down in every step (microseconds)."""

    where = "all"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Under a supervisor."""
        return bool(causes.folder())

    def __init__(self) -> None:
        self._first = True

    def fit_start(self, run: Run) -> None:
        """Say where the run begins."""
        causes.mark("fit", run.state.cursor.step)
        causes.progress(run.state.cursor.step, False)

    def step_end(self, run: Run) -> None:
        """Count the step."""
        causes.progress(run.state.cursor.step, run.control.rank == 0)
        if self._first:
            self._first = False
            causes.mark("step", run.state.cursor.step)
