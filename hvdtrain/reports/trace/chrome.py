"""The file of a trace: Chrome's trace events as JSON, packed by gzip; Perfetto and chrome://tracing open it as it is.

Each rank is a process of it, each of its lanes a thread; numbers of threads are unique, as those of one machine are.
``otherData`` says which steps these are and how far the clocks may be off.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cluster.clocks import bounds, measure
from hvdtrain.core import whole_file
from hvdtrain.core.protocols import Control
from hvdtrain.core.timeline.spans import Span

NAME = "trace.json.gz"
MOST_EVENTS = 300_000
"""Of all ranks together, which are some 45 MB of JSON before it is packed; viewers open that in seconds."""
LONGEST_TEXT = 200
"""Characters of a name or an argument."""
MOST_ROWS = 1000
"""Of one rank, for the numbers of their threads."""


@dataclass
class RankTrace:
    """Trace of one rank: its ``spans`` by its own clock. ``host``: its name. ``dropped``: spans without room.

    ``profiler_within_s``: how far events of the framework's profiler may be off by the rank's own clock.
    """

    host: str
    alignment: Alignment
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    profiler_within_s: float = 0.0


def room(size: int) -> int:
    """Return how many spans each of ``size`` ranks may keep."""
    return max(100, MOST_EVENTS // size)


def events(ranks: Sequence[RankTrace], zero_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks; time is counted from ``zero_s`` of rank 0's clock, in microseconds."""
    for rank, trace in enumerate(ranks):
        pid = rank + 1  # Perfetto takes 0 for the idle process
        yield from _named("process", pid, 0, f"rank {rank} on {trace.host}", rank)
        for row, (lane, spans) in enumerate(rows(trace.spans)[:MOST_ROWS]):
            tid = pid * MOST_ROWS + row
            yield from _named("thread", pid, tid, lane, row)
            for span in spans:
                # Both ends are rounded, not the length: what ends together still does.
                begin_ns, end_ns = (round((trace.alignment.shared_s(t) - zero_s) * 1e9)
                                    for t in (span.begin_s, span.end_s))
                event = {"ph": "X", "name": _short(span.name), "cat": span.cause or "other", "pid": pid, "tid": tid,
                         "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
                if span.args:
                    event["args"] = {key: _short(value) for key, value in span.args.items()}
                yield event


def _named(kind: str, pid: int, tid: int, name: str, index: int) -> list[dict[str, Any]]:
    """Return the metadata events that name a process or thread and say where it stands."""
    return [{"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}},
            {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}]


def _short(value: Any) -> Any:
    """Return a number as it is, anything else as a text of bounded length."""
    return value if isinstance(value, (int, float)) else str(value)[:LONGEST_TEXT]


def write(path: Path, ranks: Sequence[RankTrace], zero_s: float, about: dict[str, Any]) -> int:
    """Write the trace of ``ranks`` to ``path``, whole or not at all; return the number of its events.

    ``about``: goes into the file's ``otherData``, beside each rank's clock. Errors: `OSError`.
    """
    clocks = [{"rank": r, "host": t.host, "within_us": round(t.alignment.within_s * 1e6, 3),
               "ahead_before_us": round(t.alignment.before.offset_s * 1e6, 3),
               "ahead_after_us": round(t.alignment.after.offset_s * 1e6, 3), "dropped": t.dropped,
               "profiler_within_us": round(t.profiler_within_s * 1e6, 3)}
              for r, t in enumerate(ranks)]
    about = {**about, "clock": "rank 0's", "clocks": clocks,
             "clocks_within_us": round(max(t.alignment.within_s for t in ranks) * 1e6, 3)}
    n = 0
    with whole_file(path) as draft, gzip.open(draft, "wt", compresslevel=5, encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        between = "\n"
        for event in events(ranks, zero_s):
            file.write(between + json.dumps(event, separators=(",", ":")))
            between = ",\n"
            n += event["ph"] == "X"
        file.write('\n],"otherData":' + json.dumps(about) + "}\n")
    return n


ORDER = ("step", "main", "queue", "wire", "input", "save")
"""Lanes from top to bottom; others come after these by name."""


def rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return (name, spans) of each row: a lane whose spans overlap is given rows "wire", "wire 2" and so on."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    found = []
    for lane in sorted(lanes, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        for i, row in enumerate(_nesting(lanes[lane])):
            found.append((f"{lane} {i + 1}" if i else lane, row))
    return found


def _nesting(spans: Sequence[Span]) -> list[list[Span]]:
    """Deal ``spans`` to as few rows as the first that takes each, so that those of a row are apart or nested."""
    dealt: list[tuple[list[Span], list[float]]] = []  # a row, and the ends of those of it that are open
    for span in sorted(spans, key=lambda s: (s.begin_s, -s.end_s)):
        for row, open_ends in dealt:
            while open_ends and open_ends[-1] <= span.begin_s:
                open_ends.pop()
            if not open_ends or span.end_s <= open_ends[-1]:
                break
        else:
            row, open_ends = [], []
            dealt.append((row, open_ends))
        row.append(span)
        open_ends.append(span.end_s)
    return [row for row, _ in dealt]


class ClockOffset(NamedTuple):
    """At ``at_s`` of a rank's own clock that was ahead of rank 0's by ``least_s`` at least and ``most_s`` at most."""

    at_s: float
    least_s: float
    most_s: float

    @property
    def offset_s(self) -> float:
        """The middle of what it may be."""
        return (self.least_s + self.most_s) / 2


class Alignment:
    """Turns one rank's clock into rank 0's. ``within_s``: error of `shared_s` from ``before`` to ``after``."""

    def __init__(self, before: ClockOffset, after: ClockOffset) -> None:
        self.before, self.after = before, after
        least_s, most_s = min(before.least_s, after.least_s), max(before.most_s, after.most_s)
        self.within_s = max(max(m.offset_s - least_s, most_s - m.offset_s) for m in (before, after))

    def shared_s(self, own_s: float) -> float:
        """Return rank 0's reading when this rank's was ``own_s``."""
        before, after = self.before, self.after
        span_s = after.at_s - before.at_s
        part = 0.0 if span_s <= 0 else min(max((own_s - before.at_s) / span_s, 0.0), 1.0)
        return own_s - (before.offset_s + part * (after.offset_s - before.offset_s))


SAME = Alignment(ClockOffset(0.0, 0.0, 0.0), ClockOffset(0.0, 0.0, 0.0))
"""Of a rank that reads the same clock as rank 0."""


def clock_name() -> str:
    """Return what tells this process' `time.perf_counter` from others: processes of one kernel read one clock."""
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip(), os.readlink("/proc/self/ns/time")]
    except OSError:
        pass
    return " ".join(parts)


def clocks(control: Control, names_P: Sequence[str], now: Callable[[], float] = time.perf_counter) -> list[ClockOffset]:
    """Return by rank how far its clock is ahead of rank 0's, on every rank.

    ``names_P``: `clock_name` by rank; "" is like no other. Ranks that read one clock share the narrowest bounds, and
    those that read rank 0's have none to measure.
    """
    if all(name and name == names_P[0] for name in names_P):
        return [ClockOffset(now(), 0.0, 0.0)] * control.size
    rounds = measure(control, now)
    read_P = control.gather(now())
    own_P = [bounds(rounds, rank) for rank in range(control.size)]
    found = []
    for rank, name in enumerate(names_P):
        alike = [own_P[r] for r in range(control.size) if r == rank or name and names_P[r] == name]
        least_s, most_s = max(low for low, _ in alike), min(high for _, high in alike)
        if rank == 0 or name and name == names_P[0]:
            least_s = most_s = 0.0
        found.append(ClockOffset(read_P[rank], min(least_s, most_s), max(least_s, most_s)))
    return found


def to_root(control: Control, spans: Sequence[Span], about: dict[str, Any]) -> list[tuple[list[Span], dict[str, Any]]]:
    """Return each rank's ``spans`` and ``about`` by rank, on rank 0; [] elsewhere. No rank holds them but these two."""
    packed = zlib.compress(json.dumps([spans, about], separators=(",", ":")).encode(), 1)
    own = np.frombuffer(packed, np.uint8)
    sizes_P = control.gather(own.size)
    found = []
    for rank, size in enumerate(sizes_P):
        data = own.copy() if rank == control.rank else np.empty(size if control.rank == 0 else 0, np.uint8)
        if rank:
            control.send([data], rank, 0)
        if control.rank == 0:
            rows, told = json.loads(zlib.decompress(data.tobytes()))
            found.append(([Span(*row) for row in rows], told))
    return found
