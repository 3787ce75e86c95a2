"""``python -m hvdtrain plan --inventory``: time, memory, cost and energy on hardware that need not be here.

Reads the inventory, the catalogue and assumptions, measures the model here, and prints what
`hvdtrain.planning.hardware` makes of them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain import backends
from hvdtrain.cluster import boot
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.devices import cpu_facts
from hvdtrain.cluster.machine import memory
from hvdtrain.commands.plan import assumptions, tables
from hvdtrain.commands.plan.tables import command
from hvdtrain.commands.train import parse
from hvdtrain.config import Config, yaml_file
from hvdtrain.config import inventory as inventories
from hvdtrain.config.inventory import Inventory, InventoryHost, InventoryLinks
from hvdtrain.config.placed import RankPlace, absent, by_rank
from hvdtrain.config.sections import DataParallelConfig, PipelineConfig
from hvdtrain.core import ROOT, terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.protocols import Control
from hvdtrain.engine import calibration, memory_survey
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.run import Run
from hvdtrain.planning.hardware import alternatives
from hvdtrain.planning.hardware.alternatives import PlanLimits
from hvdtrain.planning.hardware.catalogue import CPU, Catalogue, Device, made_of
from hvdtrain.planning.hardware.estimate import SiteHost, TrainingSettings, estimate
from hvdtrain.planning.hardware.rates import Calibration, Rates
from hvdtrain.planning.hardware.workload import Workload
from hvdtrain.planning.memory.options import in_bf16

HERE = "here"
"""The inventory that is this job itself."""

OWN = ("--inventory", "--assume", "--samples", "--json", "--budget", "--deadline", "--mtbf", "--restart")
"""Options of the plan; the rest are train's."""

RESTART_S = 60.0
"""Seconds from a failure until training continues, by default."""

MEASURED_BATCH = 16
"""Samples of the global batch with which memory and operations are measured where the device is not here."""

MOST = 1e15
"""Bound of samples, amounts and hours."""


@dataclass(frozen=True)
class PlanRequest:
    """Options of the command. ``train``: options of the training, as written.

    ``mtbf_hours``: of hosts without one in the inventory. ``restart_s``: from a failure until training continues.
    """

    inventory: str
    assume: str
    samples: int
    target: str
    wishes: PlanLimits
    train: tuple[str, ...]
    mtbf_hours: float | None = None
    restart_s: float = RESTART_S

    @property
    def quiet(self) -> bool:
        """Return whether stdout is for the JSON alone."""
        return self.target == "-"


def request(argv: Sequence[str]) -> PlanRequest:
    """Return the options in ``argv``; `UserError` for a value that is none."""
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, given, value = word.partition("=")
        if name not in OWN:
            rest.append(word)
            continue
        value = value if given else next(words, "")
        if not value or value.startswith("--"):
            raise UserError(f"{name} has no value", f"one, such as {name} 100", f"add it to {name}")
        found[name] = value
    samples = _number(found, "--samples") or 0.0
    if samples != int(samples):
        raise UserError(f"--samples is {found['--samples']!r}", "a whole number of 1 or more", "correct --samples")
    return PlanRequest(found["--inventory"], found.get("--assume", ""), int(samples), found.get("--json", ""),
                   PlanLimits(_number(found, "--budget"), _number(found, "--deadline")), tuple(rest),
                   _number(found, "--mtbf"), _number(found, "--restart") or RESTART_S)


def _number(found: Mapping[str, str], name: str) -> float | None:
    if name not in found:
        return None
    try:
        value = float(found[name].replace("_", ""))
    except ValueError:
        value = -1.0
    if not 0 < value < MOST:
        raise UserError(f"{name} is {found[name]!r}", f"a number above 0 and below {MOST:g}", f"correct {name}")
    return value


def main(argv: Sequence[str]) -> int:
    """Plan as ``argv`` says; return the exit status. Collective where ranks were launched."""
    asked = request(argv)
    config = parse([*asked.train, *(("--progress", "off") if asked.quiet else ())])
    if config is None:
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    control = boot.start_control(launch_facts(os.environ), config.control_timeout_s)
    given, assumed, catalogue = agreed(control, lambda: _read(asked, control.rank == 0), "the inventory")
    here = PlannedHosts(config, control, catalogue, given, assumed, asked)
    calibrations: list[Calibration] = []
    if assumed is not None and assumed.model is not None:
        if given is None:
            raise UserError("--inventory here with an assumed model", "an inventory file", "name the file")
        workload, samples = assumed.workload(config.model, config.exchange.unmeasured_mb), asked.samples
    else:
        workload, calibrations, samples = here.measured()
        samples = asked.samples or samples
    agreed(control, lambda: _planned(asked, here, workload, calibrations, samples) if control.rank == 0 else None,
           "the plan")
    return 0


