"""hvdtrain itself: a run as `assemble` builds it, and the loop's own `train_step` with its votes and callbacks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.peers import IDLE_S, Prepared, Setup, tensorflow_common
from benchmarks.workloads import LR, MOMENTUM
from hvdtrain.config import ExchangeConfig, PipelineConfig, RebalanceConfig
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.plan import Planned


def prepare(setup: Setup, wire: str = "auto", compression: str = "none", balance: str = "off",
            looks: bool = True, adam: str = "", compile: str = "off", remat: str = "off",
            pipeline: bool = False, accumulate: int = 1) -> Prepared:
    """``wire``: the configuration's ``collectives``; ``compression``, ``balance``, ``compile``,
    ``remat``: its keys of that name.

    ``adam``: "whole", "zero1" or "zero2": Adam in place of SGD, its state on each rank or divided in that stage.
    ``pipeline``: the ranks are one replica, cut as the setup says. ``accumulate``: micro-batches of a step.
    ``looks``: whether summed gradients are looked at, as always but in the bench that tells what it costs.
    """
    from hvdtrain.checkpoint.run_directory import starting
    from hvdtrain.core.events import Event
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble

    config = _config(setup, wire, compression, balance, adam, compile, remat)
    if accumulate > 1:
        config = replace(config, accumulate=accumulate, out=f"{config.out}-{accumulate}")
    if pipeline:
        config = replace(config, pipeline=_pipeline(setup), out=f"{config.out}-pipeline")
    run = assemble(config, data=setup.arrays)
    if not looks:
        for part in (run.dp, run.collectives):
            setattr(part, "looks", False)  # noqa: B010  (of the transports only those that look have it)
    batches = _fetched(run, setup) if balance == "off" else _live(run)
    with starting(run):
        run.emit(Event.FIT_START)
    run.emit(Event.EPOCH_START)
    n_local, marks = [0], _Marks(run)

    def step(_: int) -> None:
        marks.begin()
        with run.phases.data:
            batch = next(batches)
        loop.train_step(run, batch)
        marks.end()
        n_local[0] = batch.n_local

    return Prepared(step, lambda: run.state.loss, lambda: _params(run), run.collectives.name, _sync(run),
                    global_loss=True, notes=run.notes, samples=lambda: n_local[0], whatif=partial(_whatif, run),
                    split=pipeline, pipeline=_layout(run) if pipeline else None, spent=partial(_spent, run),
                    marks=marks.taken, gradient_bytes=sum(b.n * itemsize(b.dtype) for b in run.dp.buckets), run=run)


class _Marks:
    """Of each step: seconds until its first and each bucket is handed to the transport, of computing and of the update.

    A bucket that is put inside a graph is put while that is traced, once: its steps have no such mark.
    """

    def __init__(self, run: Run) -> None:
        self._phases, self._steps = run.timeline.totals, list[dict[str, float]]()
        self._begin, self._now = 0.0, dict[str, float]()
        put = run.dp.put

        def stamped(index: int, x: Any) -> None:
            at_s = time.perf_counter() - self._begin
            self._now.setdefault("first_s", at_s)
            self._now[f"bucket{index}_s"] = at_s
            put(index, x)

        if not run.dp.in_graph:
            run.dp.put = stamped  # type: ignore[method-assign]

    def begin(self) -> None:
        """Return a step begins."""
        self._now, self._before = {}, dict(self._phases.seconds)
        self._begin = time.perf_counter()

    def end(self) -> None:
        """Return the step is over."""
        for phase in ("compute", "update"):
            self._now[f"{phase}_s"] = self._phases.seconds[phase] - self._before[phase]
        self._steps.append(self._now)

    def taken(self) -> dict[str, list[float]]:
        """Return the marks of all steps since this was last asked, each that every one of them has."""
        steps, self._steps = self._steps, []
        keys = set.intersection(*map(set, steps)) if steps else set()
        return {key: [step[key] for step in steps] for key in sorted(keys)}


def _pipeline(setup: Setup) -> PipelineConfig:
    """Return the section that cuts the model over all ranks of the job."""
    cut = setup.cut
    return PipelineConfig(setup.control.size, cut.order, micro_batches=cut.micro_batches,  # type: ignore[arg-type]
                    chunks=max(2, cut.chunks), cut=list(cut.names))


def _layout(run: Run) -> dict[str, Any]:
    """Return the partition and its prediction: seconds of a step's forward and backward passes."""
    layout = cast(Planned, run.parts.layout)
    parts, step = layout.chunks(), layout.plans[layout.mesh.copy].step
    return {"cut": [layout.names[blocks[0]] for blocks in parts[1:]], "places": list(layout.mesh.ranks),
            "blocks": [[layout.names[b] for b in blocks] for blocks in parts],
            "predicted_step_s": step.step_s, "predicted_busy_s": list(step.busy_s)}


