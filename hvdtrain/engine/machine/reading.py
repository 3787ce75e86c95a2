"""One rank's reading: its process, its memory by kind, its GPUs.

Owns what a reading holds. Never raises for what the machine does not tell: that is None. Nothing waits for a device.
"""

from __future__ import annotations

from typing import Any

from hvdtrain import backends
from hvdtrain.cluster.machine import usage
from hvdtrain.cluster.machine.memory import imported_bytes, peak_resident_bytes
from hvdtrain.cluster.machine.usage import Gpus
from hvdtrain.core.units import KINDS
from hvdtrain.engine.run import Run


class Reader:
    """Reads this rank of ``run``; made when its parts are there."""

    def __init__(self, run: Run) -> None:
        self._backend = backends.load(run.spec.framework)
        self._process = usage.Process()
        self._gpus = Gpus() if run.devices[run.control.rank].kind == "cuda" else None

    def reading(self, run: Run) -> dict[str, Any]:
        """Return this rank's part of the record "system" (`hvdtrain.core.records`)."""
        gpus = self._backend.allocators()
        found = {**self._process.reading(), "memory": memory(run, self._backend, gpus)}
        told = self._gpus.readings() if self._gpus is not None else []
        gpus = [{**(gpus[i] if i < len(gpus) else {}), **(told[i] if i < len(told) else {})}
                for i in range(max(len(gpus), len(told)))]
        return {**found, **(gpus[0] if gpus else {}), **({"more_gpus": gpus[1:]} if len(gpus) > 1 else {})}


def memory(run: Run, backend: Any, gpus: list[dict[str, Any]]) -> dict[str, int | None]:
    """Return bytes of this rank by kind (`hvdtrain.core.units`), as they lie there between two steps.

    ``activations``: on GPUs the most that was allocated beyond that; None on a CPU, whose heap does not tell.
    ``buckets``: what a compressor remembers, and pages shared with other ranks beside this one's gradients.
    ``workspace``: all that process (or GPU) holds beside, above what importing the framework took.
    """
    found: dict[str, int | None] = {**dict.fromkeys(KINDS), **backend.held(run.parts)}
    if found["gradients"] is None and run.dp.buckets and run.dp.retains:
        found["gradients"] = sum(b.nbytes for b in run.dp.buckets)
    status = usage.status()
    shared = status.get("RssShmem", 0) - (found["gradients"] or 0) if run.collectives.name == "shared" else 0
    found["buckets"] = run.dp.remembered_bytes() + max(0, shared)
    allocated = [gpu["allocated_bytes"] for gpu in gpus]
    if gpus:
        found["activations"] = sum(gpu["peak_bytes"] - gpu["allocated_bytes"] for gpu in gpus)
        held = sum(allocated)
    else:
        held = status.get("VmRSS", 0) - imported_bytes()
    known = sum(found[kind] or 0 for kind in ("parameters", "gradients", "state", "buckets"))
    found["workspace"] = max(0, held - known) if held > 0 else None
    return found


def peak_bytes(run: Run) -> int:
    """Return the most bytes so far: of a device what its allocator tells, of a host what is above the imports; or 0."""
    if run.devices[run.control.rank].kind != "cpu":
        return int(backends.load(run.spec.framework).peak_so_far())
    peak = peak_resident_bytes()
    return max(0, peak - imported_bytes()) if peak and imported_bytes() else 0
