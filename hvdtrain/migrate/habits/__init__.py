"""What is unsafe in a distributed script, whatever wrote it: a habit is a function of the scan that yields findings.

Owns the list. One file for each subject; each habit is a function with the name of what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.migrate.finding import Finding
from hvdtrain.migrate.scan import Scan


@dataclass(frozen=True)
class Context:
    """``kind``: the rule that recognised the script; ``target``: where it goes; ``edited``: whether it is rewritten."""

    kind: str
    target: str
    edited: bool


Habit = Callable[[Scan, Context], Iterator[Finding]]


def look(scan: Scan, kind: str, target: str, edited: bool) -> list[Finding]:
    """Findings of all habits in a script, in the order of its lines."""
    from hvdtrain.migrate.habits import averages, data, keras3, ranks, rates

    context = Context(kind, target, edited)
    habits: list[Any] = [h for module in (ranks, rates, data, averages, keras3) for h in module.HABITS]
    return sorted({finding for habit in habits for finding in habit(scan, context)})
