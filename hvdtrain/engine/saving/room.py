"""Make room on a full disk for what a run writes at its end.

Owns the order: older checkpoints go, the oldest first and never the newest whole one, then the run waits. What is
written where after that is the caller's.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.checkpoint.store import CheckpointStore
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.terminal import say

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run

WAITS_S = (2.0, 8.0, 20.0, 30.0)
"""How long a run waits between attempts for somebody to free space; about a minute in all."""

TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "not enough space for a checkpoint")


def is_full(error: str) -> bool:
    """Return whether a message says that a disk or a quota has no room left."""
    return any(text in error for text in TEXTS)


def of_disk(error: str) -> bool:
    """Return whether a message is of the file system, not of what was to be written."""
    return "[Errno " in error or is_full(error)


class Room:
    """Make room before each further attempt: rank 0 removes a checkpoint, or waits."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waits_s = [min(wait_s, run.config.control_timeout_s / 4) for wait_s in WAITS_S]

    def made(self, error: str) -> bool:
        """Return whether another attempt is worth it after ``error``, the same on every rank; collective."""
        return is_full(error) and bool(self._run.control.bcast(self._make() if self._run.control.rank == 0 else False))

    def _make(self) -> bool:
        try:
            # Not by checkpoints of later steps, which a run that goes on from an earlier one does not have.
            reached = self._run.state.cursor.step + 1
            dropped = CheckpointStore(RunDirectory(self._run.out).checkpoints, 1).drop_oldest(reached)
        except OSError:  # what cannot be removed gives no room
            dropped = None
        if dropped is not None:
            self._note(f"the disk of {self._run.out} is full: the oldest checkpoint, {dropped.name}, was removed")
            return True
        if not self._waits_s:
            return False
        wait_s = self._waits_s.pop(0)
        say(f"note: the disk of {self._run.out} is full: trying again in {wait_s:.0f} s")
        pulse.at("waiting for room on the disk")
        time.sleep(wait_s)
        return True

    def _note(self, text: str) -> None:
        self._run.notes.append(text)
        say(f"note: {text}")
