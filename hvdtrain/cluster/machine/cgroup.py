"""Control groups around this process, versions 1 and 2: limits of processor time and memory, and what they did.

Does not make groups: `benchmarks.throttle` does.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

CGROUP, PROC = "/sys/fs/cgroup", "/proc"


def groups(controller: str, cgroup: str = CGROUP, proc: str = PROC) -> list[tuple[int, Path]]:
    """Return (version, folder) of each control group around this process that may have ``controller``, outermost first.

    A container sees only its own group, at the top.
    """
    found = [(2, Path(cgroup)), (1, Path(cgroup, controller))]
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text().splitlines():
            number, kinds, path = (line.split(":", 2) + ["", ""])[:3]
            if number != "0" and controller not in kinds.split(","):
                continue
            version, tops = (2, ("", "unified")) if number == "0" else (1, (kinds, controller))
            parts = [part for part in path.split("/") if part not in ("", "..")]
            found += [(version, Path(cgroup, top, *parts[:i])) for top in tops for i in range(len(parts) + 1)]
    return list(dict.fromkeys(found))


def cpu_quota(cgroup: str = CGROUP, proc: str = PROC) -> float:
    """Return the cores' worth of time that this process may use; infinite without a limit."""
    return tightest_quota(cgroup, proc)[0]


def tightest_quota(cgroup: str = CGROUP, proc: str = PROC) -> tuple[float, str]:
    """Return (cores' worth of time, folder) of the group with the tightest processor quota; (inf, "") without one."""
    found = [(cores, str(folder)) for version, folder in groups("cpu", cgroup, proc)
             if (cores := _quota(folder, version)) is not None]
    return min(found, default=(float("inf"), ""))


def _quota(folder: Path, version: int) -> float | None:
    try:
        words = (folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).read_text().split()
        period = int(words[1] if len(words) > 1 else (folder / "cpu.cfs_period_us").read_text())
        return int(words[0]) / period if int(words[0]) > 0 and period > 0 else None
    except (OSError, ValueError, IndexError):  # "max" is no number: no limit
        return None


def throttled_periods(cgroup: str = CGROUP, proc: str = PROC) -> dict[str, tuple[int, int]]:
    """Return (periods, periods in which the processor time was used up) by file of each group with a quota."""
    found = {}
    for _, folder in groups("cpu", cgroup, proc):
        with contextlib.suppress(OSError):
            file = folder / "cpu.stat"
            counts = dict(re.findall(r"^(nr_periods|nr_throttled) (\d+)$", file.read_text(), re.MULTILINE))
            if int(counts.get("nr_periods", 0)):
                found[str(file.resolve())] = int(counts["nr_periods"]), int(counts.get("nr_throttled", 0))
    return found


def memory_limits(cgroup: str = CGROUP, proc: str = PROC) -> list[tuple[int, int]]:
    """Return (limit, use), in bytes, of each group with a limit of memory, outermost first.

    Pages of files that nobody has touched for long do not count as use: the kernel drops them on demand. memory.high
    slows down what goes beyond it so much that it is a limit, too.
    """
    two = (("memory.max", "memory.high"), "memory.current", "inactive_file")
    one = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    found: list[tuple[int, int]] = []
    for version, folder in groups("memory", cgroup, proc):
        limits, use, idle = two if version == 2 else one
        with contextlib.suppress(OSError, ValueError):
            used = int((folder / use).read_text()) - _number(folder / "memory.stat", idle)
            for limit in limits:
                with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                    found.append((int((folder / limit).read_text()), max(0, used)))
    return found


def oom_kills(cgroup: str = CGROUP, proc: str = PROC) -> int:
    """Return how many processes of this one's group the kernel has killed for memory; 0 where that is not known."""
    for version, folder in reversed(groups("memory", cgroup, proc)):
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        if file.exists():
            return _number(file, "oom_kill")
    return 0


def _number(file: Path, name: str) -> int:
    """Return the number behind ``name`` in a file of statistics; 0 without one."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
