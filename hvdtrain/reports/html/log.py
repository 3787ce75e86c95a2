"""Read a run's log.jsonl, whole or torn, of any version and length: records, attempts, and the time breakdown.

Steps are kept as columns of numbers, since there may be millions. A line that is no record is counted and passed over.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.timeline import CAUSES
from hvdtrain.reports.html.words import cut, number, whole
from hvdtrain.reports.survivor import SILENT

COLUMNS = ("loss", "grad_norm", "lr", "samples_per_s", "percent_of_solo", "epoch")
"""What is kept of a "step" record, beside its step and time."""


BEFORE_START = ("environment", "clocks", "note", "memory_fit", "compile", "compression", "balance", "pipeline", "wire")
"""Events that a fit may have recorded before its "start"."""


@dataclass(frozen=True)
class LogRecord:
    """A record but a step's: ``order``: how many "start" records came before it, its own included."""

    name: str
    time_s: float
    step: int
    values: dict[str, Any]
    order: int


@dataclass
class Log:
    """A log: ``events``; ``steps``: column -> numbers [N], also "step", "time", "order"; ``passed``: no records."""

    events: list[LogRecord] = field(default_factory=list)
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    passed: int = 0
    last_phases: dict[str, Any] = field(default_factory=dict)

    def all(self, name: str) -> list[LogRecord]:
        return [event for event in self.events if event.name == name]

    def last(self, name: str) -> dict[str, Any]:
        """Return the values of the latest event of that name; {} without one."""
        return next((event.values for event in reversed(self.events) if event.name == name), {})


def read(path: Path) -> Log:
    """Read the log at ``path``; an empty one where there is none. OSError where it cannot be read."""
    log, rows, order = Log(), array("d"), 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        file = None
    if file is not None:
        with file:
            for line in file:
                record = _record(line)
                if record is None:
                    log.passed += bool(line.strip())
                    continue
                name, time_s, step = (
                    record.pop("event"),
                    number(record.pop("time", None)),
                    whole(record.pop("step", None), 0),
                )
                if name == "start":
                    order += 1
                    _belongs(log.events, step, order)
                if name != "step":
                    log.events.append(LogRecord(name, time_s, step, record, order))
                    continue
                rows.extend((step, time_s, order))
                rows.extend([one if type(one) is float else number(one) for one in map(record.get, COLUMNS)])
                phases = record.get("phases_s")
                log.last_phases = phases if isinstance(phases, dict) else log.last_phases
    table = np.frombuffer(rows, dtype=float).reshape(-1, 3 + len(COLUMNS)) if rows else np.zeros((0, 3 + len(COLUMNS)))
    table = np.where(np.isfinite(table), table, np.nan)
    log.steps = {name: table[:, i] for i, name in enumerate(("step", "time", "order", *COLUMNS))}
    return log


def _belongs(events: list[LogRecord], step: int, order: int) -> None:
    """Give what a new process has recorded before its "start", at the step it continues from, to its own attempt."""
    for i in range(len(events) - 1, -1, -1):
        if events[i].name not in BEFORE_START or events[i].step != step:
            return
        events[i] = replace(events[i], order=order)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


FAULTS = {
    "user": "an error in the input", "exception": "an exception", "oom": "out of memory",
    "non_finite": "the loss was not finite", "disk": "the disk", "lost": "a rank was lost", "hang": "a rank hung",
    "unreachable": "a host did not answer", "interrupted": "interrupted", "requeue": "the job's time limit was reached",
    "echo": "the failure of another rank", "done": "completed", "silent": "rank 0 ended without a message",
}
"""Text of each kind of cause (`hvdtrain.cluster.liveness.causes`)."""


ENDED = re.compile(r"rank (\d+) on (?:host )?(\S+), ended(?:, in step (\d+))?(?:, phase '([^']+)')?[^:]*: "
                   r"(?:its process )?(.+)", re.DOTALL)
