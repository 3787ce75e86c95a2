"""Matrix of ranks that waited for other ranks."""

from __future__ import annotations

from hvdtrain.reports.html.blocks import Section, Shades
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import matrix
from hvdtrain.reports.html.words import duration, percent


def make(facts: RunFacts) -> Section | None:
    spent = facts.spent
    if not spent.waits:
        return None
    ranks = max(max(max(pair) for pair in spent.waits) + 1, len(spent.ranks))
    table = matrix(spent.waits, ranks, {rank: str(rank) for rank in range(ranks)})
    named, waited = sum(spent.waits.values()), spent.total.get("wait", 0.0)
    lead = (f"A row is a rank that waited, a column the rank that came last. The names cover {duration(named)} of the "
            f"{duration(waited)} that ranks waited for one another"
            + (f" ({percent(min(100.0, 100 * named / waited))})." if waited > 0 else "."))
    return Section(
        "waits",
        "Who waited for whom",
        lead,
        [
            Shades(
                "Seconds waited", table, "waited", "for rank", "A column of strong colour: a rank that holds others up."
            )
        ],
    )
