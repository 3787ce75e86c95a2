"""How large a micro-batch a rank's memory holds: the arithmetic, and a host's memory as the kernel tells it.

Owns the line through two measured peaks and the reading of /proc and control groups. A device's memory is told by its
backend (``peak_bytes``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from hvdtrain.cluster import heap

DEVICE_PART = 0.9
"""Part of a device's memory that a plan may use: fragmentation and what libraries take later need the rest."""

HOST_PART = 0.8
"""Part of a host's available memory that the ranks on it may use together."""


def ceiling(sizes: tuple[int, int], peaks_bytes: tuple[int, int], budget_bytes: float) -> int:
    """Largest micro-batch within ``budget_bytes`` by the line through two measured peaks; 0: no limit to be seen.

    Where the memory of the smaller size is over the budget already, it is that size: it did run.
    """
    (small, large), (low, high) = sizes, peaks_bytes
    if large <= small or high <= low or budget_bytes <= 0:
        return 0
    per_sample = (high - low) / (large - small)
    return max(small, int((budget_bytes - (low - per_sample * small)) / per_sample))


def host_budget_bytes(local_size: int, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Bytes that this process may hold in all: what it has, and its part of what its host has left; 0 if unknown."""
    held, left = _status(proc, "VmRSS"), _available(proc, cgroup)
    return 0 if held is None or left is None else held + int(HOST_PART * left / max(1, local_size))


def host_room_bytes(local_size: int, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process may take more: its part of what its host has left; None if unknown."""
    left = _available(proc, cgroup)
    return None if left is None else int(HOST_PART * left / max(1, local_size))


def resident_bytes(proc: str = "/proc") -> int:
    """Bytes of memory that this process holds now; 0 if unknown."""
    return _status(proc, "VmRSS") or 0


def peak_resident_bytes(proc: str = "/proc") -> int:
    """Most bytes that this process has held, since `host_peak_bytes` was last called if it was; 0 if unknown."""
    return _status(proc, "VmHWM") or 0


def host_peak_bytes(work: Callable[[], None], proc: str = "/proc") -> int:
    """Run ``work``; most bytes that this process held meanwhile, 0 where the kernel does not reset its high-water mark.

    Writing 5 to clear_refs does so since Linux 4.0.
    """
    heap.give_back()  # else free memory that is kept from before would hide what ``work`` takes
    resets = False
    with contextlib.suppress(OSError):
        Path(proc, "self/clear_refs").write_text("5")
        resets = True
    work()
    return (_status(proc, "VmHWM") or 0) if resets else 0


def _status(proc: str, name: str) -> int | None:
    """A field of /proc/self/status in bytes."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(proc, "self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def _available(proc: str, cgroup: str) -> int | None:
    """Bytes that can still be had: of the host, or of the control group where that allows less."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path(proc, "meminfo").read_text(), re.MULTILINE)
        if found:
            return max(0, min([int(found[1]) * 1024, *_groups_left(proc, cgroup)]))
    return None


def _groups_left(proc: str, cgroup: str) -> list[int]:
    """What each memory control group around this process leaves, of those that limit (versions 2 and 1)."""
    left: list[int] = []
    for path, limit, used in _groups(proc):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            left.append(int(Path(cgroup, path, limit).read_text()) - int(Path(cgroup, path, used).read_text()))
    return left


def _groups(proc: str) -> list[tuple[str, str, str]]:
    """(folder, file of its limit, file of its use) of this process's memory groups, from the outermost to its own."""
    two, one = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    found = [("", *two), ("memory", *one)]
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            root, names = ("", two) if number == "0" else ("memory", one)
            if number == "0" or "memory" in kinds.split(","):
                parts = [part for part in path.split("/") if part not in ("", "..")]
                found += [("/".join([root, *parts[:i + 1]]).lstrip("/"), *names) for i in range(len(parts))]
    return found
