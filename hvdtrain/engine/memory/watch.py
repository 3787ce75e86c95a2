"""Most memory that this process has held, as the plans count it."""

from __future__ import annotations

from typing import Any

from hvdtrain import backends
from hvdtrain.cluster.machine import imported, memory


def peak_bytes(run: Any) -> int:
    """Return the most bytes so far: of a device what its allocator tells, of a host what is above the imports; or 0."""
    if run.devices[run.control.rank].kind != "cpu":
        return int(backends.load(run.spec.framework).peak_so_far())
    peak = memory.peak_resident_bytes()
    return max(0, peak - imported.bytes_()) if peak and imported.bytes_() else 0
