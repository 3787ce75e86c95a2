"""Builds a run in one fixed order: the file to read to know what a run is made of.

The order: config, boot and control plane, topology and group, model blocks, devices, wire (`hvdtrain.cluster.wire`),
data, precision, the model's parts (stage, parameters, optimizer, transforms), the comparison of the ranks' models, a
first sample through model, loss and metrics, data parallelism with buckets and compressor (`hvdtrain.data_parallel`),
initial weights, callbacks, restore. The run's directory is made when a fit starts (`hvdtrain.outdir.starting`); the
parts of a batch (`balance`) are planned then, by a callback. A model that is split over devices is cut while its parts
are made, before its exchange, so that no bucket spans two devices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain import backends, data_parallel, first_sample, placed, reports, rng, trackers, transforms, unused
from hvdtrain.alike import check_alike
from hvdtrain.balance.emulate import Slowed
from hvdtrain.callbacks.audit import Audit
from hvdtrain.callbacks.auto_compile import AutoCompile
from hvdtrain.callbacks.auto_compression import AutoCompression
from hvdtrain.callbacks.balance import Balance
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.divergence import Divergence
from hvdtrain.callbacks.early_stop import EarlyStop
from hvdtrain.callbacks.ledger import Ledger
from hvdtrain.callbacks.memory import Memory
from hvdtrain.callbacks.memory_fit import MemoryFit
from hvdtrain.callbacks.meter import Meter
from hvdtrain.callbacks.nan_guard import NanGuard
from hvdtrain.callbacks.out_of_memory import OutOfMemory
from hvdtrain.callbacks.preempt import Preempt
from hvdtrain.callbacks.recorder import Recorder
from hvdtrain.callbacks.seconds import Seconds
from hvdtrain.callbacks.supervised import Supervised
from hvdtrain.callbacks.system import System
from hvdtrain.callbacks.throughput import Throughput
from hvdtrain.callbacks.trace import Trace
from hvdtrain.callbacks.whatif import WhatIf
from hvdtrain.checkpoint import session
from hvdtrain.cluster import boot
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.exit import agreed
from hvdtrain.cluster.group import world
from hvdtrain.cluster.launcher import LaunchFacts, launch_facts
from hvdtrain.cluster.topology import affinity, compute_threads, survey
from hvdtrain.cluster.wire import open_wire
from hvdtrain.config import Config
from hvdtrain.data import sources
from hvdtrain.data.feed import Feed
from hvdtrain.errors import UserError
from hvdtrain.faults import causes, pulse
from hvdtrain.faults.finite import check_trainable
from hvdtrain.memory_plan import imported
from hvdtrain.memory_plan.survey import scene_of
from hvdtrain.model import Spec, build_spec, spec_of
from hvdtrain.out_of_memory.guard import Guard
from hvdtrain.out_of_memory.recovery import Recovery
from hvdtrain.out_of_memory.schedule import Recovering
from hvdtrain.outdir import COMPLETED, find_out
from hvdtrain.pipeline.accumulate import Accumulate
from hvdtrain.precision import policy
from hvdtrain.precision.policy import Precision
from hvdtrain.protocols import Callback, Collectives, Control, Schedule
from hvdtrain.records.stream import Stream
from hvdtrain.remat.settle import settle
from hvdtrain.resolve import load_callable
from hvdtrain.run import Run


def assemble(config: Config, model: Any = None, data: Any = None, control: Control | None = None,
             collectives: Collectives | None = None,
             more: Callable[[Run], list[Callback]] | None = None) -> Run:
    """Return a run ready for `hvdtrain.loop.fit`. Collective over all ranks of the job.

    ``model``: a model object, or None for ``config.model``. ``data``: whatever `hvdtrain.data.sources.interpret` takes,
    or None for ``config.data``. ``control``, ``collectives``: given by tests that run ranks as threads. ``more``: the
    caller's callbacks for this run.
    Errors: `UserError`, the same on every rank.
    """
    config.check()
    facts = launch_facts(os.environ)
    if control is None and facts.kind != "gloo":
        control = boot.start_control(facts, config.control_timeout_s, devices_per_rank=_devices(config),
                                     heartbeat_s=config.heartbeat_timeout_s)
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
    spelled = placed.spelled_out(config, topology, devices, notes)
    wire = collectives or open_wire(config, spec.framework, backend, control, topology, devices, notes)
    notes += unused.notes(unused.setup_of(config, spec, wire.name, facts.kind, model, data))
    adapters = (partial(backend.adapt_data, seed=config.seed),)
    _seed(config, backend, 0)  # user code that shuffles or splits must do so alike on every rank
    train, test = agreed(control, lambda: _data(config, data, adapters), "data")
    feed, test_feed = _feeds(spelled, spec, control, train, test)
    _seed(config, backend, control.rank)
    precision = _precision(spelled, control, devices, notes)
    parts = agreed(control, lambda: backend.make_parts(spec, spelled, control, wire, feed.steps_per_epoch or 0,
                                                       precision, feed.sample, feed.data), "model")
    if config.emulate_speed and config.emulate_speed[control.rank] < 1:
        parts.stage = Slowed(parts.stage, config.emulate_speed[control.rank])
    parts.transforms += agreed(control, lambda: transforms.own(config), "transforms")
    group = world(control.size, control.rank)
    recovery = _recovery(config, backend, control, notes)
    if devices[control.rank].kind == "cpu" and recovery.shrinks:  # else it would end a run on a forecast
        recovery.guard = Guard(len(topology.host_of(control.rank).ranks))
    schedule: Schedule = Recovering(Accumulate(parts.stage, recovery.guard), parts.stage, recovery)
    run = Run(config, control, group, topology, wire, spec, parts, schedule, feed, test_feed,
              spelled, devices, notes=notes, recovery=recovery)
    try:
        _complete(run, facts, backend, more)
    except BaseException:
        run.leave()
        raise
    return run


def _complete(run: Run, facts: LaunchFacts, backend: Any, more: Callable[[Run], list[Callback]] | None) -> None:
    """Data parallelism, initial weights, callbacks, restore."""
    control, parts, feed = run.control, run.parts, run.feed
    agreed(control, lambda: parts.install(collective=False), "transforms")
    check_alike(control, run.group, parts.params.made_of())
    first_sample.check(run, backend)
    run.dp = agreed(control, lambda: data_parallel.create(data_parallel.Setup(
        run.spelled, control, run.topology, run.group, run.collectives, backend.Ops(), parts, run.notes,
        scene_of(run, backend))), "exchange")
    agreed(control, lambda: settle(run, backend), "remat")
    agreed(control, run.join, "exchange")
    parts.buffers.share()
    if run.devices[control.rank].kind == "cuda":
        run.timeline.marks = backend.ranges()
    run.callbacks = _callbacks(run, more)
    if control.rank == 0:
        run.records = Stream(partial(reports.make, run, facts.kind != "solo"))
    if control.size > 1:
        bent = (*parts.caveats(), *run.dp.caveats)
        run.notes += [f"not independent of the number of ranks: {caveat}" for caveat in bent]
    run.tell()
    _restore(run)
    causes.mark("loaded")
    agreed(control, lambda: check_trainable(parts), "checking the model")
    if feed.even_micros:
        agreed(control, lambda: parts.stage.spare(feed.sample(1, run.state.cursor)), "data")


def _model(config: Config, model: Any, facts: LaunchFacts, control: Control | None) -> Spec:
    """The model with its file's functions; all ranks have one, or all fail alike."""
    def make() -> Spec:
        if model is not None:
            return spec_of(model)
        text = backends.built_in_model() if config.model == "auto" else config.model
        return build_spec(text, config.model_args, partial(_prepare, config, _threads(config, facts, control)),
                          partial(_building, config))
    pulse.at("model")
    return make() if control is None else agreed(control, make, "model")


