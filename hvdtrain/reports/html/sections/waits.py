"""Matrix of ranks that waited for other ranks."""

from __future__ import annotations

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Section, matrix
from hvdtrain.reports.html.words import duration, percent


def make(facts: RunFacts) -> Section | None:
    spent = facts.spent
    if not spent.waits:
        return None
    ranks = max(max(max(pair) for pair in spent.waits) + 1, len(spent.ranks))
    named, waited = sum(spent.waits.values()), spent.total.get("wait", 0.0)
    lead = ("A row is a waiting rank, a column the straggler. Stragglers are known for "
            f"{duration(named)} of the {duration(waited)} of waiting"
            + (f" ({percent(min(100.0, 100 * named / waited))})." if waited > 0 else "."))
    return Section("waits", "Stragglers", lead, [matrix(spent.waits, ranks)])
