"""Builds a run in one fixed order: the file to read to know what a run is made of.

The order: config, boot and control plane, topology and group, model blocks, devices, wire (`hvdtrain.comm.wires`),
data, precision, the model's parts (stage, parameters, optimizer, transforms), the comparison of the ranks' models, a
first sample through model, loss and metrics, data parallelism with buckets and compressor
(`hvdtrain.parallel.data_parallel`), initial weights, callbacks, restore. The run's directory is made when a fit starts
(`hvdtrain.checkpoint.run_directory.starting`); the parts of a batch (`balance`) are planned then, by a callback. A
model that is split over devices is cut while its parts are made, before its exchange, so that no bucket spans two
devices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain import backends, reports
from hvdtrain.backends import transforms
from hvdtrain.backends.model_spec import Spec, build_spec, spec_of
from hvdtrain.checkpoint.run_directory import COMPLETED, find_out
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.cluster.in_turn import in_turn
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.cluster.machine import imported
from hvdtrain.cluster.topology import affinity, compute_threads, survey
from hvdtrain.cluster.views import voices
from hvdtrain.comm.wires import Wires
from hvdtrain.config import Config, run_length, schema, unused
from hvdtrain.config import pipeline as settings
from hvdtrain.config.pipeline import cut_over_ranks
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.group import world
from hvdtrain.core.launcher import LaunchFacts, launch_facts
from hvdtrain.core.mesh import Mesh, depths_of
from hvdtrain.core.protocols import Callback, Collectives, Control, Schedule
from hvdtrain.core.records.stream import Stream
from hvdtrain.core.terminal import say
from hvdtrain.data import prepare
from hvdtrain.data.feed import Feed
from hvdtrain.data.rows import note_of, rows_of
from hvdtrain.data.workers import choose, start
from hvdtrain.engine import first_sample, per_rank
from hvdtrain.engine.balance.emulate import Slowed
from hvdtrain.engine.callbacks.order import in_order
from hvdtrain.engine.compare_ranks import check_parts
from hvdtrain.engine.guards.finite import check_trainable
from hvdtrain.engine.memory.settle import settle
from hvdtrain.engine.memory.survey import scene_of
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import Findings, Services, Setup, State
from hvdtrain.engine.saving import session
from hvdtrain.parallel import data_parallel
from hvdtrain.parallel.data_parallel.unused import UnusedParameters
from hvdtrain.parallel.parts import Parts
from hvdtrain.parallel.pipeline import over_ranks, words
from hvdtrain.parallel.pipeline.accumulate import Accumulate
from hvdtrain.parallel.precision import policy
from hvdtrain.parallel.precision.policy import Precision
from hvdtrain.parallel.recovery.guard import Guard
from hvdtrain.parallel.recovery.recovery import Recovery
from hvdtrain.parallel.recovery.schedule import Recovering
from hvdtrain.reports import trackers


def assemble(config: Config, model: Any = None, data: Any = None, control: Control | None = None,
             collectives: Collectives | None = None, more: Callable[[Run], list[Callback[Run]]] | None = None) -> Run:
    """Return a run ready for `hvdtrain.engine.loop.fit`. Collective over all ranks of the job.

    ``model``: a model object, or None for ``config.model``. ``data``: whatever `hvdtrain.data.sources.interpret` takes,
    or None for ``config.data``. ``control``, ``collectives``: given by tests that run ranks as threads. ``more``: the
    caller's callbacks for this run.
    Errors: `UserError`, the same on every rank.
    """
    config.check()
    with start.early(choose.may_need(config, data)):
        return _assembled(config, model, data, control, collectives, more)


def _assembled(config: Config, model: Any, data: Any, control: Control | None, collectives: Collectives | None,
               more: Callable[[Run], list[Callback[Run]]] | None) -> Run:
    settings.check_launcher(config, (facts := launch_facts(os.environ)).kind)
    if control is None:
        install_hooks(facts)
    if control is None and facts.kind != "gloo":
        control = boot.start_control(facts, config.control_timeout_s, devices_per_rank=_devices(config),
                                     heartbeat_s=config.heartbeat_timeout_s)
    if control is not None:
        _check_alike(config, control)
    spec = _model(config, model, facts, control)
    backend = backends.load(spec.framework)
    causes.mark("imported")
    imported.mark()
    if control is None:  # horovodrun --gloo has no MPI: the control plane goes over Horovod, which needs the framework
        control = _gloo_control(spec.framework, config, facts)
    topology = survey(control)
    _check_world(config, control)
    agreed(control, lambda: trackers.check_installed(config.trackers) if control.rank == 0 else None, "trackers")
    notes = list(getattr(control, "notes", []))
    devices = control.gather(backend.device_facts())
    before = session.cut_before(config, spec.name, control, [device.name for device in devices])
    mesh = replace(_mesh(config, control), before=before)
    spelled = per_rank.of_copies(config, per_rank.spelled_out(config, topology, devices, notes), mesh)
    wires = Wires(config, spec.framework, backend, control, topology, devices, collectives)
    wire = wires.first(notes)
    setup = unused.setup_of(config, spec, wire.name, facts.kind, model, data)
    notes += unused.notes(setup)
    _seed(config, backend, 0)  # user code that shuffles or splits must do so alike on every rank
    rows = rows_of(spec)
    spec = rows.of_model_file(spec)
    adapters, cores = (partial(backend.adapt_data, seed=config.seed, rows=rows),), topology.cores_of(control.rank)
    train, test = agreed(control, lambda: prepare.read(config, data, adapters, cores, notes), "data")
    feed, test_feed = _feeds(spelled, spec, mesh, control, train, test)
    at = session.position(config, spec.name, control)
    spelled = run_length.filled(spelled, feed.steps_per_epoch, notes, at, feed.steps_left(at))
    _seed(config, backend, control.rank)
    precision = _precision(spelled, control, devices, notes)
    parts = agreed(control, lambda: backend.make_parts(spec, spelled, control, wire, feed.steps_per_epoch or 0,
                                                       precision, feed.sample, feed.data, mesh), "model")
    feed.weigh(parts.batch_weight)
    if config.emulate_speed and config.emulate_speed[control.rank] < 1:
        parts.stage = Slowed(parts.stage, config.emulate_speed[control.rank])
    parts.transforms += agreed(control, lambda: transforms.own(config), "transforms")
    group = parts.replicas[0].group if parts.replicas else world(control.size, control.rank)
    recovery = _recovery(config, backend, control, notes)
    if devices[control.rank].kind == "cpu" and recovery.shrinks:  # else it would end a run on a forecast
        recovery.guard = Guard(len(topology.host_of(control.rank).ranks))
    pulse.role(words.role(parts.layout))
    schedule = _schedule(parts, control, config, recovery)
    run = Run(Setup(config, group, topology, spec, parts, schedule, feed, test_feed, spelled, devices,
                    mesh if parts.layout is None else parts.layout.mesh, unused.idle(setup)),
              Services(control, wire, recovery=recovery), State(findings=Findings(notes)))
    run.wires = wires
    try:
        _complete(run, facts, backend, more)
    except BaseException:
        run.leave()
        raise
    return run


def _schedule(parts: Parts, control: Control, config: Config, recovery: Recovery) -> Schedule:
    """In which order a step's forwards and backwards are done; collective where the model is cut over ranks."""
    if parts.layout is not None:
        return over_ranks.join(parts, control, config, recovery)
    return Recovering(Accumulate(parts.stage, recovery.guard), parts.stage, recovery)


