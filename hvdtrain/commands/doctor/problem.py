"""What a check says: how bad, on which hosts, what was found, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STOPS = "stops"
"""A run would not start, or would end or hang."""
SLOWS = "slows"
"""A run would work, slower or otherwise less well than it could."""
NOTE = "note"
"""Nothing is wrong; there is a setting for it."""

SEVERITIES = (STOPS, SLOWS, NOTE)


@dataclass(frozen=True)
class Problem:
    """One finding: ``got`` is a clause, ``do`` starts with a verb and holds the command. No closing full stops.

    ``hosts``: names of those it was found on, in order.
    """

    severity: str
    hosts: tuple[str, ...]
    got: str
    do: str


def merge(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, worst first, each once with all its hosts."""
    hosts: dict[tuple[str, str, str], dict[str, None]] = {}
    for p in problems:
        hosts.setdefault((p.severity, p.got, p.do), {}).update(dict.fromkeys(p.hosts))
    found = [Problem(severity, tuple(names), got, do) for (severity, got, do), names in hosts.items()]
    return sorted(found, key=lambda p: SEVERITIES.index(p.severity))


def stops(problems: Iterable[Problem]) -> bool:
    """Whether any of them would stop a run."""
    return any(p.severity == STOPS for p in problems)
