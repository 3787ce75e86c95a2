"""Decides when a checkpoint is due and has it written: every N steps, every so many seconds, at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hvdtrain.callbacks.base import Callback
from hvdtrain.checkpoint.session import save
from hvdtrain.config import Checkpoint as Settings
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.run import Run


class Checkpoint(Callback):
    """Saves on all ranks, because each has state of its own in a checkpoint; rank 0 writes."""

    where = "all"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failed = self._in_a_row = 0
        self._told_again = False
        self._clock = time.monotonic()

    def fit_start(self, run: Run) -> None:
        """Count seconds from here."""
        self._clock = time.monotonic()

    def step_end(self, run: Run) -> None:
        """Ask for a checkpoint where one is due."""
        s = self._settings  # steps are the same on all ranks; the clock is rank 0's, whose wish goes through the vote
        if s.every_steps and run.state.cursor.step % s.every_steps == 0:
            run.state.save_due = True
        if s.every_s and run.control.rank == 0 and time.monotonic() - self._clock >= s.every_s:
            run.want_save()

    def checkpoint(self, run: Run) -> None:
        """Save; a failure is told once and counted, and the run goes on, since the checkpoints before are whole."""
        self._clock = time.monotonic()
        run.state.wants_save = False  # wished for again between the vote and this save
        error = save(run)
        if error and not self._failed:
            run.note(f"step {run.state.cursor.step}: checkpoint not written ({error}); training goes on, "
                     "earlier ones are kept, and further failures are counted")
        if error:
            self._failed, self._in_a_row = self._failed + 1, self._in_a_row + 1
        elif self._in_a_row:
            self._written_again(run)

    def _written_again(self, run: Run) -> None:
        """Say the first time that a checkpoint was written after some that were not."""
        if not self._told_again:
            run.note(f"step {run.state.cursor.step}: checkpoints are written again, after {self._in_a_row} that failed")
        self._in_a_row, self._told_again = 0, True

    def fit_end(self, run: Run) -> None:
        """Save for the last time, where a failure is an error; say how many have failed."""
        if self._failed:
            last = f", the last {self._in_a_row} in a row" if self._in_a_row else ""
            run.note(f"{self._failed} checkpoints could not be written{last}")
        if run.begun and self._settings.at_end and run.state.cursor.step > 0:
            error = save(run)
            if error:
                raise UserError(f"the last checkpoint could not be written: {error}", "a writable directory with room",
                                "free space and resume from the checkpoint before")
