"""Waits for the moment of a fault: an attempt that is starting, one that trains, one that is writing a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import look
from benchmarks.chaos.job import Job
from benchmarks.chaos.look import Eye, Rank
from benchmarks.chaos.plan import SAVE, START, STEP, Fault

LOOK_S, STEP_LOOK_S = 0.1, 0.002
"""How often processes are looked for, and the step of an attempt that is known: steps may take a few milliseconds."""

SAVE_LOOK_S, SAVE_WAIT_S, IN_SAVE_S = 0.0005, 10.0, 0.003
STEPS = 12
"""Most steps after the first finished one, before a fault between saves."""

FIRST_START_S = 3.0
"""From the first process of an attempt to its first finished step, until that was measured."""


@dataclass
class Attempt:
    """The ranks of one attempt, the eye on its steps, and what was seen: ``begin``, the first ``step`` it finished."""

    ranks: list[Rank]
    eye: Eye
    seen_at: float
    begin: int = -1
    step: int = -1
    gained: bool = False
    moment: str = START


class Aim:
    """Follows one job's attempts. ``trouble``: why `wait` or `end` gave up, "" where the job merely ended."""

    def __init__(self, job: Job, hang_s: float) -> None:
        self._job, self._hang_s = job, hang_s
        self._gone: set[tuple[int, int]] = set()
        self._now: Attempt | None = None
        self._start_s = FIRST_START_S
        self._moved_at = self._looked_at = 0.0
        self._last = -1
        self.trouble = ""

    def forget(self, attempt: Attempt) -> None:
        """Look for other processes from now on: these are of an attempt that is ending."""
        self._gone |= {(rank.pid, rank.born) for rank in attempt.ranks}
        self._now = None

    def wait(self, fault: Fault, out: Path, gone_on: Callable[[float], None]) -> Attempt | None:
        """Return the attempt when the fault's moment has come; None where the job ended before or hangs.

        ``gone_on(now)`` is called when an attempt has finished a step.
        """
        self.trouble, self._moved_at = "", time.monotonic()
        while self._lives(out):
            attempt, now = self._look(gone_on), time.monotonic()
            if attempt is None:
                time.sleep(LOOK_S / 4)
                continue
            if not attempt.gained:
                if fault.moment == START and now >= attempt.seen_at + fault.when * self._start_s:
                    return attempt
                time.sleep(STEP_LOOK_S)
                continue
            attempt.moment = STEP
            if fault.moment == SAVE:
                return self._in_save(fault, attempt, out)
            if attempt.step >= attempt.begin + fault.when * STEPS or fault.moment == START:
                return attempt
            time.sleep(STEP_LOOK_S)
        return None

    def end(self, out: Path, gone_on: Callable[[float], None]) -> bool:
        """Return whether the run came to its end; False where its supervisor ended before or it hangs."""
        self.trouble, self._moved_at = "", time.monotonic()
        while self._lives(out):
            self._look(gone_on)
            time.sleep(LOOK_S / 4)
        return look.completed(out) is not None

    def _lives(self, out: Path) -> bool:
        """Return whether there is a job to be looked at: not complete, its supervisor there, something moving."""
        if look.completed(out) is not None or self._job.status() is not None:
            return False
        if time.monotonic() - self._moved_at > self._hang_s:
            where = "no rank lives" if self._now is None else f"the last step was {self._last}"
            self.trouble = f"a hang: nothing has moved for {self._hang_s:g} s; {where}"
            return False
        return True

    def _look(self, gone_on: Callable[[float], None]) -> Attempt | None:
        """Return the attempt of now, its step noted; None where no new rank lives."""
        now = time.monotonic()
        if self._now is None or not self._now.gained or not all(map(look.alive, self._now.ranks)):
            if now - self._looked_at > LOOK_S:
                self._find()
        attempt = self._now
        if attempt is None:
            return None
        attempt.step = attempt.eye.step()
        if attempt.step != self._last:
            self._last, self._moved_at = attempt.step, time.monotonic()
        if attempt.step >= 0 and not attempt.gained:
            attempt.gained, attempt.begin, now = True, attempt.step, time.monotonic()
            self._find()  # all of its ranks are there now
            self._start_s += (now - attempt.seen_at - self._start_s) / 4
            gone_on(now)
        return self._now

    def _find(self) -> None:
        """Look for the ranks of the newest attempt."""
        found = [rank for rank in self._job.ranks() if (rank.pid, rank.born) not in self._gone]
        newest = max((rank.folder for rank in found), default=None)
        found = [rank for rank in found if rank.folder == newest]
        self._looked_at = time.monotonic()
        if newest is None:
            self._now = None
        elif self._now is not None and self._now.ranks[0].folder == newest:
            self._now.ranks = found
        else:
            self._now, self._moved_at = Attempt(found, Eye(newest), self._looked_at), self._looked_at

    def _in_save(self, fault: Fault, attempt: Attempt, out: Path) -> Attempt:
        """Wait until a checkpoint is being written, and a part of that time more."""
        ends = time.monotonic() + SAVE_WAIT_S
        while time.monotonic() < ends:
            if look.saving(out):
                time.sleep(fault.when * IN_SAVE_S)
                if look.saving(out):
                    attempt.moment = SAVE
                    break
            elif not look.alive(attempt.ranks[0]):
                break
            time.sleep(SAVE_LOOK_S)
        attempt.step = attempt.eye.step()
        return attempt