"""How a supervisor tells of a rank whose process is gone (`hvdtrain.cluster.launchers`)."""


@dataclass
class RunAttempt:
    """A start of a run. Times are unix seconds; steps -1 and ``rank`` -1: not known.

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
        """Return whether it ended as intended."""
        return self.cause in ("done", "requeue")

    @property
    def fault_s(self) -> float:
        """Return the time of the failure: before the supervisor noticed it, as far as that is known."""
        notice_s = self.parts.get("notice", 0.0)
        found = self.end_s - notice_s - self.parts.get("kill", 0.0) if notice_s > 0 else self.end_s
        return max(self.begin_s, found)

    @property
    def fault(self) -> str:
        """Return the cause of its end in a few words."""
        return FAULTS.get(self.cause, self.cause)


def find(log: Log, history: Sequence[Mapping[str, Any]]) -> list[RunAttempt]:
    """Return a run's attempts in order of time, numbered from 1."""
    found = [_of_history(row) for row in history]
    for event in log.all("start"):
        own = next((one for one in found if not one.order and one.begin_s <= event.time_s <= one.end_s), None)
        if own is None:
            own = RunAttempt(event.time_s, event.time_s)
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


def _of_history(row: Mapping[str, Any]) -> RunAttempt:
    seconds = row.get("seconds") if isinstance(row.get("seconds"), dict) else {}
    assert isinstance(seconds, dict)
    begin_s, ran_s = number(row.get("time")), number(seconds.get("ran"))
    return RunAttempt(begin_s, begin_s + (ran_s if ran_s >= 0 else 0.0), ranks=whole(row.get("ranks"), 0),
                   step_begin=whole(row.get("step_start")), step_end=whole(row.get("step_end")),
                   cause=str(row.get("cause") or ""), words=plain(cut(row.get("words") or "")),
                   rank=whole(row.get("rank")),
                   host=str(row.get("host") or ""), lost=whole(row.get("steps_lost"), 0),
                   decision=cut(row.get("decision") or ""),
                   parts={name: number(value) for name, value in seconds.items() if name != "ran"})


def plain(words: str) -> str:
    """Return a supervisor's words about a process that is gone as one clear sentence; all others as they are.

    >>> plain("rank 2 on host h, ended, in step 8, phase 'backward': its process has ended without a message.")
    'rank 2 on h ended without a message in step 8, while in backward'
    """
    found = ENDED.fullmatch(words)
    if found is None:
        return words
    rank, host, step, phase, how = found.groups()
    how = how.rstrip(".").replace("has ended without a ", "ended without a ").replace("a word", "a message")
    where = (f" in step {int(step):,}" if step else "") + (f", while in {phase}" if phase else "")
    return f"rank {rank} on {host} {how}{where}"


def _fill(one: RunAttempt, log: Log) -> None:
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


def _why(one: RunAttempt, events: Sequence[LogRecord]) -> None:
    """Take the cause from the attempt's own records, where they have one."""
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
    silent = error.startswith(SILENT.partition(" message")[0])  # logs of releases before 0.2 have "without a word"
    return "silent" if silent else "interrupted" if error.startswith("KeyboardInterrupt") else "exception"


USEFUL = ("compute", "update")
"""Causes that are training itself; all others are overhead."""

UNRECORDED = "the time between the last record and a kill, and process shutdown"
"""Time that no record covers."""

OF_METER = {"data_s": "input", "compute_s": "compute", "wait_s": "wait", "update_s": "update"}
OF_PHASES = {"data": "input", "compute": "compute", "wait": "wait", "update": "update"}


