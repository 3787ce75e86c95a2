"""What this process holds and how busy it is, as the kernel tells it.

Owns the reading of /proc; a number that the system does not tell is None. A reading takes about
a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from hvdtrain.cluster.machine.cgroup import throttled_periods

_FIELD = re.compile(r"^(VmRSS|RssShmem|VmSwap|Threads):\s+(\d+)", re.MULTILINE)


def status(proc: str = "/proc") -> dict[str, int]:
    """Return VmRSS, RssShmem and VmSwap in bytes and Threads, those that the kernel tells.

    RssShmem are pages shared with other processes, such as ranks' gradients, that this one has touched.
    """
    with contextlib.suppress(OSError):
        found = _FIELD.findall(Path(proc, "self/status").read_text())
        return {name: int(number) * (1 if name == "Threads" else 1024) for name, number in found}
    return {}


class Process:
    """Reads this process; ``clock`` and ``busy`` give seconds, those of the wall and those of all its threads."""

    def __init__(self, proc: str = "/proc", clock: Any = time.monotonic, busy: Any = time.process_time,
                 cgroup: str = "/sys/fs/cgroup") -> None:
        self._proc, self._cgroup, self._clock, self._busy = proc, cgroup, clock, busy
        self._before = clock(), busy()
        self._periods = throttled_periods(cgroup, proc)

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
        before, self._periods = self._periods, throttled_periods(self._cgroup, self._proc)
        since = [(n - before.get(file, (0, 0))[0], stood - before.get(file, (0, 0))[1])
                 for file, (n, stood) in self._periods.items()]
        return max((round(100.0 * stood / n, 1) for n, stood in since if n > 0), default=None)
