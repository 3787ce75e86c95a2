"""Build a run in one written order: the file to read to know what a run is made of.

The run's directory is made later, when a fit starts (`hvdtrain.checkpoint.run_directory.starting`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from hvdtrain import backends, reports
from hvdtrain import config as settings
from hvdtrain.backends.model_spec import Spec
from hvdtrain.checkpoint import remote
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.topology import Topology, survey
from hvdtrain.comm.wires import Wires
from hvdtrain.config import Config, run_length
from hvdtrain.core import torchvision_parts
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts, launch_facts
from hvdtrain.core.mesh import Mesh, depths_of, world
from hvdtrain.core.protocols import Collectives, Control, RunCallback, Schedule, Transform
from hvdtrain.core.records import RecordStream
from hvdtrain.core.resolve import load_callable
from hvdtrain.core.terminal import say
from hvdtrain.data import prepare
from hvdtrain.data.collate import check as check_collated
from hvdtrain.data.rows import note_of, rows_of
from hvdtrain.data.workers import start
from hvdtrain.engine import build_model, compare_ranks, first_sample, session
from hvdtrain.engine.build_model import Slowed
from hvdtrain.engine.callbacks.limits import check_start
from hvdtrain.engine.callbacks.order import in_order
from hvdtrain.engine.compare_ranks import check_config, check_parts, check_world
from hvdtrain.engine.memory_plan import settle
from hvdtrain.engine.memory_survey import scene_of
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import Findings, RunSetup, RunState, Services
from hvdtrain.engine.weight_checks import check_trainable
from hvdtrain.parallel import data_parallel
from hvdtrain.parallel.data_parallel.reducing import UnusedParameters
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.pipeline import over_ranks, plan
from hvdtrain.parallel.pipeline.over_ranks import Accumulate
from hvdtrain.parallel.precision import Precision, remarks, resolve
from hvdtrain.parallel.recovery import MemoryGuard, Recovering, Recovery
from hvdtrain.reports import trackers


def assemble(config: Config, model: Any = None, data: Any = None, control: Control | None = None,
             collectives: Collectives | None = None,
             more: Callable[[Run], list[RunCallback[Run]]] | None = None,
             eval_sets: Mapping[str, Any] = MappingProxyType({}),
             collate: Callable[[list[Any]], Any] | None = None) -> Run:
    """Return a run ready for `hvdtrain.engine.loop.fit`. Collective over all ranks of the job.

    ``model``: a model object, or None for ``config.model``. ``data``: whatever `hvdtrain.data.sources.interpret` takes,
    or None for ``config.data``. ``control``, ``collectives``: given by tests that run ranks as threads. ``more``: the
    caller's callbacks for this run. ``eval_sets``: evaluation data by name, beside those of ``config.eval``.
    ``collate``: a data collator; None: ``config.data.collate``. Errors: `UserError`, the same on every rank.
    """
    config.check()
    sets: dict[str, Any] = settings.eval_sets(config.eval)
    if both := sorted(sets.keys() & eval_sets.keys()):
        raise UserError(f"evaluation set {both[0]} is given to fit and by the key eval", "one of the two",
                        "rename one of them")
    sets |= eval_sets
    with start.early(prepare.may_need(config, data, sets)):
        return _assembled(config, model, RunData(data, sets, collate), control, collectives, more)


class RunData(NamedTuple):
    """Data of a run: ``data`` of the caller, or None for ``config.data``; ``eval_sets`` by name; a data collator."""

    data: Any
    eval_sets: Mapping[str, Any]
    collate: Callable[[list[Any]], Any] | None


@dataclass(frozen=True)
class Job:
    """The ranks of a job and the model that each has built, before data and parts. ``notes``: remarks so far."""

    facts: LaunchFacts
    control: Control
    spec: Spec
    backend: Any
    topology: Topology
    devices: list[DeviceFacts]
    notes: list[str]


def joined_job(config: Config, model: Any, control: Control | None, trains: bool = False) -> Job:
    """Start the control plane, build the model on every rank, and survey hosts and devices. Collective.

    ``trains``: a time limit that has passed ends the job.
    """
    settings.check_launcher(config, (facts := launch_facts(os.environ)).kind)
    if control is None:
        install_hooks(facts)
    if control is None and facts.kind != "gloo":
        control = boot.start_control(facts, config.control_timeout_s, devices_per_rank=build_model.devices_of(config),
                                     heartbeat_s=config.heartbeat_timeout_s)
    if control is not None:
        check_config(config, control)
        if trains:
            check_start(config, control)
    spec = build_model.model_of(config, model, facts, control)
    backend = backends.load(spec.framework)
    causes.mark("imported")
    memory.mark_imported()
    if control is None:  # horovodrun --gloo has no MPI: the control plane goes over Horovod, which needs the framework
        control = _gloo_control(spec.framework, config, facts)
    topology = survey(control)
    check_world(config, control)
    return Job(facts, control, spec, backend, topology, control.gather(backend.device_facts()), list(control.notes))


def _assembled(config: Config, model: Any, data: RunData, given: Control | None, collectives: Collectives | None,
               more: Callable[[Run], list[RunCallback[Run]]] | None) -> Run:
    job = joined_job(config, model, given, True)
    facts, control, spec, backend, notes = job.facts, job.control, job.spec, job.backend, job.notes
    topology, devices = job.topology, job.devices
    check_start(config, control)
    agreed(control, lambda: trackers.check_installed(config.trackers) if control.rank == 0 else None, "trackers")
    agreed(control, lambda: remote.fetch(config, notes.append) if control.rank == 0 else None, "storage")
    before = session.cut_before(config, spec.name, control, [device.name for device in devices])
    mesh = replace(mesh_of(config, control), before=before)
    spelled = compare_ranks.of_copies(config, compare_ranks.resolved_config(config, topology, devices, notes), mesh)
    wires = Wires(config, spec.framework, backend, control, topology, devices, collectives)
    wire = wires.first(notes)
    setup = settings.setup_of(config, spec, wire.name, facts.kind, model, data.data)
    notes += settings.notes(setup)
    build_model.seed_all(config, backend, 0)  # user code that shuffles or splits must do so alike on every rank
    collate = data.collate or agreed(control, lambda: prepare.collator(config), "data.collate")
    spec = (rows := rows_of(spec, collate)).of_model_file(spec)
    adapters, cores = (partial(backend.adapt_data, seed=config.seed, rows=rows),), topology.cores_of(control.rank)
    train, test, sets = agreed(control, lambda: prepare.read(config, data.data, adapters, cores, notes,
                                                             data.eval_sets), "data")
    check_start(config, control)
    agreed(control, lambda: check_collated(rows, train, test, *sets.values()), "data.collate")
    notes += torchvision_parts.notes()
    feed, eval_feeds = build_model.feeds_of(spelled, spec, mesh, control, train, test, sets)
    notes += [note] if (note := feed.walk.settle()) else []
    spelled = replace(spelled, metrics=build_model.measured(config, spec, feed, control, notes))
    at = session.position(config, spec.name, control)
    spelled = run_length.filled(spelled, feed.steps_per_epoch, notes, at, feed.steps_left(at))
    build_model.seed_all(config, backend, control.rank)
    precision = precision_of(spelled, control, devices, notes)
    parts = agreed(control, lambda: backend.make_parts(spec, spelled, control, wire, feed.steps_per_epoch or 0,
                                                       precision, feed.sample, feed.data, mesh), "model")
    feed.weigh(parts.batch_weight)
    if config.emulate_speed and config.emulate_speed[control.rank] < 1:
        parts.stage = Slowed(parts.stage, config.emulate_speed[control.rank])
    parts.transforms += agreed(control, lambda: transforms_of(config), "transforms")
    group = parts.replicas[0].group if parts.replicas else world(control.size, control.rank)
    recovery = _recovery(config, backend, control, notes)
    if devices[control.rank].kind == "cpu" and recovery.shrinks:  # else it would end a run on a forecast
        recovery.guard = MemoryGuard(len(topology.host_of(control.rank).ranks))
    pulse.role(plan.role(parts.layout))
    schedule = _schedule(parts, control, config, recovery)
    run = Run(RunSetup(config, group, topology, spec, parts, schedule, feed, eval_feeds, spelled, devices,
                       mesh if parts.layout is None else parts.layout.mesh, settings.idle(setup)),
              Services(control, wire, recovery=recovery), RunState(findings=Findings(notes)))
    run.wires = wires
    try:
        _complete(run, facts, backend, more)
    except BaseException:
        run.leave()
        raise
    return run


def _schedule(parts: ModelParts, control: Control, config: Config, recovery: Recovery) -> Schedule:
    """In which order a step's forwards and backwards are done; collective where the model is partitioned over ranks."""
    if parts.layout is not None:
        return over_ranks.join(parts, control, config, recovery)
    return Recovering(Accumulate(parts.stage, recovery.guard), parts.stage, recovery)


