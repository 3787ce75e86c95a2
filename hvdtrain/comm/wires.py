"""Transports of a run's gradients: the rule behind the key ``collectives``, what is opened when, and what is given
back.

The rule of ``auto`` looks at the job only (hosts, memory, devices, quotas, what is built), never at a clock;
`hvdtrain.engine.callbacks.auto_wire` measures and may change what the rule took.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.devices import DeviceFacts, describe_difference
from hvdtrain.cluster.machine.usage import cpu_quota
from hvdtrain.cluster.topology import Topology, affinity
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.config import Config, cut_over_ranks
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ChangesTransport, Collectives, Control, DataParallel, Stage
from hvdtrain.planning.transport_choice import TransportJob, candidates, rationed

BUILD = "run `python -m hvdtrain build`"


class ExchangingParts(Protocol):
    """The parts of a model, as the transport sees them."""

    @property
    def stage(self) -> Stage:
        """Stage that runs forward and backward."""


class ExchangingRun(Protocol):
    """The members of a `hvdtrain.engine.run.Run` that a change of transport needs."""

    collectives: Collectives
    dp: DataParallel

    @property
    def parts(self) -> ExchangingParts:
        ...

    def note(self, text: str) -> None:
        """Keep a remark for the summary and the log, and print it on rank 0 now."""


def open_wire(config: Config, framework: str, backend: Any, control: Control, topology: Topology,
              devices: Sequence[DeviceFacts], notes: list[str]) -> Collectives:
    """Return the collectives that ``config.collectives`` means here, by rule (`Wires.first`). Collective."""
    return Wires(config, framework, backend, control, topology, devices).first(notes)


class Wires:
    """Transports of one run: opened when they are first asked for, kept, and given back. All of it is collective.

    ``given``: the one transport of tests that run ranks as threads. ``names``: those that auto may choose from by
    measuring, the one of its rule first; [] where there is nothing to choose. ``left_out``: why it may not take others.
    ``why``: the rule's reason.
    """

    def __init__(self, config: Config, framework: str, backend: Any, control: Control, topology: Topology,
                 devices: Sequence[DeviceFacts], given: Collectives | None = None) -> None:
        self._config, self._framework, self._backend, self._control = config, framework, backend, control
        self._topology, self._devices, self._given = topology, devices, given
        self._open: dict[str, Collectives] = {}
        self._found_horovod = False
        self.names: list[str] = []
        self.left_out: dict[str, str] = {}
        self.why = ""

    def first(self, notes: list[str]) -> Collectives:
        """Return the transport to begin with; what a user should know is added to ``notes``.

        auto: nothing in a world of one rank. Between CPUs that MPI connects, memory that the ranks share where some
        host has several, else plain MPI; Horovod is not started. Elsewhere Horovod where it is built, else plain MPI. A
        transport of host memory is staged (pinned, overlapped) where one of the ranks' devices is not a CPU. Errors:
        `UserError` on every rank where the requested transport is not available.
        """
        if self._given is not None:
            return self._given
        config, control = self._config, self._control
        kind, options = config.collectives, config.exchange
        asks_horovod = _refused(config)
        if kind == "null" or (control.size == 1 and kind == "auto"):
            if control.size > 1:
                who = "replica" if cut_over_ranks(config) else "rank"
                notes.append(f"collectives null: gradients are not exchanged, every {who} trains its own model")
            return NullCollectives(control.rank, control.size)
        host = over_host(config, self._devices, notes)
        near = len(self._topology.hosts) == 1 or options.hierarchical
        if kind == "auto" and not asks_horovod and not cut_over_ranks(config) and self._on_cpus():
            return self._by_rule(notes)
        shares = kind == "auto" and not asks_horovod and near and self._on_cpus()
        wire = self._shared(notes) if shares or kind == "shared" else None
        if wire is None and kind == "auto" and cut_over_ranks(config):
            notes.append("gradients go over plain MPI: Horovod sums over all ranks of a job, "
                         "here only ranks of the same stage sum")
        elif wire is None and kind in ("auto", "horovod"):
            wire = self._horovod(host, notes)
        if wire is None:
            wire = self._mpi(notes)
        return self._staged(self._agreed(wire, notes))

    def _on_cpus(self) -> bool:
        """Return whether gradients lie in host memory on all ranks, MPI connects them, and no graph waits for the sums.

        Keras on TensorFlow takes BatchNorm's moments over ranks inside its graph, which no transport of the host can.
        """
        if self._config.sync_batchnorm and not getattr(self._backend, "SYNCS_OVER_HOST", True):
            return False
        return not self._control.agree(not self._backend.in_host_memory()) and boot.has_mpi()

    def _by_rule(self, notes: list[str]) -> Collectives:
        config, control = self._config, self._control
        hosts = tuple(len(h.ranks) for h in self._topology.hosts)
        asked = config.exchange.hierarchical
        shared = self._shared(notes) if max(hosts) > 1 or asked else None
        known = self._framework in horovod.NATIVE
        reason = horovod.horovod_reason(self._framework) if known else f"Horovod has no support for {self._framework}"
        lacking = [r for r in control.gather(reason) if r]
        quotas = control.gather((control.node, cpu_quota(), len(affinity())))
        no_shared = notes[-1].partition(": ")[2] if shared is None and max(hosts) > 1 else ""
        job = TransportJob(hosts, no_shared, lacking[0] if lacking else "", rationed(quotas), config.sync_batchnorm)
        names, self.left_out = candidates(job)
        if asked:
            names = ["shared"] if shared is not None else ["mpi"]
            self.left_out = {name: "exchange.hierarchical is set" for name in ("mpi", "horovod")}
        if shared is not None:
            self._open["shared"] = self._agreed(shared, notes)
        self.names = names
        self.why = "all ranks are on one host" if len(hosts) == 1 else \
            "some host has several ranks" if max(hosts) > 1 else "no host has several ranks"
        wire, _ = self.get(names[0], notes)
        assert wire is not None
        return wire

    def get(self, name: str, notes: list[str] | None = None) -> tuple[Collectives | None, str]:
        """Return (a transport by its name, "") or (None, why it is not available), the same on every rank."""
        if name not in self._open:
            said = notes if notes is not None else []
            if name == "horovod":
                self._found_horovod = _runs_horovod(self._framework)
            wire = self._horovod(False, said) if name == "horovod" else \
                self._shared(said) if name == "shared" else self._mpi(said)
            if wire is None:
                return None, said[-1].partition(": ")[2]
            self._open[name] = self._agreed(wire, notes)
        return self._open[name], ""

    def use(self, run: ExchangingRun, name: str) -> str:
        """Have ``run`` exchange gradients over another transport from the next step on; entered between two steps.

        Made by `hvdtrain.parallel.data_parallel.replicate`. The transport that it leaves is given back. Returns why the
        other is not available, the same on every rank, or "".
        """
        wire, lacking = self.get(name)
        if wire is not None and wire is not run.collectives:
            before, run.collectives = run.collectives, wire
            note = cast(ChangesTransport, run.dp).use_wire(wire)
            run.parts.stage.connect(run.dp)
            self.give_back(before.name)
            if note:
                run.note(note)
        return lacking

    def give_back(self, name: str) -> None:
        """Shut Horovod down where it is not used: its thread looks for work all the time.

        Not one that was up already, of a script or another run; transports over MPI cost nothing and stay.
        """
        if name == "horovod" and self._open.pop(name, None) is not None and not self._found_horovod:
            horovod.stop_horovod(self._framework, self._config.control_timeout_s)

    def _agreed(self, wire: Collectives, notes: list[str] | None = None) -> Collectives:
        """Set ``overlaps`` and ``drives`` as all ranks can: buckets are cut by them, and must be alike."""
        if not wire.host or not self._control.agree(not wire.drives):
            return wire
        wire.overlaps = wire.drives = False
        if notes is not None and len(self._topology.hosts) > 1 and not boot.mpi_threads():
            notes.append("MPI has no MPI_THREAD_MULTIPLE: gradients are exchanged "
                         "only while a rank waits for them")
        return wire

    def _staged(self, wire: Collectives) -> Collectives:
        """Stage ``wire`` under gradients of GPUs, where some rank has one and MPI lets two threads in."""
        if not (wire.host and any(d.kind != "cpu" for d in self._devices)):
            return wire
        return wire if self._control.agree(not boot.mpi_threads()) else self._backend.stage(wire, self._control)

    def _mpi(self, notes: list[str]) -> Collectives:
        if self._config.exchange.hierarchical:
            raise UserError("exchange.hierarchical, but neither shared memory nor Horovod is available: "
                            "" + "; ".join(notes), "one of them", f"{BUILD}, or leave exchange.hierarchical out")
        from hvdtrain.comm.collectives.mpi import MpiCollectives

        return MpiCollectives(boot.mpi_comm(), timeout_s=self._config.control_timeout_s)

    def _shared(self, notes: list[str]) -> Collectives | None:
        """Return shared memory within hosts; None, with a note, where auto has to do without."""
        from hvdtrain.comm.collectives.shared import SharedCollectives, SharedUnavailable

        try:
            return SharedCollectives(boot.mpi_comm(), timeout_s=self._config.control_timeout_s)
        except SharedUnavailable as error:
            if self._config.collectives == "shared":
                raise UserError(f"collectives shared is not available: {error.reason}", "ranks of a host that see each "
                                "other's memory", "set collectives: auto") from None
            notes.append(f"no shared memory for gradients: {error.reason}")
            return None

    def _horovod(self, host: bool, notes: list[str]) -> Collectives | None:
        """Return Horovod's collectives, over host memory where ``host``; None, with a note, where auto has none."""
        config, control, framework = self._config, self._control, self._framework
        asked = config.collectives == "horovod" or config.exchange.adasum or config.exchange.autotune
        lacking = [r for r in control.gather(horovod.horovod_reason(framework)) if r]
        if not lacking:  # a rank whose Horovod does not load would have the others wait in its start
            lacking = [r for r in control.gather(_does_not_load(framework)) if r]
        if not lacking:
            start, wire, reason = partial(horovod.start_horovod, where=control, over_host=host), None, None
            try:
                wire = self._backend.collectives("horovod", control, config.exchange, start, over_host=host)
            except horovod.HorovodUnavailable as error:
                reason = error.reason
            lacking = [r for r in control.gather(reason) if r]
            if not lacking:
                _check_horovod(config, wire, self._topology, self._devices, host)
                return wire
        if asked:
            raise UserError(f"collectives horovod is not available: {lacking[0]}", "a Horovod built here", BUILD)
        notes.append(f"gradients go over plain MPI: {lacking[0]}")
        return None


