"""The supervised run under fire: how it is started, again when its supervisor is gone, and what it says."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import look
from benchmarks.chaos.look import Rank
from hvdtrain.core.processes import Child, kill_all, processes

RESTARTS = 1000
"""More than any plan needs: chaos says when it is over."""

_RESUMED = re.compile(rb"resumed at step (\d+)|no checkpoint yet, starting from scratch")
_NOT_USED = re.compile(rb"checkpoint (step-\d+) is not used")


class Job:
    """``launch --restarts`` of one run, again and again.

    ``words``: the training's options without --out. ``launch``: options of the launch but its hosts. ``before``: what
    runs the supervisor. ``hostfile`` is written again before each attempt: the supervisor reads it at each restart.
    """

    def __init__(self, work: Path, host: str, launch: Sequence[str], words: Sequence[str],
                 before: Sequence[str] = ()) -> None:
        self._host, self._launch, self._words, self._before = host, list(launch), list(words), list(before)
        self._work, self.out, self.log = work, work / "run", work / "run.log"
        self._hosts = work / "hosts"
        self._child: Child | None = None
        self.mark = ""
        self.supervisors = 0

    def at(self, out: Path) -> None:
        """Train in ``out`` from the next start on."""
        self.out, self.log = out, out.with_suffix(".log")

    def hosts(self, ranks: int) -> None:
        """Say how many ranks the next attempt has, in one rename, since a supervisor may be reading."""
        temp = self._hosts.with_suffix(".new")
        temp.write_text(self.listed(ranks))
        os.replace(temp, self._hosts)

    def listed(self, ranks: int) -> str:
        """Return the host file for so many ranks."""
        return f"{self._host} slots={ranks}\n"

    def start(self, ranks: int, shares: Sequence[int]) -> None:
        """Start a supervisor; the one before has ended."""
        self.end()
        self.hosts(ranks)
        even = len(set(shares)) <= 1
        command = [*self._before, sys.executable, "-m", "hvdtrain", "launch", "--restarts", str(RESTARTS), "--hostfile",
                   str(self._hosts), *self._launch, "--", "train", *self._words, "--out", str(self.out),
                   "--resume", "auto", *(() if even else ("--shares", ":".join(map(str, shares))))]
        with self.log.open("ab") as log:
            self._child = Child(command, dict(os.environ), stdout=log, stderr=log)
        self.mark, self.supervisors = self._child.mark, self.supervisors + 1

    @property
    def supervisor(self) -> int:
        """Process id of the supervisor."""
        assert self._child is not None
        return self._child.process.pid

    def status(self) -> int | None:
        """Return the supervisor's exit status; None while it runs, and 0 where none was started."""
        return 0 if self._child is None else self._child.process.poll()

    def ranks(self) -> list[Rank]:
        """Living ranks."""
        return look.ranks(self.mark) if self.mark else []

    def left(self) -> list[int]:
        """Return processes of a job whose supervisor has ended."""
        return processes(self.mark) if self.mark else []

    def end(self) -> None:
        """End what runs."""
        if self._child is not None:
            self._child.end()
            kill_all(self.mark)
            self._child = None

    # --- what it said ------------------------------------------------------------------------------------------------

    def said(self, since: int = 0) -> bytes:
        """Return the output after the first ``since`` bytes."""
        try:
            with self.log.open("rb") as log:
                log.seek(since)
                return log.read()
        except OSError:
            return b""

    def said_bytes(self) -> int:
        """Return the size of the output so far."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def resumed(self, since: int) -> int | None:
        """Return the step that the last attempt resumed at, by its output after ``since``; 0: again, None: unknown."""
        found = _RESUMED.findall(self.said(since))
        return int(found[-1] or 0) if found else None

    def refused(self) -> set[str]:
        """Names of the checkpoints that were said not to be whole."""
        return {name.decode() for name in _NOT_USED.findall(self.said())}
