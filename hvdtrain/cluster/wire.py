"""Which collectives carry the gradients of a job: the choice behind the key ``collectives``.

Owns the choice and its reasons. What the kinds are is in `hvdtrain.collectives` and the backends. The rule of ``auto``
looks at the job only (hosts, memory, what is built), never at a clock, so that a resumed run gets the same wire and
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hvdtrain.cluster import boot
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.protocols import Collectives, Control

BUILD = "run `python -m hvdtrain build`"


def open_wire(config: Config, framework: str, backend: Any, control: Control, topology: Topology,
              devices: Sequence[DeviceFacts], notes: list[str]) -> Collectives:
    """The collectives that ``config.collectives`` means here; what a user should know is added to ``notes``.

    auto: nothing in a world of one rank; memory that the ranks share where they are all on one host and the gradients
    lie in host memory outside a graph; else Horovod where it is built; else plain MPI. Collective.
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
            notes.append("collectives null: gradients are not exchanged, every rank trains its own model")
        return NullCollectives(control.rank, control.size)
    shares = kind == "auto" and not asks_horovod and _shares_memory(config, backend, control, topology)
    wire = _shared(config, control, notes) if shares or kind == "shared" else None
    if wire is None and kind in ("auto", "horovod"):
        wire = _horovod(config, framework, backend, control, notes)
    if wire is not None:
        return wire
    if options.hierarchical:
        raise UserError("exchange.hierarchical, but neither shared memory nor Horovod can be had: " + "; ".join(notes),
                        "one of them", f"{BUILD}, or leave exchange.hierarchical out")
    from hvdtrain.collectives.mpi import MpiCollectives

    return MpiCollectives(boot.mpi_comm(), timeout_s=config.control_timeout_s)


def _shares_memory(config: Config, backend: Any, control: Control, topology: Topology) -> bool:
    """Whether ``auto`` takes shared memory: gradients in host memory, one host or hierarchical sums over several."""
    near = len(topology.hosts) == 1 or config.exchange.hierarchical
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


def _horovod(config: Config, framework: str, backend: Any, control: Control, notes: list[str]) -> Collectives | None:
    """Horovod's collectives; None, with a note, where auto has to do without."""
    asked = config.collectives == "horovod" or config.exchange.adasum or config.exchange.autotune
    lacking = [r for r in control.gather(boot.horovod_reason(framework)) if r]
    if not lacking:
        try:
            wire = backend.collectives("horovod", control, config.exchange, partial(boot.start_horovod, where=control))
        except boot.HorovodUnavailable as error:
            lacking = [error.reason]
        else:
            if config.exchange.hierarchical and not wire.hierarchical:
                raise UserError("exchange.hierarchical with a Horovod that was built without NCCL, the only wire on "
                                "which it sums hierarchically", "a Horovod with NCCL, or collectives shared",
                                "set collectives: shared, or leave exchange.hierarchical out")
            return wire
    if asked:
        raise UserError(f"collectives horovod cannot be had: {lacking[0]}", "a Horovod built here", BUILD)
    notes.append(f"gradients go over plain MPI: {lacking[0]}")
    return None