def _complete(run: Run, facts: LaunchFacts, backend: Any, more: Callable[[Run], list[Callback[Run]]] | None) -> None:
    """Data parallelism, initial weights, callbacks, restore."""
    control, parts, feed = run.control, run.parts, run.feed
    run.unused = UnusedParameters(parts, control)
    agreed(control, lambda: parts.install(collective=False), "transforms")
    check_parts(control, parts, run.setup.group)
    # Before the exchange is attached, so that the samples enter no collective, such as BatchNorm's over ranks.
    run.written.start(run, first_sample.check(run, backend))
    run.notes += [note] if (note := note_of(feed.data, run.spec.task is not None)) else []
    run.dp = agreed(control, lambda: data_parallel.create(data_parallel.Setup(
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
        run.records = Stream(partial(reports.make, run, facts.kind != "solo"))
    if control.size > 1:
        bent = (*parts.caveats(), *run.dp.caveats, *run.written.caveats())
        run.notes += [f"not independent of the number of ranks: {caveat}" for caveat in bent]
    for text in run.notes if control.rank == 0 and run.config.progress != "off" else ():
        say(f"note: {text}")
    _restore(run)
    causes.mark("loaded")
    agreed(control, lambda: check_trainable(parts), "checking the model")
    if feed.even_micros:
        agreed(control, lambda: parts.stage.spare(feed.sample(1, run.state.cursor)), "data")


def _model(config: Config, model: Any, facts: LaunchFacts, control: Control | None) -> Spec:
    """The model with its file's functions; all ranks have one, or all fail alike."""
    threads = 1 if model is not None else _threads(config, facts, control)  # collective: before anybody takes turns

    def make() -> Spec:
        if model is not None:
            return spec_of(model)
        text = backends.built_in_model() if config.model == "auto" else config.model
        return build_spec(text, config.model_args, partial(_prepare, config, threads),
                          partial(_building, config), partial(_outline, config))
    pulse.at("model")
    if control is None:
        return make()
    return in_turn(control, make, "model") if cut_over_ranks(config) else agreed(control, make, "model")


def _building(config: Config) -> Any:
    """Where a model is built: in host memory, if no one device may hold all of it."""
    over_ranks = settings.cut_over_ranks(config)
    if (config.model_parallel > 1 or over_ranks) and "tensorflow" in backends.imported():
        return backends.load("tensorflow").building(config.model_parallel, over_ranks)
    return contextlib.nullcontext()


def _outline(config: Config) -> Any:
    """What builds a model without its values, which no rank holds all of where it is cut over ranks; or None."""
    if cut_over_ranks(config) and "torch" in backends.imported():
        return backends.load("torch").outline
    return None


def _threads(config: Config, facts: LaunchFacts, control: Control | None) -> int:
    """Compute threads of this rank. Collective where there is a control plane."""
    if control is None:
        return compute_threads(len(affinity()), os.cpu_count() or 1, max(1, facts.local_size), config.threads)
    host = survey(control).host_of(control.rank)
    return compute_threads(len(affinity()), host.cores, len(host.ranks), config.threads)


def _prepare(config: Config, threads: int) -> None:
    """Set up and seed each framework that has been imported, before the model is built: the same seed on all ranks."""
    rng.seed(config.seed, 0)
    for name in backends.imported():
        backend = backends.load(name)
        backend.setup(threads, config.deterministic, _devices(config))
        backend.seed(config.seed, 0)
        imported.mark()


def _devices(config: Config) -> int:
    """Devices that each rank owns."""
    return config.devices_per_rank or config.model_parallel


def _seed(config: Config, backend: Any, rank: int) -> None:
    """Every generator, from (seed, rank)."""
    rng.seed(config.seed, rank)
    backend.seed(config.seed, rank)


def _gloo_control(framework: str, config: Config, facts: LaunchFacts) -> Control:
    try:
        hvd = horovod.start_horovod(framework, config.exchange, facts)
    except horovod.HorovodUnavailable as error:
        raise UserError(f"horovodrun --gloo needs Horovod for {framework}: {error.reason}", "a Horovod built here",
                        "run `python -m hvdtrain build`") from None
    control = boot.start_control(facts, config.control_timeout_s, hvd, _devices(config),
                                 heartbeat_s=config.heartbeat_timeout_s)
    _check_alike(config, control)
    return control


def _check_alike(config: Config, control: Control) -> None:
    """Every rank must have read the same configuration; before the model is made, whose exchanges go by it."""
    digests = control.gather(config.digest())
    other = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if other is not None:
        raise UserError(f"rank {other} read another configuration than rank 0", "the same on every rank",
                        "compare the config file, environment and arguments on their hosts")


def _check_world(config: Config, control: Control) -> None:
    """The shares and other keys of ranks must fit the world."""
    copies = len(depths_of(config.pipeline.stages, config.pipeline.depths, control.size))
    if config.shares and not isinstance(config.shares, Mapping) and len(config.shares) != copies:
        raise UserError(f"shares has {count(len(config.shares), 'entry', 'entries')} for {copies} "
                        + ("ranks" if copies == control.size else "copies of the model"),
                        "one per " + ("rank" if copies == control.size else "copy"), f"give {copies} numbers")
    for name, given in schema.per_rank(config).items():
        if name != "shares" and isinstance(given, (list, tuple)) and given and len(given) != control.size:
            raise UserError(f"{name} has {count(len(given), 'entry', 'entries')} for "
                            f"{count(control.size, 'rank')}", "one per rank",
                            f"give {control.size} numbers")


def _recovery(config: Config, backend: Any, control: Control, notes: list[str]) -> Recovery:
    """What a rank does that runs out of memory."""
    shrinks, because = config.on_oom == "shrink", "on_oom is stop"
    if shrinks and config.sync_batchnorm and control.size > 1:
        because = "with sync_batchnorm layers wait for other ranks within a micro-batch"
        notes.append(f"on_oom: a rank that runs out of memory in training ends the run, since {because}")
    return Recovery(backend.out_of_memory, backend.free_cached, shrinks and because == "on_oom is stop", shrinks,
                    because)


def _precision(config: Config, control: Control, devices: list[DeviceFacts], notes: list[str]) -> Precision:
    """What every rank computes in; all ranks know all devices, so all come to the same or raise alike."""
    names = policy.resolve(str(config.precision), devices)  # whose names have been spelled out
    notes += policy.remarks(names, devices)
    return Precision(tuple(names), control.rank)


def _mesh(config: Config, control: Control) -> Mesh:
    """The copies of the model; each rank has one where none is cut over ranks."""
    depths = depths_of(config.pipeline.stages, config.pipeline.depths, control.size)
    return Mesh.of(depths, control.rank)


def _feeds(config: Config, spec: Spec, mesh: Mesh, control: Control, train: Any,
           test: Any) -> tuple[Feed, Feed | None]:
    """How each copy of the model walks through the data."""
    feed = Feed(train, config.global_batch, shuffle=config.data.shuffle, accumulate=_micros(config, mesh),
                weight_fn=spec.weight, even_micros=config.sync_batchnorm and control.size > 1,
                **_cut(config, mesh, control))
    feed.check_ranks_agree()
    test_feed = None if test is None else _eval_feed(config, mesh, control, test)
    if test_feed is not None:
        test_feed.check_ranks_agree()
    return feed, test_feed


def _eval_feed(config: Config, mesh: Mesh, control: Control, data: Any) -> Feed:
    micros: int | list[int] = _micros(config, mesh) if mesh.deepest > 1 else 1
    return Feed(data, config.global_batch, shuffle=False, accumulate=micros, **_cut(config, mesh, control))


def _micros(config: Config, mesh: Mesh) -> list[int]:
    """Micro-batches of each copy in a step."""
    return [settings.micro_batches(config, len(copy)) for copy in mesh.copies]


def _cut(config: Config, mesh: Mesh, control: Control) -> dict[str, Any]:
    """What training and evaluation cut alike."""
    return {"rank": mesh.copy, "size": len(mesh.copies), "control": voices(control, mesh),
            "shares": list(config.shares) or None, "seed": config.seed, "micro_batch": config.micro_batch_limit,
            "prefetch": config.data.prefetch, "skip_unread": config.on_bad_sample == "skip"}


def eval_feed(run: Run, data: Any) -> Feed:
    """A feed over evaluation ``data`` given to an assembled run: its test split, or all of it. Collective."""
    adapters = (partial(backends.load(run.spec.framework).adapt_data, seed=run.config.seed, rows=run.spec.rows),)
    cores = run.topology.cores_of(run.control.rank)
    test, remark = agreed(run.control, lambda: prepare.later(run.config, data, adapters, cores, run.control.size),
                          "data")
    if remark and remark not in run.notes:
        run.note(remark)
    feed = _eval_feed(run.spelled, run.mesh, run.control, test)
    feed.check_ranks_agree()
    return feed


def _restore(run: Run) -> None:
    """Load what ``config.resume`` names; collective. Only reads: the run's directory is made when a fit starts."""
    resume = run.config.resume
    if not resume:
        return
    found: list[Any] = [None]

    def look() -> Path:
        out = find_out(run.config, run.spec.name) if resume == "auto" and run.control.rank == 0 else None
        if run.control.rank == 0:
            found[0] = session.find(resume, out, run.note)
        if resume == "auto" and out is not None and found[0] is None and (out / COMPLETED).exists():
            raise UserError(f"resume auto: {out} holds a run that is complete and has no checkpoint to go on from",
                            "a checkpoint, or a directory without a finished run",
                            "leave out --resume, in another --out, to start anew")
        return out or Path()

    run.out = run.control.bcast(agreed(run.control, look, "resume"))
    if not run.control.bcast(found[0] is not None):
        run.note("resume auto: no checkpoint yet, starting anew")
        return
    session.restore(run, found[0])
    run.note(f"resumed at step {run.state.cursor.step}, epoch {run.state.cursor.epoch}")
