"""Every rank's seconds by cause, in all and over time."""

from __future__ import annotations

import math

from hvdtrain.core.timeline import CAUSES
from hvdtrain.core.units import format_ms
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.log import UNRECORDED, USEFUL
from hvdtrain.reports.html.sections.course import axis_of
from hvdtrain.reports.html.shapes import Bars, Section, Stacked, StackedBar, areas, bar, gather
from hvdtrain.reports.html.words import duration, number, percent

MOST = 24
"""Ranks that get a bar of their own."""

WINDOWS = 120

MEANING = {
    "compute": "forward and backward", "update": "the optimizer", "wait": "for stragglers",
    "idle": "for another stage of the pipeline", "channel": "messages between stages",
    "wire": "gradient exchange without waiting", "input": "waiting for data",
    "start": "process, imports, model, probe, restore", "checkpoint": "saving",
    "evaluation": "test data", "other": "callbacks and everything else",
}
DRAWN = (*USEFUL, *(cause for cause in CAUSES if cause not in USEFUL))
"""The causes from left to right: what trains comes first."""

FORECAST = ("compute", "exchange", "input", "update", "saves")
"""Parts of a step that are forecast; exchange: with waiting for stragglers."""

BASES = {
    "meter": "This log is from an older version and has mean steps only: waiting includes the transfer, and "
             "start, saving and evaluation are missing.",
    "phases": "This log is from an older version and has only the phases of rank 0's steps.",
}


def make(facts: RunFacts) -> Section | None:
    spent = facts.spent
    if not spent.ranks or spent.all_s <= 0:
        return None
    blocks: list[object] = [_bars(facts)]
    if spent.basis == "seconds" and len(spent.windows) > 1:
        blocks.append(_over_time(facts))
    lead = BASES.get(spent.basis, "")
    if not lead:
        lead = ("Each recorded second of each rank has one "
                f"measured cause; {percent(spent.part('other'), 1)} is other work.")
        missing = facts.rank_s - spent.all_s
        if facts.rank_s > 0 and missing > 0.02 * facts.rank_s:
            lead += (
                f" Not recorded, and not in these figures: {duration(missing)} of the ranks' "
                f"{duration(facts.rank_s)} ({percent(100 * missing / facts.rank_s)}): {UNRECORDED}."
            )
    return Section("seconds", "Time breakdown", f"{lead} {_forecast(facts)}".strip(), blocks)


def _forecast(facts: RunFacts) -> str:
    """Return how far the forecast of the start was off, "" without one."""
    found = facts.log.last("forecast")
    seconds = [number((found.get(name) or {}).get("step")) for name in ("forecast_s", "measured_s")]
    if not all(map(math.isfinite, seconds)):
        return ""
    errors = ", ".join(f"{part} {100 * number(found.get(f'error_{part}')):+.1f}" for part in FORECAST)
    return (f"The forecast at the start was {format_ms(seconds[0])} a step, measured were {format_ms(seconds[1])}: "
            f"{100 * (seconds[0] / seconds[1] - 1):+.1f} % ({errors}).")


def _bars(facts: RunFacts) -> Bars:
    """Return a bar for each rank; where there are many, those that differ most and the mean of the others."""
    spent = facts.spent
    whole = {rank: math.fsum(row.values()) for rank, row in spent.ranks.items()}
    full = max(whole.values())
    ranks = sorted(spent.ranks)
    shown = ranks
    if len(ranks) > MOST:
        mean = math.fsum(row.get("wait", 0.0) for row in spent.ranks.values()) / len(ranks)
        by = sorted(ranks, key=lambda r: -abs(spent.ranks[r].get("wait", 0.0) - mean))
        shown = sorted(by[:MOST - 1])
    rows = [_bar(_label(facts, rank), spent.ranks[rank], full) for rank in shown]
    rest = [rank for rank in ranks if rank not in set(shown)]
    if rest:
        mean_row = {c: math.fsum(spent.ranks[r].get(c, 0.0) for r in rest) / len(rest) for c in CAUSES}
        rows.append(_bar(f"mean of {len(rest)} others", mean_row, full))
    total = spent.total
    legend = [
        (f"c-{cause}", f"{cause}: {MEANING[cause]}", percent(spent.part(cause), 1 if spent.part(cause) < 9.95 else 0))
        for cause in DRAWN
        if total.get(cause, 0.0) > 0
    ]
    title = "Mean step of each rank" if spent.basis == "meter" else "Seconds of each rank by cause"
    return Bars(title, rows, legend)


def _label(facts: RunFacts, rank: int) -> str:
    host = facts.hosts[rank] if rank < len(facts.hosts) else ""
    return " \N{MIDDLE DOT} ".join(filter(None, (f"rank {rank}", facts.stage(rank), host)))


def _bar(label: str, row: dict[str, float], full: float) -> StackedBar:
    total = math.fsum(row.values())
    words = {c: f"{label}: {c} {duration(row.get(c, 0.0))}, {percent(100 * row.get(c, 0.0) / total if total else 0, 1)}"
             for c in DRAWN}
    return bar(label, {cause: row.get(cause, 0.0) for cause in DRAWN}, full, words, duration(total))


def _over_time(facts: RunFacts) -> Stacked:
    """All ranks' time by cause, each window as one column of 100 percent."""
    axis, rows = axis_of(facts), []
    for end_s, window_s, total, _ in facts.spent.windows:
        if window_s > 0 and math.isfinite(end_s):
            rows.append((end_s - window_s, end_s, total))
    joined = gather(rows, WINDOWS)
    edges: list[tuple[float, float]] = []
    parts: list[dict[str, float]] = []
    for begin, end, total in joined:
        whole = math.fsum(total.values())
        left, right = axis.at(begin), axis.at(end)
        if whole > 0 and right > left:
            edges.append((max(left, edges[-1][1]) if edges else left, right))
            parts.append({cause: 100.0 * total.get(cause, 0.0) / whole for cause in DRAWN})
    layers = [(f"c-{name}", d) for name, d in areas(edges, parts, DRAWN, 100.0)]
    return Stacked("Time of all ranks over the run", layers, axis.ticks(),
                   note="Colours as above; empty where nothing is recorded.")
