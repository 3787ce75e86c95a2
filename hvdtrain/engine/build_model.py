"""Build the model and the feeds of a run from what the configuration or the caller gives.

The order is left to `hvdtrain.engine.assemble`, the walk through the data to `hvdtrain.data.feed`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from hvdtrain import backends
from hvdtrain import config as settings
from hvdtrain.backends.model_spec import Spec, build_spec, spec_of
from hvdtrain.cluster.control import agreed, control_of_replicas, in_turn
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.topology import affinity, compute_threads, survey
from hvdtrain.config import Config, cut_over_ranks
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Batch, Cargo, Control, GradientSink, Pair, PipelineStage, Stage
from hvdtrain.data import prepare
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource, innermost
from hvdtrain.engine.run import Run


def model_of(config: Config, model: Any, facts: LaunchFacts, control: Control | None) -> Spec:
    """Return the model with its file's functions; all ranks have one, or all fail alike. Collective."""
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


def measured(config: Config, spec: Spec, feed: Feed, control: Control, notes: list[str]) -> list[str]:
    """Return the metrics of a run: accuracy, where nobody set any, for integer class labels only. Collective."""
    assumes = "metrics" in config._unset and spec.task is None and "acc" not in config.early_stop.metric.lower()
    loss = f"of loss {config.loss.name}" if REGRESSION.search(config.loss.name) else ""
    kinds = [kind for kind in control.gather((loss or _float_target(feed)) if assumes else "") if kind]
    if kinds:
        notes.append(f"metrics: accuracy is assumed for integer class labels only, and the targets are {kinds[0]}; set "
                     "metrics: accuracy to have it")
    return [] if kinds else config.metrics


REGRESSION = re.compile(r"mse|mae|mape|msle|l1|huber|mean_?(abs|squ)|log_?cosh|poisson", re.I)
"""Part of the names of losses whose integer targets are numbers, no classes."""


def _float_target(feed: Feed) -> str:
    """Return the type of the targets where they are one array of no integers, else "", as where they are not known."""
    source = innermost(feed.data)
    try:
        if isinstance(source, ArraySource):
            arrays = source.arrays
        else:  # samples that the next checks read anyway
            arrays = feed.sample(1) if feed.samples is None else feed.read_before()
    except Exception:  # the check of the first samples says what is wrong with them
        return ""
    if getattr(source, "layout", None) is not None or len(arrays) not in (2, 3):
        return ""
    return "" if arrays[1].dtype.kind in "biu" else str(arrays[1].dtype)


def _building(config: Config) -> Any:
    """Return where a model is built: in host memory, if no one device may hold all of it."""
    over_ranks = settings.cut_over_ranks(config)
    if (config.model_parallel > 1 or over_ranks) and "tensorflow" in backends.imported():
        return backends.load("tensorflow").building(config.model_parallel, over_ranks)
    return contextlib.nullcontext()


def _outline(config: Config) -> Any:
    """Return what builds a model without its values, which no rank holds all of where it is cut over ranks; or None."""
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
        backend.setup(threads, config.deterministic, devices_of(config))
        backend.seed(config.seed, 0)
        memory.mark_imported()


def devices_of(config: Config) -> int:
    """Devices that each rank owns."""
    return config.devices_per_rank or config.model_parallel


def seed_all(config: Config, backend: Any, rank: int) -> None:
    """Every generator, from (seed, rank)."""
    rng.seed(config.seed, rank)
    backend.seed(config.seed, rank)


T = TypeVar("T")


class Slowed:
    """``stage`` computing at ``speed`` (0 to 1) of its own speed; an `hvdtrain.core.protocols.Stage`.

    After each forward and backward it sleeps, so that own computing takes 1/speed of its time; time in which the stage
    waited for other ranks is not stretched. Everything else is the stage's own.
    """

    def __init__(self, stage: Stage, speed: float) -> None:
        assert 0 < speed <= 1, speed
        self._stage, self._rest = stage, 1.0 / speed - 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        begin, waited_s = time.perf_counter(), sink.waited_s
        pair = self._stage.run(micro, scale, final, sink)
        self._sleep(time.perf_counter() - begin - self._stage.waited_s - (sink.waited_s - waited_s))
        return pair

    def trial(self, batch: Batch) -> None:
        self._stretched(self._stage.trial, batch)

    # Of a stage of a pipeline, which waits for nobody meanwhile.

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        return self._stretched(self._pipelined.forward, chunk, micro, came, batch)

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        return self._stretched(self._pipelined.loss, chunk, micro, came, batch, scale)

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        return self._stretched(self._pipelined.backward, chunk, micro, came)

    @property
    def _pipelined(self) -> PipelineStage:
        return cast(PipelineStage, self._stage)

    def _stretched(self, work: Callable[..., T], *args: Any) -> T:
        begin = time.perf_counter()
        value = work(*args)
        self._sleep(time.perf_counter() - begin)
        return value

    def _sleep(self, own_s: float) -> None:
        time.sleep(max(0.0, own_s) * self._rest)