def _spent(run: Run) -> dict[str, float]:
    """Return this rank's seconds by phase and in steps, its waits for other stages, and bytes of cargo sent."""
    totals = run.timeline.totals
    return {**totals.seconds, "step": totals.step_s, "idle": getattr(run.schedule, "idle_s", 0.0),
            "sent": getattr(run.schedule, "sent_bytes", 0)}


def _whatif(run: Run) -> dict[str, Any]:
    """Return the run's estimate of a step without each of its ranks; {} where it cannot. Collective."""
    from hvdtrain.engine.callbacks.whatif import WhatIf

    found = next((c.look(run, measures=True) for c in run.callbacks if isinstance(c, WhatIf)), None)
    return {} if found is None else {"step_s": found.step_s, "without_s": found.without_s_P}


def _fetched(run: Run, setup: Setup) -> Iterator[Any]:
    """Yield the batches of one epoch, over and over, fetched beforehand as every peer's are; steps count on."""
    with contextlib.closing(run.feed.epoch(run.state.cursor)) as fetched:
        batches = list(fetched)
    assert len(batches) == len(setup.batches), "the feed cut another number of batches"
    for batch in itertools.cycle(batches):
        at = run.state.cursor  # a step whose number comes again would compare the ranks' weights again
        yield replace(batch, cursor_before=at, cursor_after=replace(batch.cursor_after, step=at.step + 1))


def _live(run: Run) -> Iterator[Any]:
    """Epoch after epoch as the loop fetches them, since the cut may change; the fetch is in what is timed."""
    while True:
        with contextlib.closing(run.feed.epoch(run.state.cursor)) as batches:
            yield from batches
        run.parts.optimizer.end_epoch()
        run.state.cursor = run.state.cursor.next_epoch()


def _config(setup: Setup, wire: str, compression: str, balance: str, adam: str, compile: str, remat: str) -> Any:
    """Return the run's configuration: what all contenders share, nothing else changed from its default."""
    from hvdtrain.config import CheckpointConfig, Config, DataConfig, DataParallelConfig, Named

    optimizer = Named("Adam") if adam else Named("SGD", {"momentum": MOMENTUM})
    divided = DataParallelConfig("zero", int(adam[-1])) if adam.startswith("zero") else DataParallelConfig()

    return Config(model=setup.workload.model(setup.framework), model_args=setup.workload.args,
                  data=DataConfig(shuffle=False, prefetch=0), global_batch=setup.batch * setup.control.size,
                  seed=setup.seed, lr=LR, optimizer=optimizer, epochs=10**9,
                  data_parallel=divided, collectives=wire, compression=compression,  # type: ignore[arg-type]
                  exchange=exchange(setup.exchange, setup.powersgd_rank),
                  balance=balance, emulate_speed=list(setup.emulate_speed),  # type: ignore[arg-type]
                  rebalance=section(RebalanceConfig, "--rebalance", ("probe_cache=false", *setup.rebalance)),
                  checkpoint=CheckpointConfig(every="off", at_end=False), progress="off", threads=setup.threads,
                  control_timeout_s=IDLE_S, compile=compile, remat=remat,  # type: ignore[arg-type]
                  out=str(Path(setup.scratch, f"hvdtrain-{wire}-{compression}-{balance}-{adam}-{compile}-{remat}")))


def exchange(settings: Sequence[str], powersgd_rank: int) -> ExchangeConfig:
    """Return the section of ``--exchange`` words; the rank of powersgd is told apart, since DDP hears of it too."""
    for text in settings:
        if text.partition("=")[0] == "powersgd_rank":
            raise UserError(f"--exchange is {text!r}", "--powersgd_rank, of which DDP hears too", "use that")
    return section(ExchangeConfig, "--exchange", (*settings, f"powersgd_rank={powersgd_rank}"))


def section(kind: Any, option: str, settings: Sequence[str]) -> Any:
    """Return a section ``kind`` of the configuration from ``KEY=VALUE`` words, values as YAML reads them.

    The last word for a key counts. `UserError` for a bad word; whether the values are possible is `Config.check`'s to
    say.
    """
    import yaml

    known = [key.name for key in fields(kind)]
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if name not in known:
            raise UserError(f"{option} is {text!r}", f"KEY=VALUE; KEY: {nearest(name, known)}", f"correct {option}")
        try:
            found[name] = yaml.safe_load(value) if equals else None
        except yaml.YAMLError:
            found[name] = None
        if found[name] is None:
            example = known[0]
            raise UserError(f"{option} is {text!r}", f"KEY=VALUE such as {example}=4", f"correct {option}")
    return kind(**found)


def _params(run: Run) -> list[Any]:
    """Return copies of the trainable parameters, in the step's own order."""
    groups, _ = run.parts.state.state()
    return [groups["model"][spec.name].copy() for spec in run.parts.params.specs]


def _sync(run: Run) -> Callable[[], None]:
    """Return the function that waits for the device; on a CPU a step has ended when it returns."""
    if not run.parts.stage.asynchronous:
        return lambda: None
    if run.spec.framework == "torch":
        import torch

        return torch.cuda.synchronize
    return partial(tensorflow_common.sync, run.parts.model)
