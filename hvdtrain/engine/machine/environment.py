"""Where a run runs: versions, launcher, hosts, devices, and what its configuration changes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from hvdtrain.cluster.devices import cpu_facts
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.machine import software
from hvdtrain.cluster.machine.usage import Gpus
from hvdtrain.config import Config
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.units import format_bytes
from hvdtrain.engine.run import Run

PACKAGES = {"hvdtrain": "hvdtrain", "numpy": "numpy", "torch": "torch", "tensorflow": "tensorflow", "keras": "keras",
            "horovod": "horovod", "mpi4py": "mpi4py", "safetensors": "safetensors"}
"""Module -> distribution of what a training computes with."""


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that this process has imported; also of CUDA and driver on a GPU."""
    found = {}
    for module, distribution in PACKAGES.items():
        if module in sys.modules:
            found[module] = str(getattr(sys.modules[module], "__version__", "")) or _installed(distribution)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return {**found, "cuda": str(cuda)} if cuda else found


def _installed(distribution: str) -> str:
    """Its version as pip knows it; "" where it was not installed by pip."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def host_facts(on_gpu: bool, root: str = "/") -> dict[str, Any]:
    """Return of this rank's host: cpu, memory_bytes in all, kernel; and the GPUs' driver, None without a GPU."""
    memory_bytes = None
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path(root, "proc/meminfo").read_text(), re.MULTILINE)
        memory_bytes = int(found[1]) * 1024 if found else None
    except OSError:
        pass
    return {"cpu": cpu_facts().name, "memory_bytes": memory_bytes, "system": f"{platform.system()} "
            f"{platform.release()} {platform.machine()}", "driver": Gpus().driver() if on_gpu else None}


def differs(config: Config) -> dict[str, Any]:
    """Return key -> value of what is not at its default, with dots between section and key.

    >>> differs(Config(epochs=3))
    {'epochs': 3}
    """
    own, default = _flat(config.to_dict()), _flat(Config().to_dict())
    return {key: value for key, value in own.items() if key not in default or value != default[key]}


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(_flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {before + key: value})
    return found


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
