"""The page's parts, a file each with ``make(facts) -> Section | None`` (None: the run's files tell nothing of it)."""

from __future__ import annotations

ORDER = ("course", "learning", "seconds", "waits", "shares", "memory", "machines", "attempts", "exchange", "trace",
         "configuration", "environment", "remarks")
"""From what everybody asks to what somebody may look up."""
