"""What is unsafe in a distributed script, whatever wrote it: a habit is a function of the scan that yields findings.

Owns the list. One file for each subject; each habit is a function with the name of what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.scan import Scan


@dataclass(frozen=True)
class Context:
    """``kind``: the rule that recognised the script; ``target``: where it goes; ``edited``: whether it is rewritten."""

    kind: str
    target: str
    edited: bool


def look(scan: Scan, kind: str, target: str, edited: bool) -> list[Finding]:
    """Findings of all habits in a script, in the order of its lines."""
    from hvdtrain.commands.migrate.habits import averages, data, keras3, ranks, rates

    context = Context(kind, target, edited)
    modules: list[Any] = [ranks, rates, data, averages, keras3]
    return sorted({finding for module in modules for habit in module.HABITS for finding in habit(scan, context)})
