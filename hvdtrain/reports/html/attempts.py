"""A run's attempts: each start of it, by its own log and by its supervisor's history.

Owns which records belong to which attempt, and why each ended as far as somebody has written it down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.reports.ends.words import SILENT
from hvdtrain.reports.html.reading import Event, Log
from hvdtrain.reports.html.words import cut, number, whole

FAULTS = {
    "user": "a mistake in what was given", "exception": "an exception", "oom": "memory ran out",
    "non_finite": "the loss was not finite", "disk": "the disk", "lost": "a rank was lost", "hang": "a rank hung",
    "unreachable": "a host did not answer", "interrupted": "it was interrupted", "requeue": "its job's time was over",
    "echo": "another rank's end", "done": "it was done", "silent": "rank 0 fell silent",
}
"""Kinds of causes (`hvdtrain.cluster.liveness.causes`) in words."""


ENDED = re.compile(r"rank (\d+) on (?:host )?(\S+), ended(?:, in step (\d+))?(?:, phase '([^']+)')?[^:]*: "
                   r"(?:its process )?(.+)", re.DOTALL)
"""How a supervisor tells of a rank whose process is gone (`hvdtrain.cluster.launchers`)."""


@dataclass
class Attempt:
    """One start of a run. Times are unix seconds; steps -1 and ``rank`` -1: not known.

    ``trained_s``: when training began in it, NaN where it never did; ``seen_s``: of its last record. ``cause``: ""
    where nobody wrote down why it ended. ``parts``: seconds of its start and end by part, as the supervisor found them.
    """

    begin_s: float
    end_s: float
    number: int = 0
    order: int = 0
    ranks: int = 0
    step_begin: int = -1
    step_end: int = -1
    trained_s: float = math.nan
    seen_s: float = math.nan
    cause: str = ""
    words: str = ""
    rank: int = -1
    host: str = ""
    lost: int = 0
    decision: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def ended_well(self) -> bool:
        """Whether it came to the end it was meant to come to."""
        return self.cause in ("done", "requeue")

    @property
    def fault_s(self) -> float:
        """When what ended it badly happened: before its supervisor noticed it, as far as that is known."""
        notice_s = self.parts.get("notice", 0.0)
        found = self.end_s - notice_s - self.parts.get("kill", 0.0) if notice_s > 0 else self.end_s
        return max(self.begin_s, found)

    @property
    def fault(self) -> str:
        """Why it ended, in a few words."""
        return FAULTS.get(self.cause, self.cause)


def find(log: Log, history: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return a run's attempts in order of time, numbered from 1."""
    found = [_of_history(row) for row in history]
    for event in log.all("start"):
        own = next((one for one in found if not one.order and one.begin_s <= event.time_s <= one.end_s), None)
        if own is None:
            own = Attempt(event.time_s, event.time_s)
            found.append(own)
        own.order, own.trained_s = event.order, event.time_s
        own.ranks = own.ranks or whole(event.values.get("world_size"), 0)
        own.step_begin = event.step
    for one in found:
        if one.order:
            _fill(one, log)
    found.sort(key=lambda one: one.begin_s)
    for i, one in enumerate(found):
        one.number = i + 1
        later = found[i + 1].step_begin if i + 1 < len(found) and found[i + 1].order else -1
        if not one.lost and later >= 0 and not one.ended_well:
            one.lost = max(0, one.step_end - later)
    return found


def _of_history(row: Mapping[str, Any]) -> Attempt:
    """A supervisor's line about an attempt that has ended."""
    seconds = row.get("seconds") if isinstance(row.get("seconds"), dict) else {}
    assert isinstance(seconds, dict)
    begin_s, ran_s = number(row.get("time")), number(seconds.get("ran"))
    return Attempt(begin_s, begin_s + (ran_s if ran_s >= 0 else 0.0), ranks=whole(row.get("ranks"), 0),
                   step_begin=whole(row.get("step_start")), step_end=whole(row.get("step_end")),
                   cause=str(row.get("cause") or ""), words=plain(cut(row.get("words") or "")),
                   rank=whole(row.get("rank")),
                   host=str(row.get("host") or ""), lost=whole(row.get("steps_lost"), 0),
                   decision=cut(row.get("decision") or ""),
                   parts={name: number(value) for name, value in seconds.items() if name != "ran"})


def plain(words: str) -> str:
    """Return a supervisor's words about a process that is gone as one clear sentence; all others as they are.

    >>> plain("rank 2 on host h, ended, in step 8, phase 'backward' since 1 s: its process has ended without a word.")
    'rank 2 on h ended without a message in step 8, while in backward'
    """
    found = ENDED.fullmatch(words)
    if found is None:
        return words
    rank, host, step, phase, how = found.groups()
    how = how.rstrip(".").replace("has ended without a word", "ended without a message")
    where = (f" in step {int(step):,}" if step else "") + (f", while in {phase}" if phase else "")
    return f"rank {rank} on {host} {how}{where}"


def _fill(one: Attempt, log: Log) -> None:
    """Take from the log where an attempt ended and, where no supervisor says it, why."""
    events = [event for event in log.events if event.order == one.order]
    steps = log.steps["order"] == one.order
    times = [event.time_s for event in events] + ([float(log.steps["time"][steps][-1])] if steps.any() else [])
    one.seen_s = max((t for t in times if math.isfinite(t)), default=one.begin_s)
    if not one.decision:  # else a supervisor has seen it end
        one.end_s = max(one.end_s, one.seen_s)
    first = next((event for event in events if event.name == "seconds"), None)
    before_s = first.time_s - number(first.values.get("window_s")) if first is not None else math.nan
    if before_s < one.begin_s and not one.parts:  # a first window begins with the process; no supervisor knows better
        one.begin_s = before_s
    last = [event.step for event in events] + ([int(log.steps["step"][steps][-1])] if steps.any() else [])
    one.step_end = max(one.step_end, *last, one.step_begin)
    if not one.cause:
        _why(one, events)


def _why(one: Attempt, events: Sequence[Event]) -> None:
    """The cause in the attempt's own records; "" where it has none."""
    for event in reversed(events):
        if event.name == "end":
            stop = cut(event.values.get("stop") or "")
            one.cause, one.words = "requeue" if stop.startswith("requeue:") else "done", stop
            return
        if event.name == "failed":
            one.cause, one.words = _kind(error := str(event.values.get("error") or "")), cut(error)
            one.rank = whole(event.values.get("rank"))
            return


def _kind(error: str) -> str:
    """The kind of cause that the words of a "failed" record tell; one of `FAULTS`."""
    return "silent" if error == SILENT else "interrupted" if error.startswith("KeyboardInterrupt") else "exception"
