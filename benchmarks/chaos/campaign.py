"""Goes through a plan of faults against one supervised training, and then lets it come to its end.

Owns the order: wait for the fault's moment, say how many ranks come next, do the harm, see the run continue. A training
that is complete before its last fault is followed by another one, in a directory of its own. Every wait has a bound;
one that runs out is a hang, which ends the campaign.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos import inject, look
from benchmarks.chaos.aim import Aim, Attempt
from benchmarks.chaos.job import Job
from benchmarks.chaos.plan import DISK, FLIP, FREEZE, KILL, LAUNCHER, SUPERVISOR, SURVIVED, Fault
from hvdtrain.core.errors import count

MOST_TRIES = 8
"""Times that a fault is tried which hits no live rank."""

FULL_S = 20.0
"""Bound for the steps that must pass while a disk is full, and for the first save after it."""


class Lost(Exception):
    """A fault from which no restart recovered; the message names it."""


@dataclass
class Outcome:
    """Outcome of a fault: whether it ``hit``, the moment it fell in, and the way back.

    ``seconds``: from the harm to the next finished step, None where another fault came first or it was not measured.
    ``steps_lost``: computed again. ``missed``: tries that found no live rank. ``step``: finished when it fell.
    """

    fault: Fault
    hit: bool = False
    moment: str = ""
    recovered: bool = False
    seconds: float | None = None
    steps_lost: int | None = None
    missed: int = 0
    step: int = -1


@dataclass
class Leg:
    """A training from its start to its completion record."""

    out: Path
    record: dict[str, Any]
    refused: set[str]
    flipped: set[str]


@dataclass
class _Pending:
    """A fault whose run has not gone on yet; ``step``: at work when it fell, ``said``: bytes of the log by then."""

    outcome: Outcome
    at: float
    step: int
    said: int


@dataclass
class Campaign:
    """``every``: steps between saves. ``hang_s``: bound of every wait for a sign of life. ``name``: its trainings'."""

    job: Job
    runs: Path
    every: int
    hang_s: float
    disk: inject.Disk
    say: Callable[[str], None]
    name: str = "run"
    outcomes: list[Outcome] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    trouble: str = ""
    """Why the campaign ended before its plan did; "" if it did not."""

    def __post_init__(self) -> None:
        self._aim = Aim(self.job, self.hang_s)
        self._pending: list[_Pending] = []
        self._flipped: set[str] = set()
        self._ended_supervisor = True

    def run(self, plan: Sequence[Fault], ranks: int, shares: Sequence[int]) -> None:
        """Do every fault of ``plan``, the first attempt having ``ranks`` and ``shares``; then wait for the end."""
        self.job.at(self.runs / f"{self.name}-1")
        world = (ranks, tuple(shares))
        try:
            for fault in plan:
                self._one(fault, *world)
                world = (fault.ranks, fault.shares)
            self._finish(*world)
        except Lost as lost:
            self.trouble = str(lost)
        finally:
            self.job.end()

    # --- one fault ---------------------------------------------------------------------------------------------------

    def _one(self, fault: Fault, ranks: int, shares: Sequence[int]) -> None:
        """Bring one fault about, trying again where it found nobody alive."""
        outcome = Outcome(fault)
        self.outcomes.append(outcome)
        while not outcome.hit and outcome.missed < MOST_TRIES:
            self._running(ranks, shares)
            attempt = self._wait(fault)
            if attempt is None:  # complete before its moment came, or its supervisor is gone: a new start
                outcome.missed += 1
                continue
            outcome.moment, outcome.step = attempt.moment, attempt.step
            pending = _Pending(outcome, time.monotonic(), attempt.step, self.job.said_bytes())
            outcome.hit = self._harm(fault, attempt)
            outcome.missed += not outcome.hit
            self._write("fault", outcome)
            if outcome.hit and fault.kind not in SURVIVED:
                self._aim.forget(attempt)
                self._pending.append(pending)

    def _wait(self, fault: Fault) -> Attempt | None:
        """Return the attempt at the fault's moment; None where there is none any more. What has gone on is noted."""
        attempt = self._aim.wait(fault, self.job.out, self._gone_on)
        if attempt is None and self._aim.trouble:
            raise Lost(self._aim.trouble + self._last_words())
        return attempt

    def _gone_on(self, now: float) -> None:
        """Note that a step was finished: every fault before it is over."""
        for i, one in enumerate(self._pending):
            one.outcome.recovered = True
            at = self.job.resumed(one.said)
            one.outcome.steps_lost = max(0, one.step - at) if one.step >= 0 and at is not None else None
            if i == len(self._pending) - 1:  # those before it were cut short by the next
                one.outcome.seconds = now - one.at
            self._write("went on", one.outcome)
        self._pending = []

    def _write(self, event: str, outcome: Outcome) -> None:
        """Add a line to ``faults.jsonl``."""
        with (self.runs.parent / "faults.jsonl").open("a", encoding="utf-8") as file:
            row = {"time": round(time.time(), 3), "event": event, "run": self.job.out.name, **asdict(outcome)}
            file.write(json.dumps(row) + "\n")

    def _harm(self, fault: Fault, attempt: Attempt) -> bool:
        """Do it; whether it hit."""
        ranks = attempt.ranks
        victim = ranks[int(fault.pick * len(ranks))]
        self.job.hosts(fault.ranks)
        if fault.kind == FREEZE:
            return inject.freeze([victim])
        if fault.kind == DISK:
            return self._full(attempt)
        if fault.kind == FLIP:
            return self._flip(fault, attempt)
        if fault.kind != KILL:
            raise ValueError(f"no such fault: {fault.kind}")
        if fault.target == LAUNCHER:
            return self._with_all(victim.parent, attempt)
        if fault.target == SUPERVISOR:
            self._ended_supervisor = True
            return self._with_all(self.job.supervisor, attempt)
        return inject.kill(victim)

    def _with_all(self, pid: int, attempt: Attempt) -> bool:
        """Kill a process that takes the ranks with it; `Lost` where it leaves one behind."""
        lived = any(map(look.alive, attempt.ranks))
        if inject.kill_process(pid, attempt.ranks):
            return True
        if lived and any(map(look.alive, attempt.ranks)):
            raise Lost(f"ranks outlived the process that started them by {inject.GONE_WITHIN_S:g} s")
        return False

    def _flip(self, fault: Fault, attempt: Attempt) -> bool:
        """Change a bit of the newest checkpoint while nobody can write another, then kill a rank."""
        if look.newest(self.job.out) < 0 or not inject.freeze(attempt.ranks):
            return False
        time.sleep(0.05)  # a stopped process may still be in a call of the system
        name = inject.flip(self.job.out, random.Random(fault.pick))
        self._flipped |= {name} - {""}
        hit = inject.kill(attempt.ranks[int(fault.when * len(attempt.ranks))])
        return bool(name) and hit

    def _full(self, attempt: Attempt) -> bool:
        """Fill the disk for some steps, which must pass, then give the room back and see a checkpoint written.

        The run may write meanwhile: it removes older checkpoints for the next one. The newest must stay.
        """
        if not self.disk.fill(attempt.ranks):
            self.disk.free(attempt.ranks)
            return False
        self._steps(attempt, self.every + 1)  # a save that was all but written is over then
        before = look.newest(self.job.out)
        held = self._steps(attempt, 2 * self.every + 1) and look.newest(self.job.out) >= before
        before = look.newest(self.job.out)
        freed = time.monotonic()
        self.disk.free(attempt.ranks)
        while held and time.monotonic() - freed < FULL_S:
            if look.newest(self.job.out) > before or look.completed(self.job.out):
                self.outcomes[-1].recovered, self.outcomes[-1].seconds = True, time.monotonic() - freed
                self.outcomes[-1].steps_lost = 0
                break
            time.sleep(0.002)
        return held

    @staticmethod
    def _steps(attempt: Attempt, count: int) -> bool:
        """Wait for ``count`` more steps; whether they came within `FULL_S`."""
        goal, ends = attempt.eye.step() + count, time.monotonic() + FULL_S
        while attempt.eye.step() < goal:
            if time.monotonic() > ends or not look.alive(attempt.ranks[0]):
                return False
            time.sleep(0.001)
        return True

    # --- the training ------------------------------------------------------------------------------------------------

    def _running(self, ranks: int, shares: Sequence[int]) -> None:
        """See to it that a supervisor works on a training that is not complete."""
        if look.completed(self.job.out) is not None:
            self._complete()
            self.job.at(self.runs / f"{self.name}-{len(self.legs) + 1}")
            self._ended_supervisor = True
        if self.job.status() is None and self.job.mark:
            return
        if not self._ended_supervisor:
            raise Lost(f"the supervisor ended by itself with status {self.job.status()} and the run is not complete"
                       + self._last_words())
        self._no_process_left()
        self.job.start(ranks, shares)
        self._ended_supervisor = False

    def _no_process_left(self) -> None:
        """`Lost` where a supervisor that was killed leaves processes behind."""
        ends = time.monotonic() + inject.GONE_WITHIN_S
        while left := self.job.left():
            if time.monotonic() > ends:
                raise Lost(f"{count(len(left), 'process', 'processes')} outlived the supervisor by "
                           f"{inject.GONE_WITHIN_S:g} s: {left}")
            time.sleep(0.02)

    def _finish(self, ranks: int, shares: Sequence[int]) -> None:
        """Wait for the training's end."""
        if self.legs and not self._pending and look.completed(self.job.out) is None and not self.job.out.exists():
            return  # the last fault was the last thing to happen to a training that is complete
        while True:
            if look.completed(self.job.out) is None:
                self._running(ranks, shares)
            if self._aim.end(self.job.out, self._gone_on):
                break
            if self._aim.trouble:
                raise Lost(self._aim.trouble + self._last_words())
        self._complete()

    def _complete(self) -> None:
        """Keep what a training that is complete came to."""
        ends = time.monotonic() + self.hang_s
        while self.job.status() is None:
            if time.monotonic() > ends:
                raise Lost(f"the run is complete and its supervisor has not ended {self.hang_s:g} s later")
            time.sleep(0.02)
        self._gone_on(time.monotonic())
        record = look.completed(self.job.out)
        assert record is not None
        self.legs.append(Leg(self.job.out, record, self.job.refused(), self._flipped))
        self._flipped = set()
        self.say(f"{self.job.out.name} is complete after {count(record['steps'], 'step')}, "
                 f"{sum(o.hit for o in self.outcomes)} faults so far")

    def _last_words(self) -> str:
        lines = self.job.said()[-4000:].decode(errors="replace").strip().splitlines()
        return "\n    " + "\n    ".join(lines[-12:])
