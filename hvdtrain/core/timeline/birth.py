"""When this process began, as the system knows it: what came before the first line of Python belongs to its start."""

from __future__ import annotations

import os
import time

_told = [0.0]


def unclaimed_s() -> float:
    """Return the seconds since this process began, or since `claim`; 0 where the system does not tell.

    Linux counts a process' begin in hundredths of a second since the system has started (proc(5), field 22).
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        lived_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    since_s = time.perf_counter() - _told[0] if _told[0] else lived_s
    return max(0.0, min(lived_s, since_s))


def claim() -> None:
    """Let what has passed belong to a run: the next one in this process begins now."""
    _told[0] = time.perf_counter()
