"""A run's end in words: why it failed, as one record of its log.

Owns the record "failed" and what it says; pure but for `append`. Standard library only: the process that outlives
rank 0 imports it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.core import RunFiles

MOST_TEXT = 2000
"""Characters of an error that are kept: its begin, which names it."""
TAIL_BYTES = 256 * 1024
"""So much of a log's end is read."""

SILENT = "the process of rank 0 has ended without a word: it was killed, or another rank's end took it along"

_NAMED = re.compile(r"\brank (\d+) on host\b")


def failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the values of the record "failed" for what ``rank`` has met.

    ``rank`` in it: the one that the error's words accuse, else the one that met it.
    """
    text = str(error).strip()
    accused = _NAMED.search(text)
    name = type(error).__name__
    return {"error": f"{name}: {text}"[:MOST_TEXT] if text else name, "rank": int(accused[1]) if accused else rank}


def last(lines: Iterable[bytes]) -> tuple[int, bool]:
    """Return (the step of a log's last record, whether its last fit has no end yet). Torn lines do not count."""
    step, is_open = 0, False
    for line in lines:
        try:
            row = json.loads(line)
            event, at = row["event"], row["step"]
        except (ValueError, KeyError, TypeError):
            continue
        step = at if isinstance(at, int) else step
        if event in ("start", "step"):
            is_open = True
        elif event in ("end", "failed"):
            is_open = False
    return step, is_open


def append(out: Path, values: dict[str, Any], again: bool = False) -> bool:
    """Add a "failed" record to the log of a run whose last fit has no end yet, or ``again`` after its end.

    Returns whether it was added. OSError.
    """
    path = out / RunFiles.LOG
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        step, is_open = last(tail.split(b"\n"))
        if not is_open and not again:
            return False
        row = {"event": "failed", "time": round(time.time(), 3), "step": step, **values}
        fresh = b"" if tail.endswith(b"\n") else b"\n"
        os.write(descriptor, fresh + json.dumps(row).encode() + b"\n")
        return True
    finally:
        os.close(descriptor)