def _read(asked: PlanRequest, writes: bool) -> tuple[Inventory | None, assumptions.Assumed | None, Catalogue]:
    """Return the files; ``writes``: see now whether the plan can be written, before it is measured for."""
    if writes:
        tables.check_target(asked.target)
    given = None if asked.inventory == HERE else inventories.read(asked.inventory)
    assumed = assumptions.read(asked.assume) if asked.assume else None
    made = catalogue_here()
    if given is not None:
        for host in given.hosts:
            for _, name in host.devices:
                made.known(name, given.devices)
        if assumed is not None:
            assumed = assumed.for_devices(made, given)
        if asked.wishes.budget is not None:
            for host in given.hosts:
                given.price_of(host.name)
    elif asked.wishes.budget is not None:
        raise UserError("--budget with --inventory here, which has no prices", "an inventory file with prices",
                        "write hosts with price_per_hour into a file")
    return given, assumed, made


def catalogue_here() -> Catalogue:
    """Return the catalogue that is installed with hvdtrain."""
    return made_of(yaml_file.read(str(Path(ROOT, "config", "devices.yaml"))), memory.DEVICE_PART)


class PlannedHosts:
    """This job, and the inventory as hosts with devices. ``given``: None for the job itself."""

    def __init__(self, config: Config, control: Control, catalogue: Catalogue, given: Inventory | None,
                 assumed: assumptions.Assumed | None, asked: PlanRequest) -> None:
        self.config, self.control, self.catalogue = config, control, catalogue
        self.assumed, self._asked = assumed, asked
        self._cpu = f"{CPU} {cpu_facts().name}"
        self._given = given
        self._run: Run | None = None
        self.notes: list[str] = []
        self.epoch_samples = 0
        """Samples of an epoch; 0: unknown."""

    @property
    def currency(self) -> str:
        """Return the currency of the prices."""
        return self._given.currency if self._given else ""

    @property
    def links(self) -> InventoryLinks:
        """Return the links of the inventory."""
        return self._given.links if self._given else InventoryLinks()

    def hosts(self) -> list[SiteHost]:
        """Return the hosts of the plan."""
        if self._given is None:
            assert self._run is not None
            run = self._run
            return [SiteHost(host.node, tuple(self._local(run, rank) for rank in host.ranks),
                             mtbf_hours=self._asked.mtbf_hours) for host in run.topology.hosts]
        return alternatives.site([self._entry(host) for host in self._given.hosts])

    def _entry(self, host: InventoryHost) -> tuple[InventoryHost, list[tuple[int, Device]]]:
        assert self._given is not None
        local = self.control.node.partition(".")[0] in (host.name, host.name.partition(".")[0]) or (
            host.name == "localhost")
        devices = []
        for number, name in host.devices:
            device = self.catalogue.known(name, self._given.devices)
            if device.kind == "cpu":
                device = self._processor(device, host.ranks, local)
            devices.append((number, device))
        return replace(host, mtbf_hours=host.mtbf_hours or self._asked.mtbf_hours), devices

    def _processor(self, device: Device, ranks: int, local: bool) -> Device:
        """Return the processor of a host, under the name that calibrations have, with the memory of one of ``ranks``.
        """
        room = device.room_bytes // ranks if device.room_bytes else (
            memory.host_room_bytes(ranks) if local else None)
        return replace(device, name=self._cpu, room_bytes=room)

    def _local(self, run: Run, rank: int) -> Device:
        """Return the device of a rank of this job, with the memory that it has here."""
        facts = run.devices[rank]
        if facts.kind == "cpu":
            return self._processor(Device(CPU), len(run.topology.host_of(rank).ranks), True)
        found = self.catalogue.find(facts.name) or Device(facts.name, flops={run.parts.precision.own: 0.0})
        return replace(found, room_bytes=int(memory.DEVICE_PART * facts.memory_bytes) or found.room_bytes)

    def _own_devices(self) -> set[str]:
        """Return the names of the devices of the inventory; none for the job itself."""
        return {device.name for host in self.hosts() for device in host.devices} if self._given else set()

    def measured(self) -> tuple[Workload, list[Calibration], int]:
        """Measure the model, and the device of this job if the plan has such devices; collective.

        Return the workload, calibrations of all devices of the plan, and the samples of the configured training.
        """
        wanted = self._own_devices()
        config, control = self.config, self.control
        from hvdtrain.cluster.devices import count_gpus

        at_hand = self._given is None or self._cpu in wanted or count_gpus() > 0
        run = self._run = assemble(self._small(config, at_hand))
        try:
            scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
            local, kind = len(run.topology.host_of(control.rank).ranks), run.devices[control.rank].kind
            own = self._local(run, control.rank).name
            workload, found = calibration.measured_here(run, scene, own, list(run.dp.buckets) or scene.buckets(),
                                                        self._share(own, local, kind))
            name = calibration.key(run, scene.sample(1))
            self.epoch_samples = run.feed.samples or 0
            limits = (config.max_steps * config.global_batch, config.epochs * self.epoch_samples)
            samples = min([limit for limit in limits if limit], default=0)
        finally:
            run.leave()
        return workload, [c for device in sorted(wanted - {own}) for c in calibration.known(device, name)] + found, (
            samples)

    def _share(self, own: str, local: int, kind: str) -> int:
        """Return the samples of a rank with this job's device, in a plan that has ranks as here; 0: none, -1: any."""
        if self._given is None:
            return -1
        hosts = self.hosts()
        alike = [host for host in hosts if own in {d.name for d in host.devices}
                 and (kind != "cpu" or len(host.devices) == local)]
        return self.config.global_batch // sum(len(host.devices) for host in hosts) if alike else 0

    def _small(self, config: Config, at_hand: bool) -> Config:
        """Return the configuration to measure with: with the micro-batches of the plan where its device is here."""
        ranks = self.control.size
        total = sum(len(host.devices) for host in self.hosts()) if self._given else ranks
        batch = max(1, config.global_batch * ranks // total) if at_hand else min(
            config.global_batch, MEASURED_BATCH * ranks)
        precision = config.precision if at_hand else "fp32"
        off = replace(config.checkpoint, every="off", every_steps=0, every_s=0.0)
        return replace(config, balance="off", resume="", checkpoint=off, global_batch=max(ranks, batch), shares=[],
                       emulate_speed=[], peak_tflops=[], precision=precision, compression="none",
                       data_parallel=DataParallelConfig(), pipeline=PipelineConfig())

    def settings(self, workload: Workload) -> TrainingSettings:
        """Return the settings of the plan."""
        config = self.config
        zero = config.data_parallel.stage if config.data_parallel.name == "zero" else 0
        _refuse_unplanned(config)
        halves = config.precision in ("bf16", "fp16") and not self.assumed_model and (
            self._run is not None and self._run.parts.precision.own == "fp32")
        change = in_bf16 if halves else None
        remat = workload.recomputing() if self.assumed_model and config.remat != "off" else None
        again, saves = float(config.remat != "off"), config.checkpoint
        if config.sync_batchnorm and self.assumed_model:
            raise UserError("sync_batchnorm with a described model", "a model that is built, whose layers are known",
                            "leave sync_batchnorm out")
        return TrainingSettings(config.global_batch, str(config.precision), config.accumulate, config.balance != "off",
                                self._shares(), int(zero), config.compression, again, True, config.pipeline.stages,
                                remat[0] if remat else change, saves.every_steps, saves.every_s,
                                int(config.micro_batch), config.pipeline.micro_batches, config.sync_batchnorm,
                                self.epoch_samples, saves.every == "auto" and not (saves.every_steps or saves.every_s),
                                saves.mtbf_s, self._asked.restart_s)

    def _shares(self) -> tuple[float, ...]:
        """Return the share of each rank of the plan; () for equal ones. Names are those of its hosts and devices."""
        given = self.config.shares
        if not isinstance(given, Mapping):
            return tuple(float(share) for share in given)
        places = [RankPlace(host.name, _kind(device), device.name) for host in self.hosts() for device in host.devices]
        nodes = {place.node.lower() for place in places}
        named = {}
        for name, share in given.items():
            device = None if name.lower() in nodes else self.catalogue.find(name)
            named[device.name if device and device.name not in given else name] = share
        away = absent(named, places)
        if away:
            verb = "means" if len(away) == 1 else "mean"
            self.notes.append(f"shares: {', '.join(map(repr, away))} {verb} no rank of this plan")
        return tuple(by_rank("shares", named, places)) if named else ()

    @property
    def assumed_model(self) -> bool:
        """Return whether the model is described, not built."""
        return self.assumed is not None and self.assumed.model is not None


