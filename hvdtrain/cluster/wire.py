"""Which collectives carry the gradients of a job: the choice behind the key ``collectives``.

Owns the choice and its reasons. What the kinds are is in `hvdtrain.collectives` and the backends. The rule of ``auto``
looks at the job only (hosts, memory, devices, what is built), never at a clock, so that a resumed run gets the same
wire and the same bits. Whether gradients leave a GPU over host memory (`over_host`) is decided for the whole job: a
rank on the CPU then moves them in the same sequence, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hvdtrain.cluster import boot
from hvdtrain.cluster.devices import DeviceFacts, unlike
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.pipeline.settings import cut_over_ranks
from hvdtrain.protocols import Collectives, Control

BUILD = "run `python -m hvdtrain build`"


def open_wire(config: Config, framework: str, backend: Any, control: Control, topology: Topology,
              devices: Sequence[DeviceFacts], notes: list[str]) -> Collectives:
    """The collectives that ``config.collectives`` means here; what a user should know is added to ``notes``.

    auto: nothing in a world of one rank; memory that the ranks share where they are all on one host and the gradients
    lie in host memory outside a graph; else Horovod where it is built; else plain MPI. ``devices``: of the ranks, in
    order; a wire of host memory is staged (pinned, overlapped) where one of them is not a CPU. Collective.
    Errors: `UserError` on every rank where what was asked for cannot be had.
    """
    kind, options = config.collectives, config.exchange
    asks_horovod = [name for name in ("adasum", "autotune") if getattr(options, name)]
    if asks_horovod and kind != "auto" and kind != "horovod":
        raise UserError(f"exchange.{asks_horovod[0]} with collectives {kind}", "collectives horovod, which does it",
                        f"set collectives: horovod, or leave exchange.{asks_horovod[0]} out")
    if options.hierarchical and kind in ("mpi", "null"):
        raise UserError(f"exchange.hierarchical with collectives {kind}, which does not offer it",
                        "collectives shared, or a Horovod with NCCL", "set collectives: shared")
    if kind == "null" or (control.size == 1 and kind == "auto"):
        if control.size > 1:
            who = "copy" if cut_over_ranks(config) else "rank"
            notes.append(f"collectives null: gradients are not exchanged, every {who} trains its own model")
        return NullCollectives(control.rank, control.size)
    host = over_host(config, devices, notes)
    shares = kind == "auto" and not asks_horovod and _shares_memory(config, backend, control, topology)
    wire = _shared(config, control, notes) if shares or kind == "shared" else None
    if wire is None and kind == "auto" and cut_over_ranks(config):
        notes.append("gradients go over plain MPI: Horovod sums over all ranks of a job, and here those sum that hold "
                     "the same blocks")
    elif wire is None and kind in ("auto", "horovod"):
        wire = _horovod(config, framework, backend, control, topology, devices, host, notes)
    if wire is None:
        wire = _mpi(config, notes)
    stages = wire.host and any(d.kind != "cpu" for d in devices) and not control.agree(not boot.mpi_threads())
    return backend.stage(wire, control) if stages else wire


def over_host(config: Config, devices: Sequence[DeviceFacts], notes: list[str]) -> bool:
    """Whether every rank moves gradients over host memory though some have a GPU; auto's reason is added to ``notes``.

    auto: where devices are unlike (`hvdtrain.cluster.devices.unlike`), among which NCCL hangs or is missing. Pure.
    """
    if config.exchange_device == "device" or all(d.kind == "cpu" for d in devices):
        return False
    if config.exchange_device == "cpu":
        return True
    reason = unlike(devices)
    if reason:
        notes.append(f"gradients go over host memory: {reason} (exchange_device: device forbids it)")
    return bool(reason)


def _mpi(config: Config, notes: list[str]) -> Collectives:
    """Plain MPI, the last resort of auto."""
    if config.exchange.hierarchical:
        raise UserError("exchange.hierarchical, but neither shared memory nor Horovod can be had: " + "; ".join(notes),
                        "one of them", f"{BUILD}, or leave exchange.hierarchical out")
    from hvdtrain.collectives.mpi import MpiCollectives

    return MpiCollectives(boot.mpi_comm(), timeout_s=config.control_timeout_s)


def _shares_memory(config: Config, backend: Any, control: Control, topology: Topology) -> bool:
    """Whether ``auto`` takes shared memory: gradients in host memory, one host or hierarchical sums over several.

    Keras on TensorFlow takes BatchNorm's moments over ranks inside of its graph, which shared memory cannot.
    """
    near = len(topology.hosts) == 1 or config.exchange.hierarchical
    if config.sync_batchnorm and not getattr(backend, "SYNCS_OVER_HOST", True):
        return False
    return not control.agree(not backend.in_host_memory()) and near and boot.has_mpi()


def _shared(config: Config, control: Control, notes: list[str]) -> Collectives | None:
    """Shared memory within hosts; None, with a note, where auto has to do without."""
    from hvdtrain.collectives.shared import SharedCollectives, SharedUnavailable

    try:
        return SharedCollectives(boot.mpi_comm(), timeout_s=config.control_timeout_s)
    except SharedUnavailable as error:
        if config.collectives == "shared":
            raise UserError(f"collectives shared cannot be had: {error.reason}", "ranks of a host that see each "
                            "other's memory", "set collectives: auto") from None
        notes.append(f"no shared memory for gradients: {error.reason}")
        return None


def _horovod(config: Config, framework: str, backend: Any, control: Control, topology: Topology,
             devices: Sequence[DeviceFacts], host: bool, notes: list[str]) -> Collectives | None:
    """Horovod's collectives, over host memory where ``host``; None, with a note, where auto has to do without."""
    asked = config.collectives == "horovod" or config.exchange.adasum or config.exchange.autotune
    lacking = [r for r in control.gather(boot.horovod_reason(framework)) if r]
    if not lacking:
        wire, reason = _start_horovod(config, framework, backend, control, host)
        lacking = [r for r in control.gather(reason) if r]
        if not lacking:
            _check_horovod(config, wire, topology, devices, host)
            return wire
    if asked:
        raise UserError(f"collectives horovod cannot be had: {lacking[0]}", "a Horovod built here", BUILD)
    notes.append(f"gradients go over plain MPI: {lacking[0]}")
    return None