def feeds_of(config: Config, spec: Spec, mesh: Mesh, control: Control, train: Any, test: Any,
             named: Mapping[str, Any]) -> tuple[Feed, dict[str, Feed]]:
    """Return each replica's feeds for training and evaluation, ``test`` as "" and sets ``named``. Collective."""
    feed = Feed(train, config.global_batch, shuffle=config.data.shuffle, bucket=config.data.bucket,
                accumulate=_micros(config, mesh),
                weight_fn=spec.weight, even_micros=config.sync_batchnorm and control.size > 1,
                **_cut(config, mesh, control))
    feed.check_ranks_agree()
    most = config.eval_max_samples
    sets = ({} if test is None else {"": test}) | dict(named)
    return feed, {name: _compared_feed(config, mesh, control, data, most, name) for name, data in sets.items()}


def named_sets(given: Mapping[str, Any] | None, flattened: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the evaluation sets that a caller has given by name; `UserError` for anything but named data."""
    if not isinstance(given, Mapping | None):
        raise UserError(f"fit got eval as a {type(given).__name__}", "a dict of name: data",
                        "give a single test set as data=((x, y), (x_test, y_test))")
    return {settings.check_set_name(name): flattened(data) for name, data in (given or {}).items()}


def _compared_feed(config: Config, mesh: Mesh, control: Control, data: Any, most: int = 0, name: str = "") -> Feed:
    """Return the feed of an evaluation set, which the ranks have compared. Collective."""
    try:
        feed = _eval_feed(config, mesh, control, data, most=most)
        feed.check_ranks_agree()
    except UserError as error:
        raise prepare.of_set(name, error) from None
    return feed


def _eval_feed(config: Config, mesh: Mesh, control: Control, data: Any, **more: Any) -> Feed:
    micros: int | list[int] = _micros(config, mesh) if mesh.deepest > 1 else 1
    return Feed(data, config.global_batch, shuffle=False, accumulate=micros, **{**_cut(config, mesh, control), **more})


def _micros(config: Config, mesh: Mesh) -> list[int]:
    return [settings.micro_batches(config, len(copy)) for copy in mesh.copies]


def _cut(config: Config, mesh: Mesh, control: Control) -> dict[str, Any]:
    return {"rank": mesh.copy, "size": len(mesh.copies), "control": control_of_replicas(control, mesh),
            "shares": list(config.shares) or None, "seed": config.seed, "micro_batch": config.micro_batch_limit,
            "prefetch": config.data.prefetch, "skip_unread": config.on_bad_sample == "skip",
            "readers": config.data.readers}


def eval_feed(run: Run, data: Any) -> Feed:
    """Return a feed over evaluation ``data`` given to an assembled run: its test split, or all of it. Collective."""
    adapters = (partial(backends.load(run.spec.framework).adapt_data, seed=run.config.seed, rows=run.spec.rows),)
    cores = run.topology.cores_of(run.control.rank)
    test, remark = agreed(run.control, lambda: prepare.later(run.config, data, adapters, cores, run.control.size),
                          "data")
    if remark and remark not in run.notes:
        run.note(remark)
    return _compared_feed(run.spelled, run.mesh, run.control, test)


def predict_feed(run: Run, data: Any) -> Feed | None:
    """Return a feed over ``data``, else the run's evaluation data, that leaves out no sample. Collective."""
    feed = run.eval_feed if data is None else eval_feed(run, data)
    whole = feed is None or not (data is None and run.config.eval_max_samples) and (
        run.config.on_bad_sample != "skip" if feed.samples is not None
        else run.control.size == 1 or run.config.data.readers != "auto")
    if feed is None or whole:
        return feed
    return _eval_feed(run.spelled, run.mesh, run.control, feed.data, skip_unread=False, ordered=True)
