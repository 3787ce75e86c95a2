"""What this process holds and how busy it is, as the kernel tells it.

Owns the reading of /proc and of processor quotas; a number that the system does not tell is None. A reading takes about
a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

_FIELD = re.compile(r"^(VmRSS|RssShmem|VmSwap|Threads):\s+(\d+)", re.MULTILINE)


def status(proc: str = "/proc") -> dict[str, int]:
    """Return VmRSS, RssShmem and VmSwap in bytes and Threads, those that the kernel tells.

    RssShmem are pages shared with other processes, such as ranks' gradients, that this one has touched.
    """
    with contextlib.suppress(OSError):
        found = _FIELD.findall(Path(proc, "self/status").read_text())
        return {name: int(number) * (1 if name == "Threads" else 1024) for name, number in found}
    return {}


def quotas(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> dict[str, tuple[int, int]]:
    """Return (periods, periods in which its processor time was used up) of each control group around this process.

    By the group's file; those without a quota, which count no periods, are left out (versions 2 and 1).
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number != "0" and "cpu" not in kinds.split(","):
                continue
            root = Path(cgroup, kinds) if number != "0" else Path(cgroup)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for i in range(len(parts) + 1):
                file = root.joinpath(*parts[:i], "cpu.stat")
                counts = _counts(file)
                if counts is not None:
                    found[str(file)] = counts
    return found


def _counts(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        told = dict(re.findall(r"^(nr_periods|nr_throttled) (\d+)$", file.read_text(), re.MULTILINE))
        if int(told.get("nr_periods", 0)):
            return int(told["nr_periods"]), int(told.get("nr_throttled", 0))
    return None


class Process:
    """Reads this process; ``clock`` and ``busy`` give seconds, those of the wall and those of all its threads."""

    def __init__(self, proc: str = "/proc", clock: Any = time.monotonic, busy: Any = time.process_time,
                 cgroup: str = "/sys/fs/cgroup") -> None:
        self._proc, self._cgroup, self._clock, self._busy = proc, cgroup, clock, busy
        self._before = clock(), busy()
        self._periods = quotas(proc, cgroup)

    def reading(self) -> dict[str, Any]:
        """Return rss_bytes, swap_bytes, threads; since the reading before cpu_percent (200: two busy cores) and
        quota_percent: of a quota's periods those in which it was used up, so that this process stood; None without one.
        """
        now, (then_s, then_busy_s) = (self._clock(), self._busy()), self._before
        self._before = now
        found = status(self._proc)
        percent = 100.0 * (now[1] - then_busy_s) / (now[0] - then_s) if now[0] > then_s else None
        return {"rss_bytes": found.get("VmRSS"), "swap_bytes": found.get("VmSwap"), "threads": found.get("Threads"),
                "cpu_percent": percent if percent is None else round(percent, 1), "quota_percent": self._stood()}

    def _stood(self) -> float | None:
        """Percent of periods in which the tightest quota around this process was used up."""
        before, self._periods = self._periods, quotas(self._proc, self._cgroup)
        since = [(n - before.get(file, (0, 0))[0], stood - before.get(file, (0, 0))[1])
                 for file, (n, stood) in self._periods.items()]
        return max((round(100.0 * stood / n, 1) for n, stood in since if n > 0), default=None)
