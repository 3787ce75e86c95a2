"""Memory of a host: what this process holds and may still take, and glibc's settings for freed blocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.cluster.devices import meminfo
from hvdtrain.cluster.machine.usage import memory_limits

DEVICE_PART = 0.9
"""Share of a device's memory that a plan may use: fragmentation and what libraries take later need the rest."""

HOST_PART = 0.8
"""Share of a host's available memory that the ranks on it may use together."""


def ceiling(sizes: tuple[int, int], peaks_bytes: tuple[int, int], budget_bytes: float) -> int:
    """Return the largest micro-batch within ``budget_bytes`` by the line through two measured peaks; 0: no limit to be
    seen.

    Where the memory of the smaller size is over the budget already, it is that size: it did run.
    """
    (small, large), (low, high) = sizes, peaks_bytes
    if large <= small or high <= low or budget_bytes <= 0:
        return 0
    per_sample = (high - low) / (large - small)
    return max(small, int((budget_bytes - (low - per_sample * small)) / per_sample))


def host_budget_bytes(local_size: int, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the bytes that this process may hold: its own and its share of what the host has left; 0: unknown."""
    held, left = _status(proc, "VmRSS"), left_bytes(proc, cgroup)
    return 0 if held is None or left is None else held + int(HOST_PART * left / max(1, local_size))


def host_room_bytes(local_size: int, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that this process may take more: its share of what its host has left; None if unknown."""
    left = left_bytes(proc, cgroup)
    return None if left is None else int(HOST_PART * left / max(1, local_size))


def resident_bytes(proc: str = "/proc") -> int:
    """Return the bytes that this process holds now; 0 if unknown."""
    return _status(proc, "VmRSS") or 0


def peak_resident_bytes(proc: str = "/proc") -> int:
    """Return the most bytes that this process has held, since the last `host_peak_bytes` if any; 0 if unknown."""
    return _status(proc, "VmHWM") or 0


def host_peak_bytes(work: Callable[[], None], proc: str = "/proc") -> int:
    """Run ``work``; return the most bytes held meanwhile, 0 before Linux 4.0 (clear_refs resets the mark)."""
    give_back()  # else free memory that is kept from before would hide what ``work`` takes
    resets = False
    with contextlib.suppress(OSError):
        Path(proc, "self/clear_refs").write_text("5")
        resets = True
    work()
    return (_status(proc, "VmHWM") or 0) if resets else 0


def _status(proc: str, name: str) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(proc, "self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def left_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that the host, control groups and ulimit leave this process; None if unknown."""
    left = left_alive_bytes(proc, cgroup)
    return left if left is None else max(0, min([left, *_own_left(proc)]))


def left_alive_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that this process and its neighbours can still have before the kernel ends one of them.

    None if unknown. Limits of a process itself do not count: beyond them it is refused memory, and lives.
    """
    left = meminfo(proc).get("MemAvailable")
    return None if left is None else max(0, min([left, *(limit - used for limit, used in memory_limits(cgroup, proc))]))


def limited(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> bool:
    """Return whether a control group allows less than the host has in all, so that the kernel ends what takes more."""
    total = meminfo(proc).get("MemTotal", 0)
    return any(limit < total for limit, _ in memory_limits(cgroup, proc))


def _own_left(proc: str) -> list[int]:
    """Return the bytes that the limits of this process (RLIMIT_AS, RLIMIT_DATA) leave it."""
    return [limit - (_status(proc, used) or 0) for used, limit in _own_limits(proc).items()]


def _own_limits(proc: str) -> dict[str, int]:
    """Return limits of this process, by the field of /proc/self/status that counts towards each."""
    found = {}
    with contextlib.suppress(OSError):
        text = Path(proc, "self/limits").read_text()
        for name, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            soft = re.search(rf"^{name}\s+(\d+)\s", text, re.MULTILINE)
            if soft:
                found[used] = int(soft[1])
    return found


KEPT_BYTES = 1 << 30
"""Free memory that stays in the process before the heap is cut, and size from which a block is mapped by itself."""

LARGE_BYTES = 1 << 26
"""Parameters from which ZeRO lays memory out by `map_large` before it keeps what steps free."""

MAPPED_BYTES = 1 << 20
"""Size from which a block is mapped by itself meanwhile."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What malloc.h calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

LARGEST_KEPT_BYTES = 1 << 24
"""Size from which a block of a large model under ZeRO is always mapped by itself."""

_mapping = False

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Keep up to `KEPT_BYTES` of freed memory in this process; return whether that took effect.

    A step on a CPU frees all its activations at its end; glibc gives the top of its heap and blocks of some MiB back,
    and the system clears each page again in the next step: 5000 page faults a step, 7 to 14 ms, on the ResNet of
    `benchmarks step`. Not where the environment says otherwise, nor outside of glibc.
    """
    if any(name in os.environ for name in _OWN):
        return False
    mallopt = _glibc("mallopt")
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, KEPT_BYTES))


@contextlib.contextmanager
def kept_freed() -> Iterator[None]:
    """Keep freed memory within the body, so that what is timed costs what it will in a step; then give it back.

    Afterwards blocks are mapped as by `map_large`: to be used before `keep_freed`, not within it.
    """
    kept = keep_freed()
    try:
        yield
    finally:
        if kept:
            map_large()
            give_back()


def map_large(settles: bool = False) -> bool:
    """Map blocks of `MAPPED_BYTES` and more by themselves; return whether that took effect.

    ``settles``: until `end_mapping`. Undoes `keep_freed`, for as long as blocks are made that stay (an optimizer's
    state in its first step) among such that go (gradients): what is freed between blocks that stay is no use to larger
    ones. It costs the system's clearing of pages, about 0.25 ms a MiB.
    """
    global _mapping
    if any(name in os.environ for name in _OWN):
        return False
    mallopt = _glibc("mallopt")
    done = bool(mallopt(_TRIM_THRESHOLD, MAPPED_BYTES) and mallopt(_MMAP_THRESHOLD, MAPPED_BYTES))
    _mapping = done and settles
    return done


def end_mapping() -> bool:
    """Keep what is freed from now on, where `map_large` has taken effect; return whether it had.

    What stays has been made by now, each block in a place of its own. Not blocks of `LARGEST_KEPT_BYTES` and more: a
    small block in the gap that one left would keep the next one out of it.
    """
    global _mapping
    found, _mapping = _mapping, False
    mallopt = _glibc("mallopt")
    return found and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES))


def give_back() -> None:
    """Return all free memory to the system, so that what this process holds is what it uses; where glibc is."""
    _glibc("malloc_trim")(0)


def _glibc(name: str) -> Callable[..., int]:
    """Return a function of glibc; one that does nothing and returns 0 where there is none."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return lambda *_: 0


_imported_bytes = 0


def mark_imported(with_model_bytes: int = 0) -> None:
    """Note the bytes held before anything of the run; the first call counts. ``with_model_bytes``: of its model."""
    global _imported_bytes
    _imported_bytes = _imported_bytes or max(0, resident_bytes() - with_model_bytes)


def imported_bytes() -> int:
    """Return the bytes that `mark_imported` has noted, the zero of all plans; 0 before."""
    return _imported_bytes