def _kind(device: Device) -> str:
    """Return the kind of a device, as a run of its framework calls it."""
    return "cpu" if device.kind == "cpu" else "rocm" if device.name.upper().startswith("MI") else "cuda"


def _refuse_unplanned(config: Config) -> None:
    """Raise `UserError` for values that change a training and that the plan leaves out."""
    data, pipeline = config.data_parallel, config.pipeline
    for what, bad in (("data_parallel.stage: auto", data.name == "zero" and data.stage == "auto"),
                      ("compression: auto", config.compression == "auto"),
                      ("micro_batch: auto", config.micro_batch == "auto"),
                      ("model_parallel", config.model_parallel > 1),
                      (f"data_parallel: {data.name}", data.name not in ("zero", "replicate")),
                      ("data_parallel.shards", bool(data.shards)),
                      ("precision by rank, host or device", len(config.precisions()) > 1),
                      ("rebalance.max_micro_batch", config.balance != "off" and bool(config.rebalance.max_micro_batch)),
                      ("emulate_speed", bool(config.emulate_speed)),
                      ("exchange.adasum", config.exchange.adasum),
                      ("exchange.hierarchical", config.exchange.hierarchical),
                      ("pipeline.depths", bool(pipeline.depths)),
                      ("pipeline.cut", bool(pipeline.cut)),
                      (f"pipeline.order: {pipeline.order}", pipeline.stages > 1 and pipeline.order != "1f1b")):
        if bad:
            raise UserError(f"a plan of hardware with {what}", "another value, which such a plan can estimate",
                            "leave the key out")


