"""What a trace found: overlap of the exchange with backward, the critical path, and where its file is."""

from __future__ import annotations

from typing import Any

from hvdtrain.report.blocks import Bars, Lines, Section
from hvdtrain.report.facts import Facts
from hvdtrain.report.figures.stack import bar
from hvdtrain.report.words import count, duration, number, percent, size

MOST = 24


def make(facts: Facts) -> Section | None:
    """Show the summary of the latest trace."""
    found = facts.log.last("trace")
    if not found:
        return None
    steps = found.get("steps")
    window = f" of steps {steps[0]} to {steps[1]}" if isinstance(steps, list) and len(steps) == 2 else ""
    dropped = int(max(0.0, number(found.get("dropped")))) if number(found.get("dropped")) >= 0 else 0
    lines = [f"{found.get('path')}{window}: {count(int(max(0, number(found.get('events')) or 0)), 'event')}, "
             f"{size(number(found.get('bytes')))}. Open it at ui.perfetto.dev or in chrome://tracing.",
             "The ranks share one clock." if number(found.get("within_s")) == 0 else
             f"The ranks' clocks in it agree within {duration(number(found.get('within_s')))}."]
    if dropped:
        lines.append(f"{count(dropped, 'event')} did not fit its size and are missing.")
    blocks: list[Any] = [Lines(lines)]
    overlap = found.get("overlap_percent")
    if isinstance(overlap, list) and any(number(one) == number(one) for one in overlap):
        rows = [bar(facts.who(r), {"c-wire": max(0.0, number(v))}, 100.0,
                    {"c-wire": f"{percent(number(v))} of the exchange ran beside backward"}, percent(number(v)))
                for r, v in list(enumerate(overlap))[:MOST] if number(v) == number(v)]
        blocks.append(Bars("Exchange that ran beside backward", rows))
    blocks += _critical(facts, found.get("critical"))
    return Section("trace", "Trace", "", blocks)


def _critical(facts: Facts, found: Any) -> list[Bars]:
    """The longest chain of a mean step."""
    chain = [(int(number(row[0])), str(row[1]), number(row[2])) for row in found if isinstance(row, list)
             and len(row) == 3 and number(row[0]) >= 0 and number(row[2]) > 0] if isinstance(found, list) else []
    if not chain:
        return []
    full = sum(seconds for _, _, seconds in chain)
    rows = [bar(f"{facts.who(rank)}: {what}", {f"k{rank % 8}": seconds}, full, {}, duration(seconds),
                percent(100 * seconds / full)) for rank, what, seconds in chain[:MOST]]
    return [
        Bars(
            "Critical path of a mean step",
            rows,
            note="A step is as long as this chain; only what is on it makes steps shorter.",
        )
    ]