def _building(config: Config) -> Any:
    """Where a model is built: in host memory, if no one device may hold all of it."""
    if config.model_parallel > 1 and "tensorflow" in backends.imported():
        return backends.load("tensorflow").building(config.model_parallel)
    return contextlib.nullcontext()


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
        hvd = boot.start_horovod(framework, config.exchange, facts)
    except boot.HorovodUnavailable as error:
        raise UserError(f"horovodrun --gloo needs Horovod for {framework}: {error.reason}", "a Horovod built here",
                        "run `python -m hvdtrain build`") from None
    return boot.start_control(facts, config.control_timeout_s, hvd, _devices(config),
                              heartbeat_s=config.heartbeat_timeout_s)


def _check_world(config: Config, control: Control) -> None:
    """Every rank must have read the same configuration, and the shares must fit the world."""
    digests = control.gather(config.digest())
    other = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if other is not None:
        raise UserError(f"rank {other} read another configuration than rank 0", "the same on every rank",
                        "compare the config file, environment and arguments on their hosts")
    for name, given in (("shares", config.shares), ("emulate_speed", config.emulate_speed),
                        ("peak_tflops", config.peak_tflops),
                        ("rebalance.max_micro_batch", config.rebalance.max_micro_batch)):
        if given and not isinstance(given, Mapping) and len(given) != control.size:
            raise UserError(f"{name} has {len(given)} entries for {control.size} ranks", "one per rank",
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
    assert isinstance(config.precision, str)  # names have been spelled out
    names = policy.resolve(config.precision, devices)
    notes += policy.remarks(names, devices)
    return Precision(tuple(names), control.rank)


def _data(config: Config, data: Any, adapters: tuple[Any, ...]) -> tuple[Any, Any]:
    """(training data, evaluation data or None)."""
    if data is not None:
        return sources.interpret(data, "train", adapters), sources.interpret(data, "test", adapters)
    return sources.resolve_splits(config.data.name, config.data.args, adapters)


def _feeds(config: Config, spec: Spec, control: Control, train: Any, test: Any) -> tuple[Feed, Feed | None]:
    """How each rank walks through the data."""
    feed = Feed(train, config.global_batch, shuffle=config.data.shuffle, accumulate=config.accumulate,
                weight_fn=spec.weight, even_micros=config.sync_batchnorm and control.size > 1,
                **_cut(config, control))
    feed.check_ranks_agree()
    if test is None:
        return feed, None
    test_feed = _eval_feed(config, control, test)
    test_feed.check_ranks_agree()
    return feed, test_feed


def _eval_feed(config: Config, control: Control, data: Any) -> Feed:
    return Feed(data, config.global_batch, shuffle=False, **_cut(config, control))


def _cut(config: Config, control: Control) -> dict[str, Any]:
    """What training and evaluation cut alike."""
    return {"rank": control.rank, "size": control.size, "control": control, "shares": list(config.shares) or None,
            "seed": config.seed, "micro_batch": config.micro_batch_limit, "prefetch": config.data.prefetch}


def eval_feed(run: Run, data: Any) -> Feed:
    """A feed over evaluation ``data`` given to an assembled run: its test split, or all of it. Collective."""
    adapters = (partial(backends.load(run.spec.framework).adapt_data, seed=run.config.seed),)

    def read() -> Any:
        test = sources.interpret(data, "test", adapters)
        return sources.interpret(data, "train", adapters) if test is None else test

    feed = _eval_feed(run.spelled, run.control, agreed(run.control, read, "data"))
    feed.check_ranks_agree()
    return feed


def _callbacks(run: Run, more: Callable[[Run], list[Callback]] | None) -> list[Callback]:
    """Those that decide and measure before those that report; checkpoints last, so that they hold the others' state.

    The ranks' weights are compared after all that may change them, and before they are saved.
    """
    config = run.config
    own: list[Any] = [*([Supervised()] if causes.folder() else []), Preempt(config.time_limit_s()),
                      NanGuard(config.nan_guard, config.max_skipped), Throughput(), Ledger(), Memory(), OutOfMemory(),
                      MemoryFit()]
    if config.compile == "auto":
        own.insert(0, AutoCompile())
    meter = Meter(config.rebalance.every_steps)
    if run.control.size > 1:
        own.append(meter)
    compression = AutoCompression() if config.compression == "auto" else None
    if config.balance != "off":
        own.append(Balance(meter, lambda: compression is not None and not compression.settled))
    if config.early_stop.metric:
        own.append(EarlyStop(config.early_stop))
    if compression is not None:
        own.append(compression)
    own += [_own_callback(text) for text in config.callbacks]
    if config.trace.steps:
        own.append(Trace(config.trace))
    one_model = run.control.size > 1 and run.collectives.name != "null"  # null: every rank trains its own
    own += [System(), *([WhatIf()] if one_model else []), Recorder(meter)]
    own += more(run) if more else ()
    if config.check_every and one_model:
        own.append(Divergence(config.check_every))
    if config.audit and one_model:
        own.append(Audit(config.audit))
    return [*own, Checkpoint(config.checkpoint), Seconds()]


def _own_callback(text: str) -> Callback:
    """Make the callback that ``text`` names."""
    made: Any = load_callable(text, "callbacks")()
    if not (callable(getattr(made, "on", None)) and getattr(made, "where", None) in ("root", "all")):
        raise UserError(f"callbacks: {text} gave a {type(made).__name__}", "a callback of hvdtrain, whose where is "
                        "'root' or 'all'", "make it a subclass of hvdtrain.callbacks.base.Callback")
    return made  # type: ignore[no-any-return]


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
