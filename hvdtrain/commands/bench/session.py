"""Job for measuring a transport: starts as a run starts, without model and data. `hvdtrain.cluster.boot` starts MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import backends
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.topology import Topology, affinity, compute_threads, survey
from hvdtrain.comm.wires import open_wire
from hvdtrain.commands.bench import record
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts, launch_facts
from hvdtrain.core.protocols import Collectives, Control, Ops


@dataclass
class Session:
    """Control plane, transport and framework of a benchmark.

    ``facts``: mpi (its version) and settings (`record.settings`); of Horovod also nccl, mpi_enabled, and gpu (arrays
    lie on one).
    """

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
    """Start the job: control plane, framework, transport; collective.

    ``argv``: the options, equal on all ranks. Errors: `UserError` on every rank.
    """
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
    agreed(session.control, lambda: record.check(mine), "opening the file for records")
    facts = {"bench": bench, **record.environment(session.hosts, session.control.size, session.wire.name, None,
                                                  session.threads, session.framework)}
    return lambda row: record.append(mine, facts | row) if mine else None


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
    facts: dict[str, Any] = {"mpi": record.mpi_library(), "settings": record.settings(os.environ)}
    if wire.name == "horovod":
        hvd = horovod.start_horovod(framework, config.exchange, control)
        device = str(getattr(ops.zeros(1, "float32"), "device", "")).lower()
        facts |= {"nccl": bool(hvd.nccl_built()), "mpi_enabled": bool(hvd.mpi_enabled()),
                  "gpu": "cuda" in device or "gpu" in device}
    return facts
