"""The configuration, and what of it differs from the defaults."""

from __future__ import annotations

from hvdtrain.core.records import flat
from hvdtrain.reports.html.facts import RunFacts, differing, words_of
from hvdtrain.reports.html.shapes import Section, Table
from hvdtrain.reports.html.words import count


def make(facts: RunFacts) -> Section | None:
    if not facts.config:
        return None
    differs = differing(facts.config)
    rows = [[key, words_of(value), words_of(default)] for key, (value, default) in differs.items()]
    whole = [[key, words_of(value)] for key, value in flat(facts.config).items()]
    lead = f"{count(len(rows), 'key')} of {len(whole)} {'differs' if len(rows) == 1 else 'differ'} from the defaults."
    first = [Table("Differences", ["key", "value", "default"], rows, words=frozenset({1, 2}))] if rows else []
    return Section("configuration", "Configuration", lead,
                   [*first, Table(f"All {len(whole)} keys", ["key", "value"], whole, folded=True, words=frozenset({1}),
                                  marked=frozenset(i for i, (key, _) in enumerate(whole) if key in differs))])
