"""Use of a rank's host and GPUs: this process' memory, threads and processor time from /proc, GPUs from NVIDIA's
library. pynvml is imported when GPUs are first asked for.

A number that the system does not report is None.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.cluster.devices import usable

REASONS = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
    0x200: "board limit", 0x400: "reliability",
}
"""Bits of the reasons for a clock below its best, of nvml.h (nvmlClocksEventReason...); that of an idle GPU is none."""


def handles(env: Mapping[str, str]) -> tuple[Any, list[Any]]:
    """Return (pynvml, handles of the GPUs that ``env`` shows, in CUDA's order); raises what these raise."""
    import pynvml

    pynvml.nvmlInit()
    found = [pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
             for name in usable(env, pynvml.nvmlDeviceGetCount())]
    return pynvml, found


def total_bytes(env: Mapping[str, str] = os.environ) -> int:
    """Return the memory of the first GPU that ``env`` shows; 0 where it is unknown."""
    try:
        nvml, found = handles(env)
        return int(nvml.nvmlDeviceGetMemoryInfo(found[0]).total)
    except Exception:  # no driver, no library and no permission read alike
        return 0


def throttle_reasons(bits: int) -> list[str]:
    """Return the reasons that slow a GPU's clock down.

    >>> throttle_reasons(0x24), throttle_reasons(1)
    (['power cap', 'software thermal'], [])
    """
    return [words for bit, words in REASONS.items() if bits & bit]


class Gpus:
    """GPUs of this process; none where the library cannot be used, for the reason ``why``."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self.why = ""
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml, self._handles = handles(env)
        except Exception as error:  # as above
            self.why = f"{type(error).__name__}: {error}"

    def driver(self) -> str | None:
        found = _value(lambda: self._nvml.nvmlSystemGetDriverVersion())
        return found.decode() if isinstance(found, bytes) else found

    def readings(self) -> list[dict[str, Any]]:
        """Return each GPU's utilisation, clock, slowing reasons, temperature, power and ``used_bytes`` of all."""
        return [self._reading(handle) for handle in self._handles]

    def _reading(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons",  # its name since driver 535
                          None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = _value(lambda: reasons(handle))
        power_mw = _value(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "utilisation_percent": _value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "sm_mhz": _value(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "most_sm_mhz": _value(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "throttled": None if bits is None else throttle_reasons(bits),
            "temperature_c": _value(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "power_w": None if power_mw is None else power_mw / 1000.0,
            "used_bytes": _value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        }


def _value(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # NVMLError of many kinds, or a function that an old library lacks
        return None


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
        before, self._periods = self._periods, throttled_periods(self._cgroup, self._proc)
        since = [(n - before.get(file, (0, 0))[0], stood - before.get(file, (0, 0))[1])
                 for file, (n, stood) in self._periods.items()]
        return max((round(100.0 * stood / n, 1) for n, stood in since if n > 0), default=None)


CGROUP, PROC = "/sys/fs/cgroup", "/proc"


def groups(controller: str, cgroup: str = CGROUP, proc: str = PROC) -> list[tuple[int, Path]]:
    """Return (version, folder) of control groups with ``controller`` around this process, outermost first."""
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
        if os.access(file, os.R_OK):  # unlike `Path.exists` it raises nothing where a folder is closed
            return _number(file, "oom_kill")
    return 0


def _number(file: Path, name: str) -> int:
    """Return the number behind ``name`` in a file of statistics; 0 without one."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
