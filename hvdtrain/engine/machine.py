"""Host and device readings of a run: software and hardware versions, memory in use, floating point rates."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from hvdtrain import backends
from hvdtrain.cluster.devices import cpu_facts, meminfo
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.machine import software, usage
from hvdtrain.cluster.machine.memory import imported_bytes, peak_resident_bytes
from hvdtrain.cluster.machine.usage import Gpus
from hvdtrain.config import Config
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.records import flat
from hvdtrain.core.units import KINDS, format_bytes
from hvdtrain.engine.run import Run

PACKAGES = {"hvdtrain": "hvdtrain", "numpy": "numpy", "torch": "torch", "tensorflow": "tensorflow", "keras": "keras",
            "horovod": "horovod", "mpi4py": "mpi4py", "safetensors": "safetensors"}
"""Module -> distribution of what a training computes with."""


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that this process has imported; also of CUDA and driver on a GPU."""
    found = {}
    for module, distribution in PACKAGES.items():
        if module in sys.modules:
            own = str(getattr(sys.modules[module], "__version__", ""))
            found[module] = own or software.version_of(distribution) or ""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return {**found, "cuda": str(cuda)} if cuda else found


def host_facts(on_gpu: bool) -> dict[str, Any]:
    """Return of this rank's host: cpu, memory_bytes in all, kernel; and the GPUs' driver, None without a GPU."""
    return {"cpu": cpu_facts().name, "memory_bytes": meminfo().get("MemTotal"), "system": f"{platform.system()} "
            f"{platform.release()} {platform.machine()}", "driver": Gpus().driver() if on_gpu else None}


def differs(config: Config) -> dict[str, Any]:
    """Return key -> value of what is not at its default, with dots between section and key.

    >>> differs(Config(epochs=3))
    {'epochs': 3}
    """
    own, default = flat(config.to_dict()), flat(Config().to_dict())
    return {key: value for key, value in own.items() if key not in default or value != default[key]}


