"""How large a micro-batch a rank's memory holds: the arithmetic, and a host's memory as the kernel tells it.

Owns the line through two measured peaks and the reading of /proc. A device's memory is told by its
backend (``peak_bytes``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from hvdtrain.cluster import heap
from hvdtrain.cluster.machine.cgroup import memory_limits

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
    held, left = _status(proc, "VmRSS"), left_bytes(proc, cgroup)
    return 0 if held is None or left is None else held + int(HOST_PART * left / max(1, local_size))


def host_room_bytes(local_size: int, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process may take more: its part of what its host has left; None if unknown."""
    left = left_bytes(proc, cgroup)
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


def left_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process can still have; None if unknown.

    The host's, or what a control group or a limit of this process (ulimit) allows where that is less.
    """
    left = left_alive_bytes(proc, cgroup)
    return left if left is None else max(0, min([left, *_own_left(proc)]))


def left_alive_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process and its neighbours can still have before the kernel ends one of them; None if unknown.

    Limits of a process itself are not among what leaves that: beyond them it is refused memory, and lives.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path(proc, "meminfo").read_text(), re.MULTILINE)
        if found:
            return max(0, min([int(found[1]) * 1024, *(limit - used for limit, used in memory_limits(cgroup, proc))]))
    return None


def limited(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> bool:
    """Whether a control group allows less than the host has in all, so that the kernel ends what takes more."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path(proc, "meminfo").read_text(), re.MULTILINE)
        total = int(found[1]) * 1024 if found else 0
        return any(limit < total for limit, _ in memory_limits(cgroup, proc))
    return False


def _own_left(proc: str) -> list[int]:
    """What the limits of this process (RLIMIT_AS, RLIMIT_DATA) leave it."""
    return [limit - (_status(proc, used) or 0) for used, limit in _own_limits(proc).items()]


def _own_limits(proc: str) -> dict[str, int]:
    """Limits of this process, by the field of /proc/self/status that counts towards each; none that is unlimited."""
    found = {}
    with contextlib.suppress(OSError):
        text = Path(proc, "self/limits").read_text()
        for name, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            soft = re.search(rf"^{name}\s+(\d+)\s", text, re.MULTILINE)
            if soft:
                found[used] = int(soft[1])
    return found