@dataclass
class TimeBreakdown:
    """``ranks``: rank -> cause -> seconds; ``windows``: (unix seconds at its end, its seconds, cause -> seconds of all
    ranks, rank -> cause -> seconds); ``waits``: (who waited, for whom) -> seconds.

    ``basis``: "seconds": whole times by cause; "meter": mean steps only, waiting and wire in one; "phases": those of
    rank 0; "": nothing is known. ``sampled``: whether `waits` are known for a part of the waiting only.
    """

    ranks: dict[int, dict[str, float]] = field(default_factory=dict)
    windows: list[tuple[float, float, dict[str, float], dict[int, dict[str, float]]]] = field(default_factory=list)
    waits: dict[tuple[int, int], float] = field(default_factory=dict)
    basis: str = ""

    @property
    def total(self) -> dict[str, float]:
        """Seconds of all ranks by cause."""
        return summed(self.ranks.values())

    @property
    def all_s(self) -> float:
        """Seconds of all ranks and causes."""
        return math.fsum(self.total.values())

    def part(self, *causes: str) -> float:
        """Percent of all seconds that went to ``causes``; NaN without any."""
        total = self.total
        return 100.0 * sum(total.get(cause, 0.0) for cause in causes) / self.all_s if self.all_s > 0 else math.nan

    def after_start(self, *causes: str) -> float:
        """Percent of the seconds after the start that went to ``causes``; NaN without any."""
        total = self.total
        rest = self.all_s - total.get("start", 0.0)
        return 100.0 * sum(total.get(cause, 0.0) for cause in causes) / rest if rest > 0 else math.nan

    def held_up(self) -> dict[int, float]:
        """Seconds that the others waited for each rank, most first."""
        held: dict[int, float] = defaultdict(float)
        for (_, awaited), seconds in self.waits.items():
            held[awaited] += seconds
        return dict(sorted(held.items(), key=lambda item: -item[1]))


def add_up(log: Log) -> TimeBreakdown:
    """Add up what a log tells of seconds."""
    spent = TimeBreakdown()
    for event in log.all("seconds"):
        rows = by_rank(event.values.get("ranks"))
        for rank, row in rows.items():
            own = spent.ranks.setdefault(rank, dict.fromkeys(CAUSES, 0.0))
            for cause, seconds in row.items():
                own[cause] = own.get(cause, 0.0) + seconds
        spent.windows.append((event.time_s, number(event.values.get("window_s")), summed(rows.values()), rows))
        waits = event.values.get("waits")
        for row in waits if isinstance(waits, list) else ():
            if isinstance(row, list) and len(row) == 3 and all(number(one) >= 0 for one in row):
                pair = (int(number(row[0])), int(number(row[1])))
                if pair[0] != pair[1]:  # alike: it is not known for whom
                    spent.waits[pair] = spent.waits.get(pair, 0.0) + number(row[2])
    if spent.ranks:
        spent.basis = "seconds"
    else:
        _of_older(spent, log)
    return spent


def by_rank(rows: Any) -> dict[int, dict[str, float]]:
    """Read "by rank, cause -> seconds" as a list or as a mapping; what is no number counts as 0."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(rows, list):
        pairs = enumerate(rows)
    elif isinstance(rows, dict):
        pairs = ((int(key), row) for key, row in rows.items() if str(key).isdigit())
    return {rank: {str(name): max(0.0, number(value)) for name, value in row.items() if number(value) >= 0}
            for rank, row in pairs if isinstance(row, dict)}


def summed(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add rows by cause, in the causes' order."""
    total = dict.fromkeys(CAUSES, 0.0)
    for row in rows:
        for cause, seconds in row.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def _of_older(spent: TimeBreakdown, log: Log) -> None:
    """Read the meter's mean step, else rank 0's phases."""
    meter = log.last("meter")
    rows = by_rank(meter.get("ranks"))
    if rows:
        spent.basis = "meter"
        spent.ranks = {
            rank: {cause: row.get(key, 0.0) for key, cause in OF_METER.items()} for rank, row in rows.items()
        }
    elif log.last_phases:
        spent.basis = "phases"
        phases = by_rank([log.last_phases]).get(0, {})
        spent.ranks = {0: {cause: phases.get(key, 0.0) for key, cause in OF_PHASES.items()}}