def _runs_horovod(framework: str) -> bool:
    hvd = sys.modules.get(f"horovod.{framework}")
    return hvd is not None and bool(hvd.is_initialized())


def _refused(config: Config) -> bool:
    """Return whether an option asks for Horovod; `UserError` for keys that contradict each other. Pure."""
    kind, options = config.collectives, config.exchange
    asks_horovod = [name for name in ("adasum", "autotune") if getattr(options, name)]
    if asks_horovod and kind not in ("auto", "horovod"):
        raise UserError(f"exchange.{asks_horovod[0]} with collectives {kind}", "collectives horovod, which supports it",
                        f"set collectives: horovod, or leave exchange.{asks_horovod[0]} out")
    if options.hierarchical and kind in ("mpi", "null"):
        raise UserError(f"exchange.hierarchical with collectives {kind}, which does not offer it",
                        "collectives shared, or a Horovod with NCCL", "set collectives: shared")
    return bool(asks_horovod)


def over_host(config: Config, devices: Sequence[DeviceFacts], notes: list[str]) -> bool:
    """Return whether every rank moves gradients over host memory though some have a GPU; with auto's reason in
    ``notes``.

    auto: where devices differ (`describe_difference`), among which NCCL hangs or is missing. Decided for
    the whole job: a rank on the CPU then moves them in the same sequence, without a copy. Pure.
    """
    if config.exchange_device == "device" or all(d.kind == "cpu" for d in devices):
        return False
    if config.exchange_device == "cpu":
        return True
    reason = describe_difference(devices)
    if reason:
        notes.append(f"gradients go over host memory: {reason} (exchange_device: device forbids it)")
    return bool(reason)