def _complete(run: Run, facts: LaunchFacts, backend: Any, more: Callable[[Run], list[RunCallback[Run]]] | None) -> None:
    control, parts, feed = run.control, run.parts, run.feed
    run.unused = UnusedParameters(parts, control)
    agreed(control, lambda: parts.install(collective=False), "transforms")
    check_parts(control, parts, run.setup.group)
    # Before the exchange is attached, so that the samples enter no collective, such as BatchNorm's over ranks.
    run.written.start(run, first_sample.check(run, backend))
    run.notes += [note] if (note := note_of(feed.data, run.spec.task is not None)) else []
    run.dp = agreed(control, lambda: data_parallel.create(data_parallel.DataParallelSetup(
        run.spelled, control, run.topology, run.setup.group, run.collectives, backend.Ops(), parts, run.notes,
        scene_of(run, backend))), "exchange")
    agreed(control, lambda: settle(run, backend), "remat")
    agreed(control, run.join, "exchange")
    if parts.facts is not None:
        parts.facts.renew()
    parts.buffers.share()
    if run.devices[control.rank].kind == "cuda":
        run.timeline.marks = backend.ranges()
    run.callbacks = in_order(run, more)
    if control.rank == 0:
        run.records = RecordStream(partial(reports.make, run, facts.kind != "solo"))
    if control.size > 1:
        bent = (*parts.caveats(), *run.dp.caveats, *run.written.caveats())
        run.notes += [f"not independent of the number of ranks: {caveat}" for caveat in bent]
    for text in run.notes if control.rank == 0 and run.config.progress != "off" else ():
        say(f"note: {text}")
    session.resume(run)
    causes.mark("loaded")
    agreed(control, lambda: check_trainable(parts), "checking the model")
    if feed.even_micros:
        agreed(control, lambda: parts.stage.spare(feed.sample(1, run.state.cursor)), "data")