def environment(run: Run, facts_P: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the record "environment"; ``facts_P``: `host_facts` by rank."""
    hosts = [{"node": host.node, "ranks": list(host.ranks), "cores": host.cores, **facts_P[host.ranks[0]]}
             for host in run.topology.hosts]
    step, attempt = run.state.cursor.step, os.environ.get(causes.ATTEMPT, "")
    facts = launch_facts(os.environ)
    return {"versions": versions(), "python": platform.python_version(), "mpi": software.running(),
            "launcher": facts.launcher or facts.kind, "hosts": hosts,
            "devices": [f"{device.name} ({device.arch})" if device.kind == "cpu" else
                        f"{device.name} ({device.kind} {device.arch}, {format_bytes(device.memory_bytes)})"
                        for device in run.devices],
            "differs": differs(run.config), "resumed_from": step if run.config.resume and step else None,
            "attempt": int(attempt) if attempt.isdigit() else None}


SAMPLES = 2
"""Samples of the pass that is counted: operations grow in proportion."""

WARM_UP = 2
"""Steps before the whole run's utilisation is measured: tracing, allocation."""

Count = tuple[float | None, str]
"""(operations of one sample or None, why it is not known)."""


def peak(device: Any, kind: str, given_tflops: float, devices: int) -> tuple[float | None, str]:
    """Return (operations a second of ``devices``, source), by ``given_tflops`` or the table; (None, ""): unknown."""
    tflops = given_tflops or peak_tflops(device.name, kind)
    if not tflops:
        return None, ""
    several = f"{devices} x " if devices > 1 else ""
    return tflops * 1e12 * devices, (f"{several}{tflops:g} TFLOPS, " + (
        "key peak_tflops" if given_tflops else f"{kind} by the data sheet of {device.name}"))


def utilisation(samples: float, flops: float | None, peak_flops: float | None, seconds: float) -> float | None:
    """Return ``samples`` x ``flops`` a second as a part of the peak; None where one of them is not known.

    >>> utilisation(100, 3e9, 1e12, 1.0), utilisation(100, None, 1e12, 1.0)
    (0.3, None)
    """
    if flops is None or not peak_flops or seconds <= 0:
        return None
    return samples * flops / (seconds * peak_flops)


class Usage:
    """This rank's utilisation; made before the first step."""

    def __init__(self, run: Run, sample: Callable[[int], Any]) -> None:
        self._backend = backends.load(run.spec.framework)
        rank, given = run.control.rank, cast(Sequence[float], run.spelled.peak_tflops)
        device = run.devices[rank]
        devices = run.config.model_parallel if device.kind != "cpu" else 1
        self.peak_flops, self.source = peak(device, self._backend.product_type(run.parts), given[rank] if given else 0,
                                            devices)
        self._part = run.parts.layout is not None
        self.flops, self.why = self._before(run, sample) if self.peak_flops else (None, "no peak is known")
        self._begin = self._last = self._now(run)
        self._begun = False

    def _before(self, run: Run, sample: Callable[[int], Any]) -> Count:
        """Count by a pass, where the framework is counted so; it leaves nothing behind. Never raises."""
        if self._part:
            return None, "operations of a partitioned model are not counted"
        with run.parts.draws_kept():
            try:
                return self._backend.flops_of_pass(run.parts, sample(SAMPLES))  # type: ignore[no-any-return]
            except Exception as error:  # a user's model in a mode that it was not written for
                self._backend.out_of_memory(error)  # frees what was cached
                return None, f"{type(error).__name__}: {error}"

    def step_end(self, run: Run) -> None:
        if not self._begun and run.timeline.totals.steps >= WARM_UP:
            self._begun = True
            self._begin = self._last = self._now(run)

    def latest(self, run: Run, over_all: bool = False) -> float | None:
        """Return the utilisation since the call before, or with ``over_all`` since the first steps."""
        if self.flops is None and self.peak_flops and not self._part:
            self.flops, self.why = self._after(run)
        now, before = self._now(run), self._begin if over_all else self._last
        self._last = now
        return utilisation(now[0] - before[0], self.flops, self.peak_flops, now[1] - before[1])

    def _after(self, run: Run) -> Count:
        """Count in graphs of training, where the framework is counted so; what a pass has told stays."""
        try:
            found, why = self._backend.flops_of_graphs(run.parts, run.dp)
        except Exception as error:  # a graph of a shape that nobody thought of
            found, why = None, f"{type(error).__name__}: {error}"
        return found, why or self.why

    @staticmethod
    def _now(run: Run) -> tuple[int, float]:
        """Return (samples of this rank, seconds of training and of waiting for data) so far."""
        return run.timeline.totals.own_samples, run.timeline.totals.step_s + run.timeline.totals.seconds["data"]


TYPES = ("bf16", "fp16", "tf32", "fp32")
"""fp32: without tensor cores."""

TFLOPS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    ("GB200", (2500.0, 2500.0, 1250.0, 80.0)), ("B200", (2250.0, 2250.0, 1125.0, 75.0)),
    ("H200 NVL", (835.0, 835.0, 417.5, 60.0)), ("H200", (989.0, 989.0, 494.5, 67.0)),
    ("GH200", (989.0, 989.0, 494.5, 67.0)), ("H100 NVL", (835.0, 835.0, 417.5, 60.0)),
    ("H100 PCIe", (756.0, 756.0, 378.0, 51.0)), ("H100", (989.0, 989.0, 494.5, 67.0)),
    ("H800", (989.0, 989.0, 494.5, 67.0)), ("H20", (148.0, 148.0, 74.0, 44.0)),
    ("A100", (312.0, 312.0, 156.0, 19.5)), ("A800", (312.0, 312.0, 156.0, 19.5)),
    ("A40", (149.7, 149.7, 74.8, 37.4)), ("A30", (165.0, 165.0, 82.0, 10.3)), ("A10G", (70.0, 70.0, 35.0, None)),
    ("A10", (125.0, 125.0, 62.5, 31.2)), ("L40S", (362.0, 362.0, 183.0, 91.6)), ("L40", (181.0, 181.0, 90.5, 90.5)),
    ("L4", (121.0, 121.0, 60.0, 30.3)), ("V100 PCIE", (None, 112.0, None, 14.0)), ("V100", (None, 125.0, None, 15.7)),
    ("T4", (None, 65.0, None, 8.1)), ("RTX 4090", (165.2, 165.2, 82.6, 82.6)), ("RTX 3090", (71.0, 71.0, 35.6, 35.6)),
)
"""Tera-operations a second in each of `TYPES`, by words of the driver's name; the first that fits counts."""


def peak_tflops(device: str, kind: str = "bf16") -> float | None:
    """Return the peak of ``device`` for products in ``kind``, one of `TYPES`; None where the table has none.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA A100-SXM4-80GB", "fp32"), peak_tflops("Xeon")
    (989.0, 19.5, None)
    """
    words = f" {device.replace('-', ' ')} ".lower()
    row = next((peaks for name, peaks in TFLOPS if f" {name.lower()} " in words), None)
    return row[TYPES.index(kind)] if row is not None and kind in TYPES else None


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
