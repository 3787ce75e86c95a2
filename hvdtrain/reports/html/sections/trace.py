"""Findings of a trace: overlap of the exchange with backward, the critical path, and its file."""

from __future__ import annotations

import math
import re
from typing import Any

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.log import LogRecord
from hvdtrain.reports.html.shapes import Bars, Prose, Section, Segment, StackedBar, bar
from hvdtrain.reports.html.words import count, duration, number, percent, size

MOST = 24
LEAST = 0.01
"""Part of a step below which links of the critical path are one row."""

WORDS = {"data": "waiting for data", "sum": "exchange of the agreement", "exchange sum": "exchange of the agreement",
         "vote": "agreement on a step", "other": "other work", "gradients": "gradients, overlapped with backward"}


def make(facts: RunFacts) -> Section | None:
    events = facts.log.all("trace")
    if not events:
        return None
    found = events[-1].values
    dropped = int(max(0.0, number(found.get("dropped")))) if number(found.get("dropped")) >= 0 else 0
    lines = [f"{found.get('path')}: {count(int(max(0, number(found.get('events')) or 0)), 'event')}, "
             f"{size(number(found.get('bytes')))}. Open it at ui.perfetto.dev or in chrome://tracing.",
             "The ranks share one clock." if number(found.get("within_s")) == 0 else
             f"The clocks of the ranks agree within {duration(number(found.get('within_s')))}."]
    if dropped:
        lines.append(f"{count(dropped, 'event')} exceeded the size limit and are missing.")
    blocks: list[Any] = [Prose(lines)]
    overlap = found.get("overlap_percent")
    if isinstance(overlap, list) and any(number(one) == number(one) for one in overlap):
        rows = [bar(facts.who(r), {"c-wire": max(0.0, number(v))}, 100.0,
                    {"c-wire": f"{percent(number(v))} of the exchange overlapped with backward"}, percent(number(v)))
                for r, v in list(enumerate(overlap))[:MOST] if number(v) == number(v)]
        blocks.append(Bars("Overlap of the exchange with backward", rows))
    blocks += _critical(facts, found.get("critical"))
    return Section("trace", "Trace", _lead(facts, events[-1]), blocks)


def _lead(facts: RunFacts, event: LogRecord) -> str:
    """Name the steps of the trace, their place in the run, and the length of a mean step."""
    found = event.values
    steps, at = found.get("steps"), math.nan
    if isinstance(steps, list) and len(steps) == 2 and all(number(one) >= 0 for one in steps):
        at = number(steps[1]) / facts.steps if facts.steps > 0 else math.nan
        said = f"Steps {steps[0]:,} to {steps[1]:,}"
    else:
        said = "Some steps"
    part = ", early in the run" if at < 0.2 else ", late in the run" if at > 0.8 else ""
    known = event.time_s >= facts.begin_s
    said += f"{part} ({duration(event.time_s - facts.begin_s)} after the start)" if known else part
    step_s = math.fsum(seconds for _, _, seconds in _chain(found.get("critical")))
    return said + (f"; a mean step took {duration(step_s)}." if step_s > 0 else ".")


def _chain(found: Any) -> list[tuple[int, str, float]]:
    """Return the links of a "trace" record's critical path that make sense: (rank, what, seconds)."""
    return [(int(number(row[0])), str(row[1]), number(row[2])) for row in found if isinstance(row, list)
            and len(row) == 3 and number(row[0]) >= 0 and number(row[2]) > 0] if isinstance(found, list) else []


def plainly(what: str) -> str:
    """Say a link of the critical path in words.

    >>> plainly("exchange g0-3.grad.b1.r0"), plainly("epoch_end of Ledger"), plainly("forward")
    ('exchange of gradients, bucket 1', 'callback Ledger (epoch_end)', 'forward')
    """
    bucket = re.search(r"\.grad\.b(\d+)", what)
    if bucket:
        return f"exchange of gradients, bucket {bucket[1]}"
    moment, of, name = what.partition(" of ")
    return f"callback {name} ({moment})" if of and moment.startswith(("step_", "epoch_")) else WORDS.get(what, what)


def _critical(facts: RunFacts, found: Any) -> list[Bars]:
    """Return the longest chain of a mean step: a row a link in its order, each where the one before it ends."""
    chain = _chain(found)
    if not chain:
        return []
    full = math.fsum(seconds for _, _, seconds in chain)
    big = [link for link in chain if link[2] >= LEAST * full][:MOST]
    at, rows = 0.0, []
    for i, (rank, what, seconds) in enumerate(big):
        width = 100.0 * seconds / full
        words = f"{facts.who(rank)}: {plainly(what)}, {duration(seconds)}"
        rows.append(StackedBar(f"{i + 1}. {plainly(what)}", (Segment(f"k{rank % 8}", at, width, words),),
                               duration(seconds),
                        percent(width)))
        at += width
    small_s = full - math.fsum(seconds for _, _, seconds in big)
    if len(big) < len(chain):
        all_small = len(big) == sum(seconds >= LEAST * full for _, _, seconds in chain)
        rows.append(StackedBar(count(len(chain) - len(big),
                                     "link") + (" under 1 %" if all_small else ", not drawn individually"),
                        (Segment("c-other", at, 100.0 * small_s / full, "the other links together"),),
                        duration(small_s), percent(100.0 * small_s / full)))
    legend = [(f"k{rank % 8}", facts.who(rank),
               percent(100.0 * math.fsum(s for r, _, s in chain if r == rank) / full))
              for rank in sorted({rank for rank, _, _ in chain})]
    note = ("Colours are ranks: the path changes its rank where one rank waits for "
            "another. Numbers give the order of the links; each bar begins where the previous one "
            "ends. A step takes as long as this path, so only work on the path shortens steps.")
    return [Bars("Critical path of a mean step", rows, legend, note)]