def _start_horovod(config: Config, framework: str, backend: Any, control: Control,
                   host: bool) -> tuple[Any, str | None]:
    """(Horovod's collectives, None) or (None, why this rank has none)."""
    start = partial(boot.start_horovod, where=control, over_host=host)
    try:
        return backend.collectives("horovod", control, config.exchange, start, over_host=host), None
    except boot.HorovodUnavailable as error:
        return None, error.reason


def _check_horovod(config: Config, wire: Any, topology: Topology, devices: Sequence[DeviceFacts], host: bool) -> None:
    """Refuse what Horovod would hang on, or leave undone without a word. Pure."""
    kinds = sorted({d.kind for d in devices})
    if not host and len(kinds) > 1:
        raise UserError(f"exchange_device: device with ranks on {' and '.join(kinds)}, between which Horovod moves "
                        "nothing", "devices of one kind, or gradients over host memory", "set exchange_device: auto")
    if not config.exchange.hierarchical:
        return
    if host:
        raise UserError("exchange.hierarchical with gradients over host memory, where Horovod does not sum "
                        "hierarchically", "gradients on the devices, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
    if not wire.hierarchical:
        raise UserError("exchange.hierarchical with a Horovod that was built without NCCL, the only wire on "
                        "which it sums hierarchically", "a Horovod with NCCL, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
    if not topology.homogeneous:
        raise UserError("exchange.hierarchical over Horovod with another number of ranks on one host than on another: "
                        f"{topology.describe()}", "the same number on every host, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
