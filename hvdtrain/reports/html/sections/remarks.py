"""Remarks that the run printed: what it found, decided and warned of."""

from __future__ import annotations

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Section, Table
from hvdtrain.reports.html.words import clock, count, cut

MOST = 60


def make(facts: RunFacts) -> Section | None:
    found: dict[str, list[float]] = {}
    for event in facts.log.events:
        texts = (
            event.values.get("notes")
            if event.name == "start"
            else [event.values.get("text")] if event.name == "note" else ()
        )
        for text in texts if isinstance(texts, list) else ():
            if text:
                found.setdefault(cut(text, 500), []).append(event.time_s - facts.begin_s)
    for text in (facts.completed or {}).get("notes") or ():
        found.setdefault(cut(text, 500), [])
    if not found:
        return None
    rows = [[clock(times[0]) if times else "", f"{len(times)}\N{MULTIPLICATION SIGN}" if len(times) > 1 else "", text]
            for text, times in found.items()]
    left = len(rows) - MOST
    return Section("remarks", "Notes and warnings", f"{count(len(rows), 'note')}, as printed during the run.",
                   [Table("", ["at", "", "note"], rows[:MOST], words=frozenset({2}),
                          note=f"{left} more are in log.jsonl." if left > 0 else "")])