def _gloo_control(framework: str, config: Config, facts: LaunchFacts) -> Control:
    try:
        hvd = horovod.start_horovod(framework, config.exchange, facts)
    except horovod.HorovodUnavailable as error:
        raise UserError(f"horovodrun --gloo needs Horovod for {framework}: {error.reason}", "a Horovod built here",
                        "run `python -m hvdtrain build`") from None
    control = boot.start_control(facts, config.control_timeout_s, hvd, build_model.devices_of(config),
                                 heartbeat_s=config.heartbeat_timeout_s)
    check_config(config, control)
    return control


def _recovery(config: Config, backend: Any, control: Control, notes: list[str]) -> Recovery:
    shrinks, because = config.on_oom == "shrink", "on_oom is stop"
    if shrinks and config.sync_batchnorm and control.size > 1:
        because = "with sync_batchnorm layers wait for other ranks within a micro-batch"
        notes.append(f"on_oom: a rank that runs out of memory in training ends the run, since {because}")
    return Recovery(backend.out_of_memory, backend.free_cached, shrinks and because == "on_oom is stop", shrinks,
                    because)


def precision_of(config: Config, control: Control, devices: list[DeviceFacts], notes: list[str]) -> Precision:
    """Return what every rank computes in; all ranks know all devices, so all come to the same or raise alike."""
    names = resolve(str(config.precision), devices)  # whose names have been spelled out
    notes += remarks(names, devices)
    return Precision(tuple(names), control.rank)


def transforms_of(config: Config) -> list[Transform]:
    """Return the user's transforms: each entry of ``config.transforms`` names a callable that makes one."""
    return [load_callable(text, "transforms")() for text in config.transforms]


def mesh_of(config: Config, control: Control) -> Mesh:
    """Return the replicas of the model; each rank has one where none is partitioned over ranks."""
    depths = depths_of(config.pipeline.stages, config.pipeline.depths, control.size)
    return Mesh.of(depths, control.rank)
