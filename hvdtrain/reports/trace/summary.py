"""Summary of a trace: the overlap of exchange and computing, and the critical path of a step. Pure.

An exchange is paired over the ranks by its name and by how often the name came before: all ranks enter the same ones in
one order (law 5). It begins when the last rank has handed over its part. Before that it is waiting for that rank.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.core.timeline.spans import KERNEL
from hvdtrain.reports.trace.chrome import RankTrace

BLOCKED = "wait"
"""Cause of spans in which the main thread stands in the exchange of the span's name
(`hvdtrain.core.timeline.blocked`)."""
LEAST_SHARE = 0.001
"""Of the chain; shorter entries are left out."""

Key = tuple[str, int]
Interval = tuple[float, float]


class Activity(NamedTuple):
    """Work of a main thread from ``begin_s`` to ``end_s``; ``key``: the exchange it stood in, or None."""

    begin_s: float
    end_s: float
    what: str
    cause: str
    key: Key | None = None


class RankActivity(NamedTuple):
    """A rank's window on the common axis: ``pieces`` in order without overlaps; ``entered``, ``left``: by exchange,
    when the rank handed over its part and when it had the result; ``sent``: those of gradients, and whether they may go
    on beside other work; ``computing``: when."""

    pieces: list[Activity]
    entered: dict[Key, float]
    left: dict[Key, float]
    sent: dict[Key, bool]
    computing: list[Interval]


def course_of(trace: RankTrace) -> RankActivity:
    shared, entered, left = trace.alignment.shared_s, dict[Key, float](), dict[Key, float]()
    sent: dict[Key, bool] = {}
    counts: dict[str, int] = {}
    wire = sorted((s for s in trace.spans if s.lane == "wire"), key=lambda s: s.begin_s)
    for span in wire:
        nth = counts[span.name] = counts.get(span.name, -1) + 1
        entered[span.name, nth], left[span.name, nth] = shared(span.begin_s), shared(span.end_s)
        sent[span.name, nth] = bool(span.args.get("beside"))
    pieces: list[Activity] = []
    blocked: dict[str, int] = {}
    for begin_s, end_s, name, cause, first in _leaves(trace):
        key: Key | None = None
        if cause == BLOCKED:
            blocked[name] = blocked.get(name, 0) + first
            key = (name, blocked[name] - 1)
            if key not in sent:
                entered[key] = min(entered.get(key, begin_s), begin_s)
                left[key] = end_s
        pieces.append(Activity(begin_s, end_s, name, cause, key))
    kernels = [(shared(s.begin_s), shared(s.end_s)) for s in trace.spans if s.cause == KERNEL]
    computing = kernels or [(p.begin_s, p.end_s) for p in pieces if p.cause == "compute"]
    return RankActivity(pieces, entered, left, sent, union(computing))


@dataclass
class _Open:
    """A span that has begun; ``fresh``: no stretch of it was found yet."""

    end_s: float
    name: str
    cause: str
    fresh: bool = True


def _leaves(trace: RankTrace) -> list[tuple[float, float, str, str, bool]]:
    """Return (begin, end, name, cause, whether it is the span's first) of each stretch of the main thread.

    The name is that of the innermost span, the cause that of the innermost which has one; "other" between spans. What
    is within an exchange is the exchange.
    """
    found: list[tuple[float, float, str, str, bool]] = []
    stack: list[_Open] = []
    at = math.nan

    def until(t: float) -> None:
        nonlocal at
        if t > at:
            top = stack[-1] if stack else _Open(t, "other", "other")
            found.append((at, t, top.name, top.cause, top.fresh))
            at, top.fresh = t, False

    def close(t: float) -> None:
        while stack and stack[-1].end_s <= t:
            until(stack[-1].end_s)
            stack.pop()

    for span in sorted((s for s in trace.spans if s.lane == "main"), key=lambda s: (s.begin_s, -s.end_s)):
        begin_s, end_s = trace.alignment.shared_s(span.begin_s), trace.alignment.shared_s(span.end_s)
        at = begin_s if math.isnan(at) else at
        close(begin_s)
        until(begin_s)
        around = stack[-1] if stack else _Open(end_s, "other", "other")
        if span.cause == BLOCKED or around.cause != BLOCKED:
            stack.append(_Open(end_s, span.name, span.cause or around.cause))
    close(math.inf)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches in order and without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common_s(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Return the seconds that lie in both, each as `union` returns them."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def last_of(courses: Sequence[RankActivity], key: Key) -> tuple[int, float] | None:
    """Return the rank that entered the exchange ``key`` last, and when; None where not all ranks' times are known."""
    times = [course.entered.get(key) for course in courses]
    if any(t is None for t in times):
        return None
    known = [t for t in times if t is not None]
    latest = max(range(len(known)), key=known.__getitem__)
    return latest, known[latest]


def overlaps(courses: Sequence[RankActivity]) -> list[float | None]:
    """Return by rank the percent of the gradient exchange that ran while the rank computed; None: no exchange."""
    found: list[float | None] = []
    for course in courses:
        sums, beside = [], []
        for key, goes_on in course.sent.items():
            last = last_of(courses, key)
            if last is not None:
                sums.append((last[1], course.left[key]))
                beside += sums[-1:] if goes_on else []
        total_s = sum(end - begin for begin, end in union(sums))
        common = common_s(union(beside), course.computing)
        found.append(round(100 * common / total_s, 1) if total_s > 0 else None)
    return found


def critical(courses: Sequence[RankActivity], steps: int) -> list[tuple[int, str, float]]:
    """Return (rank, what, seconds of a mean step) of the chain that ends last, in the order in which they first come.

    Followed from the end backwards: where a rank stood in an exchange the chain goes to the rank that entered it last.
    Together they are the length of a mean step.
    """
    ends = [course.pieces[-1].end_s if course.pieces else 0.0 for course in courses]
    if not any(course.pieces for course in courses):
        return []
    begins = [[piece.begin_s for piece in course.pieces] for course in courses]
    rank = max(range(len(ends)), key=ends.__getitem__)
    t, chain, jumps = ends[rank], [], 0
    while True:
        i = bisect.bisect_left(begins[rank], t) - 1  # the last piece that began before t
        if i < 0:
            break
        piece = courses[rank].pieces[i]
        last = last_of(courses, piece.key) if piece.key is not None else None
        if last is None or last == (rank, t) or jumps > len(courses):
            chain.append((rank, _told(piece), t - piece.begin_s))
            t, jumps = piece.begin_s, 0
            continue
        since = min(max(last[1], begins[last[0]][0]), t)
        if since < t:
            chain.append((last[0], _told(piece), t - since))
        jumps = 0 if since < t else jumps + 1
        rank, t = last[0], since
    summed: dict[tuple[int, str], float] = {}
    for who, what, seconds in reversed(chain):
        summed[who, what] = summed.get((who, what), 0.0) + seconds
    total_s = sum(summed.values())
    return [(who, what, seconds / steps) for (who, what), seconds in summed.items() if seconds > LEAST_SHARE * total_s]


def _told(piece: Activity) -> str:
    return piece.what if piece.key is None else f"exchange {piece.what}"
