"""Has the page of a run written by a process beside this one, for a supervisor that must not wait. Standard library."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from hvdtrain.core import RunFiles
from hvdtrain.reports.ends.survivor import NICE, command

FINISH_S = 10.0
"""How long the page of a run's end is waited for, when everything else is over."""


class Writer:
    """Writes pages of one run, one at a time; none of it raises."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, out: Path) -> None:
        """Begin to write the page of the run in ``out``; one that is still being written is given up for it."""
        self.end(0.0)
        with contextlib.suppress(OSError):
            if (out / RunFiles.LOG).exists():  # else it is no run of ours
                # The job that starts again comes first: hence the preexec_fn.
                self._child = subprocess.Popen(command(out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                               stderr=subprocess.DEVNULL, start_new_session=True,
                                               preexec_fn=lambda: os.nice(NICE))

    def end(self, wait_s: float = FINISH_S) -> None:
        """Return when the page is written; after ``wait_s`` it is given up."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
