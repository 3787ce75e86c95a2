"""Where the time of a restart goes, from the marks that the ranks leave: notice, kill, start, import, load, first step.

Owns the names and the sums. Pure; `hvdtrain.cluster.liveness.causes` writes and reads the marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("notice", "kill", "start", "import", "load", "first step")
"""From the last finished step to the launcher's end; to the end of what it left; to the new process; to its imports'
end; to the restored run; to its first finished step."""

STARTS = (("start", "start"), ("import", "imported"), ("load", "loaded"), ("first step", "step"))
"""The parts of a start, each with the mark that ends it."""


def start_parts(launched: float, marks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of a start, as far as it came. ``launched``: unix seconds at which the launcher started.

    Of each name rank 0's first mark counts, or the first one where rank 0 has left none.
    """
    parts: dict[str, float] = {}
    before = launched
    for part, name in STARTS:
        found = [row for row in marks if row["name"] == name]
        own = [row for row in found if row.get("rank") == 0] or found
        if not own:
            break
        at = float(own[0]["time"])
        parts[part] = round(max(0.0, at - before), 3)
        before = max(before, at)
    return parts


def in_words(parts: Mapping[str, float]) -> str:
    """The parts of a recovery in one line, with their sum."""
    known = {name: parts[name] for name in PARTS if name in parts}
    return f"{sum(known.values()):.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in known.items())
