"""Processes and devices: load, memory of processes, GPUs' utilisation, clocks, temperature, MFU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.reports.html.curves import Axis, Chart, Series, along, chart, clock_words
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.sections.course import axis_of
from hvdtrain.reports.html.shapes import Charts, Section, Table
from hvdtrain.reports.html.words import cut, number, percent, short, size

MOST = 8
SHOWN: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("cpu_percent", "Processor", "% of a core", short), ("rss_bytes", "Memory of the process", "", size),
    ("utilisation_percent", "GPU utilisation", "%", short), ("reserved_bytes", "GPU memory reserved", "", size),
    ("sm_mhz", "GPU clock", "MHz", short), ("temperature_c", "GPU temperature", "\N{DEGREE SIGN}C", short),
    ("power_w", "GPU power", "W", short),
)


def make(facts: RunFacts) -> Section | None:
    events = [e for e in facts.log.all("system") if isinstance(e.values.get("ranks"), list)]
    charts: list[Chart] = []
    begin, axis = facts.begin_s, _axis(facts)
    for key, title, unit, words in SHOWN if len(events) > 1 else ():
        lines = _lines(events, key, begin)
        drawn = chart(title, unit, lines, zero=True, x_axis=axis, x_words=clock_words, x_name="seconds", words=words)
        if drawn is not None:
            if key.endswith("bytes"):
                drawn.y = _in_bytes(drawn)
            charts.append(drawn)
    utilised = _mfu(facts)
    if not charts and utilised is None:
        return None
    more = max((len(e.values["ranks"]) for e in events), default=0) - MOST
    lead = "Over the time since the start of the run, one line per rank, with a gap at each restart." + (
        f" The first {MOST} ranks are drawn, {more} more are not." if more > 0 else "")
    return Section("machines", "Processes and devices", lead if charts else "",
                   [*([Charts(charts)] if charts else []), *([utilised] if utilised else [])])


def _axis(facts: RunFacts) -> Axis | None:
    """Return the time line's own axis, in seconds since the begin; from 0 without its breaks where it has some."""
    last_s = facts.end_s - facts.begin_s
    if not last_s > 0:
        return None
    shared = axis_of(facts)
    return along(0.0, last_s, words=clock_words) if shared.breaks() else Axis(0.0, last_s, tuple(shared.ticks()))


def _lines(events: list[Any], key: str, begin: float) -> list[Series]:
    ranks = min(MOST, max((len(e.values["ranks"]) for e in events), default=0))
    lines = []
    for rank in range(ranks):
        points = [(e.time_s - begin, number(row.get(key))) for e in events
                  if rank < len(e.values["ranks"]) and isinstance(row := e.values["ranks"][rank], dict)]
        orders = [e.order for e in events
                  if rank < len(e.values["ranks"]) and isinstance(e.values["ranks"][rank], dict)]
        for i in reversed(range(1, len(points))):
            if orders[i] != orders[i - 1]:  # no line across an attempt's end
                points.insert(i, (points[i][0], math.nan))
        if any(value == value for _, value in points):
            lines.append(Series(f"rank {rank}", [x for x, _ in points], [y for _, y in points], f"k{rank % 8}"))
    return lines


def _in_bytes(drawn: Chart) -> Any:
    from dataclasses import replace

    axis = drawn.y
    return replace(axis, ticks=tuple((at, size(axis.low + (axis.high - axis.low) * at / 100)) for at, _ in axis.ticks))


def _mfu(facts: RunFacts) -> Table | None:
    """Model FLOPs utilisation, where peak and FLOPs are known, with both; where not, why."""
    found = facts.log.last("system")
    mfu = found.get("mfu")
    if not isinstance(mfu, list) or not any(number(one) == number(one) for one in mfu):
        return None
    rows = []
    for rank, value in enumerate(mfu[:MOST]):
        flops, peak = _of(found, "flops", rank), _of(found, "peak_flops", rank)
        why = _of(found, "flops_unknown", rank) or _of(found, "peak_source", rank) or ""
        known = number(value) == number(value)
        rows.append([facts.who(rank), percent(100 * number(value), 1) if known else "not known", _short(flops),
                     _short(peak), cut(why, 120)])
    return Table("Model FLOPs utilisation", ["", "MFU", "FLOPs per sample", "peak FLOP/s", "by"], rows,
                 words=frozenset({4}))


def _of(found: dict[str, Any], key: str, rank: int) -> Any:
    values = found.get(key)
    return values[rank] if isinstance(values, list) and rank < len(values) else None


def _short(value: Any) -> str:
    return f"{number(value):.3g}" if number(value) == number(value) else ""