def _does_not_load(framework: str) -> str | None:
    try:
        horovod.load_horovod(framework)
    except horovod.HorovodUnavailable as error:
        return error.reason
    return None


def _check_horovod(config: Config, wire: Any, topology: Topology, devices: Sequence[DeviceFacts], host: bool) -> None:
    """Raise `UserError` for what Horovod would hang on, or leave undone without a word. Pure."""
    kinds = sorted({d.kind for d in devices})
    if not host and len(kinds) > 1:
        raise UserError(f"exchange_device: device with ranks on {' and '.join(kinds)}, between which "
                        "Horovod has no transport", "devices of one kind, or gradients over host "
                                                    "memory", "set exchange_device: auto")
    if not config.exchange.hierarchical:
        return
    if host:
        raise UserError("exchange.hierarchical with gradients over host memory, where Horovod does not sum "
                        "hierarchically", "gradients on the devices, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
    if not wire.hierarchical:
        raise UserError("exchange.hierarchical with a Horovod that was built without NCCL, the only "
                        "transport on which Horovod sums hierarchically", "a Horovod with NCCL, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
    if not topology.homogeneous:
        raise UserError("exchange.hierarchical over Horovod with different numbers of ranks per host: "
                        f"{topology.describe()}", "the same number on every host, or collectives shared",
                        "set collectives: shared, or leave exchange.hierarchical out")