def _planned(asked: PlanRequest, here: PlannedHosts, workload: Workload, calibrations: Sequence[Calibration],
             samples: int) -> None:
    """Estimate, look for alternatives, print and write; on rank 0."""
    hosts, settings = here.hosts(), here.settings(workload)
    size = sum(len(host.devices) for host in hosts)
    if settings.global_batch < size:
        raise UserError(f"global_batch {settings.global_batch} for {count(size, 'rank')}", "a sample for each rank",
                        "raise --global_batch")
    if settings.shares and len(settings.shares) != size:
        raise UserError(f"shares has {len(settings.shares)} entries for {count(size, 'rank')}", "one for each",
                        "correct shares")
    rates = Rates(workload, calibrations, here.assumed.rates if here.assumed else None, here.links,
                  here.config.collectives)
    if not samples:
        raise UserError("the number of samples to train is not known", "--samples N, or epochs of a data set",
                        "add --samples")
    base = estimate(hosts, settings, rates, samples)
    found, left_out = alternatives.explored(base, hosts, settings, rates, here.catalogue, samples, asked.wishes,
                                            here.currency)
    best = alternatives.chosen(base, found, asked.wishes)
    words = _train_words(asked, samples, settings, here)
    line = shlex.join(alternatives.line_of(hosts, words))
    record = {**base.to_dict(), "line": line, "samples": samples, "currency": here.currency,
              "alternatives": [{"name": one.name, "reason": one.reason, "line": command(one, words),
                                "device": one.device, **one.outcome.to_dict()} for one in found],
              "left_out": left_out,
              "choice": None if best is None else {"name": "as given", "line": line} if isinstance(best, bool) else {
                  "name": best.name, "line": command(best, words)}}
    tables.write(asked.target, record)
    if not asked.quiet:
        for text in here.notes:
            terminal.note(text)
        tables.show(base, hosts, workload, settings, samples, here.currency, line, here.control.size > 1)
        tables.show_alternatives(found, left_out, here.currency, words)
        tables.show_choice(best, asked.wishes, here.currency, words)


def _train_words(asked: PlanRequest, samples: int, settings: TrainingSettings, here: PlannedHosts) -> list[str]:
    """Return the options of a training of so many samples."""
    words = list(asked.train)
    if asked.samples:
        words += ["--max_steps", str(-(-samples // settings.global_batch))]  # the last one of an option counts
        epochs = -(-samples // here.epoch_samples) if here.epoch_samples else 0
        if epochs > here.config.epochs:  # whichever ends first ends the run
            words += ["--epochs", str(epochs)]
    return words
