"""What NVIDIA's management library tells of the GPUs that this process is shown.

Owns the finding of those GPUs, and the words for what holds a clock down. pynvml is imported when GPUs are first asked
for, which nobody does on a CPU. What one GPU, driver or permission does not tell is None, and no other number is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.cluster.devices import usable

REASONS = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
    0x200: "board limit", 0x400: "reliability",
}
"""Bits of the reasons for a clock below its best, of nvml.h (nvmlClocksEventReason...); that of an idle GPU is none."""


def handles(env: Mapping[str, str]) -> tuple[Any, list[Any]]:
    """Return (pynvml, handles of the GPUs that ``env`` shows, in CUDA's order).

    Errors: whatever import, driver or permission raises.
    """
    import pynvml

    pynvml.nvmlInit()
    found = [pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
             for name in usable(env, pynvml.nvmlDeviceGetCount())]
    return pynvml, found


def total_bytes(env: Mapping[str, str] = os.environ) -> int:
    """Return the memory of the first GPU that ``env`` shows; 0 where it cannot be told."""
    try:
        nvml, found = handles(env)
        return int(nvml.nvmlDeviceGetMemoryInfo(found[0]).total)
    except Exception:  # noqa: BLE001  (no driver, no library and no permission read alike)
        return 0


def held_down(bits: int) -> list[str]:
    """Return in words what holds a GPU's clock down.

    >>> held_down(0x24), held_down(1)
    (['power cap', 'software thermal'], [])
    """
    return [words for bit, words in REASONS.items() if bits & bit]


class Gpus:
    """Reads the GPUs of this process; none where the library cannot be used, and ``why`` tells that."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self.why = ""
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml, self._handles = handles(env)
        except Exception as error:  # noqa: BLE001  (as above)
            self.why = f"{type(error).__name__}: {error}"

    def driver(self) -> str | None:
        """Return the driver's version."""
        found = _told(lambda: self._nvml.nvmlSystemGetDriverVersion())
        return found.decode() if isinstance(found, bytes) else found

    def readings(self) -> list[dict[str, Any]]:
        """Return of each GPU its utilisation, clock, what holds that down, temperature, power and memory in use.

        ``used_bytes`` is of all processes on it.
        """
        return [self._reading(handle) for handle in self._handles]

    def _reading(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons",  # its name since driver 535
                          None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = _told(lambda: reasons(handle))
        power_mw = _told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "utilisation_percent": _told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "sm_mhz": _told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "most_sm_mhz": _told(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "throttled": None if bits is None else held_down(bits),
            "temperature_c": _told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "power_w": None if power_mw is None else power_mw / 1000.0,
            "used_bytes": _told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        }


def _told(ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns; None where this GPU, driver or permission does not tell it."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  (NVMLError of many kinds, or a function that an old library lacks)
        return None
