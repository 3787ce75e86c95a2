"""Evaluate and predict without training: the model and its data on every rank, and outputs in the order of the data.

Owns no choice of weights and no file: `hvdtrain.commands.evaluate` and `hvdtrain.commands.predict` do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.backends.misfit import told
from hvdtrain.checkpoint.adapters import fitting
from hvdtrain.checkpoint.savers import view
from hvdtrain.checkpoint.tensors import Spec as ArraySpec
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.config import Config, DataParallelConfig, Named, PipelineConfig, ScheduleConfig, aliases
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, Control
from hvdtrain.core.protocols.types import StepBatch
from hvdtrain.core.terminal import say
from hvdtrain.data import prepare, sources
from hvdtrain.data.feed import Feed
from hvdtrain.data.layout import OUTPUT
from hvdtrain.data.rows import rows_of
from hvdtrain.data.sources import Source
from hvdtrain.data.workers import start
from hvdtrain.engine import build_model, compare_ranks, loop
from hvdtrain.engine.assemble import Job, joined_job, mesh_of, precision_of, transforms_of
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.recovery import LESS, RecoveringEvaluator, Recovery

SPLITS = ("test", "train")
"""Splits of data, the preferred one first."""

WINDOW = 8
"""Global batches whose outputs a rank holds before rank 0 takes them."""

Outputs = dict[str, np.ndarray]
"""Outputs of consecutive samples by name, each (n, ...)."""


@dataclass(frozen=True)
class Inference:
    """A model that computes outputs or metrics of a data set, on all ranks of a job. ``config``: for these ranks.
    ``split``: of the data."""

    config: Config
    job: Job
    parts: ModelParts
    feed: Feed
    recovery: Recovery
    split: str


def plain(config: Config) -> Config:
    """Return ``config`` for unpartitioned replicas that train nothing, on any number of ranks."""
    made = replace(config, resume="", shares=[], emulate_speed=[], balance="off", compression="none", accumulate=1,
                   pipeline=PipelineConfig(), data_parallel=DataParallelConfig(), sync_batchnorm=False, compile="off",
                   remat="off", optimizer=Named("SGD"), schedule=ScheduleConfig(), trackers=[])
    aliases.set_only(made, {field.name for field in fields(Config)} - config._unset)
    return made.check()


def assemble(config: Config, model: Any = None, data: Any = None, *, splits: Sequence[str] = SPLITS,
             labels: bool = True, control: Control | None = None) -> Inference:
    """Return what `evaluate` and `predict` need. Collective over all ranks of the job.

    ``model``: a model object, or None for ``config.model``. ``data``: an object, or None for ``config.data``.
    ``splits``: the first of these that the data has is read. ``labels``: whether metrics are computed;
    else data without targets is accepted. Errors: `UserError`, the same on every rank.
    """
    config = plain(config)
    with start.early(prepare.may_need(config, data)):
        job = joined_job(config, model, control)
        control, backend, notes = job.control, job.backend, job.notes
        spelled = compare_ranks.resolved_config(config, job.topology, job.devices, notes)
        build_model.seed_all(config, backend, 0)
        spec = replace(job.spec, optimizer=None, parameter_groups=None)
        collate = agreed(control, lambda: prepare.collator(config), "data.collate")
        spec = (rows := rows_of(spec, collate)).of_model_file(spec)
        adapters = (partial(backend.adapt_data, seed=config.seed, rows=rows),)
        source, split = agreed(control, lambda: _read(config, data, splits, adapters, job), "data")
        skip = labels and config.on_bad_sample == "skip"
        feed = Feed(source, config.global_batch, rank=control.rank, size=control.size, seed=config.seed, shuffle=False,
                    micro_batch=config.micro_batch_limit, control=control, prefetch=config.data.prefetch,
                    skip_unread=skip, readers=config.data.readers, ordered=not labels)
        feed.check_ranks_agree()
        notes += [note] if (note := feed.walk.settle()) else []
        metrics = build_model.measured(config, spec, feed, control, notes) if labels else []
        spelled = replace(spelled, metrics=metrics)
        build_model.seed_all(config, backend, control.rank)
        precision = precision_of(spelled, control, job.devices, notes)
        parts = agreed(control, lambda: backend.make_parts(spec, spelled, control, NullCollectives(), 0, precision,
                                                           feed.sample, feed.data, mesh_of(config, control)), "model")
    parts.transforms += agreed(control, lambda: transforms_of(config), "transforms")
    agreed(control, lambda: parts.install(collective=False), "transforms")
    if not labels and spec.task is not None and spec.predict is None:
        notes.append("the model file has a task and no predict(model, batch): the model gets each batch's first array "
                     "as the data gives it")
    for text in notes if control.rank == 0 and config.progress != "off" else ():
        say(f"note: {text}")
    recovery = Recovery(backend.out_of_memory, backend.free_cached, in_evaluation=config.on_oom == "shrink")
    causes.mark("loaded")
    return Inference(spelled, replace(job, spec=spec), parts, feed, recovery, split)


def _read(config: Config, data: Any, splits: Sequence[str], adapters: Sequence[sources.Adapter],
          job: Job) -> tuple[sources.Data, str]:
    """Return the data, read by workers where that helps, and its split."""
    found, split = prepare.first_split(config.data if data is None else data, splits, adapters)
    if found is None:
        raise UserError(f"data {config.data.name} has no split {splits[0]}", "a split that it has", "correct --split")
    cores = job.topology.cores_of(job.control.rank)
    (found,), remark = prepare.with_workers(config, config.seed, (found,), cores, prepare.START_S * job.control.size)
    job.notes.extend([remark] if remark else [])
    return found, split


def load(made: Inference, read: Callable[[Mapping[str, ArraySpec]], Mapping[str, np.ndarray]]) -> None:
    """Give every rank's model the weights that ``read`` returns on rank 0, by the names of a checkpoint. Collective.

    ``read``: called with the model's own arrays. Errors: `UserError` on every rank where the weights do not fit.
    """
    control, state = made.job.control, made.parts.state
    groups, rest = state.state(view)

    def on_root() -> dict[str, np.ndarray]:
        if control.rank:
            return {}
        own = {name: ArraySpec(array.dtype, array.shape) for name, array in groups["model"].items()}
        given = read(own)
        wrapped = fitting(own, given) if made.job.spec.framework == "torch" else {}  # checkpoints of before 2026-11
        found = {wrapped.get(name, name): np.asarray(array, order="C") for name, array in given.items()}
        for name in own.keys() & found.keys():
            if found[name].shape != own[name].shape:
                raise UserError(f"{name} has the shape {list(found[name].shape)} in the run's weights",
                                f"{list(own[name].shape)}, as in the model", "correct --model and --model_args")
        return found

    arrays = agreed(control, on_root, "weights")
    for name, shape, dtype in control.bcast([(n, a.shape, a.dtype.str) for n, a in arrays.items()]):
        if control.rank:
            arrays[name] = np.empty(shape, dtype)
        if arrays[name].size:
            control.send([arrays[name].reshape(-1).view(np.uint8)], 0)
    # The optimizer's own state goes back to where it is: only the weights change.
    agreed(control, lambda: state.load({**groups, "model": arrays}, rest), "weights")


def evaluate(made: Inference) -> tuple[dict[str, float], int]:
    """Return the metrics, exact over the ranks, and the number of samples. Collective."""
    control, feed, evaluator, samples = made.job.control, made.feed, made.parts.evaluator, 0
    adding = RecoveringEvaluator(evaluator, made.recovery, 0)
    with contextlib.closing(feed.eval_epoch()) as batches:
        for batch in batches:
            if samples:
                adding.add(batch)
            else:  # all ranks report a model that does not fit the data
                agreed(control, partial(_tried, made, batch, adding), "evaluation")
            samples += batch.n_global
    rows = control.gather((adding.totals(), adding.lost))
    if any(lost for _, lost in rows):
        raise _out_of_memory("evaluation")
    feed.compare(0)
    for text in [*feed.left_out(), *([f"the data is not verified: {feed.unlike}"] if feed.unlike else [])]:
        if control.rank == 0:
            say(f"note: {text}")
    return loop.results(control, evaluator, [totals for totals, _ in rows]), samples


def _tried(made: Inference, batch: StepBatch, adding: RecoveringEvaluator) -> None:
    with told(made.job.spec.model, batch.micros[0] if batch.micros else (), evaluates=True):
        adding.add(batch)


def _out_of_memory(phase: str) -> UserError:
    return UserError(f"out of memory in {phase} with one sample", "memory for the model and one sample",
                     LESS).of_kind("oom")


class _Forward:
    """Adds the outputs of micro-batches to ``found``; the part of an `Evaluator` that `RecoveringEvaluator` calls."""

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator
        self.found: list[Outputs] = []

    def add(self, batch: Batch) -> None:
        outputs, n = self._evaluator.outputs(batch), len(batch[0])
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) != n:
                raise UserError(f"the model's output {name} has the shape {list(array.shape)} for a batch of {n}",
                                "one row for each sample", "return per-sample outputs from the model, or give the "
                                "model file a predict(model, batch)")
        self.found.append(outputs)


def predict(control: Control, parts: ModelParts, feed: Feed, recovery: Recovery,
            write: Callable[[Outputs], None]) -> int:
    """Call ``write`` on rank 0 with the outputs of all samples, in the order of the data; return their number.

    Collective. Every rank computes its share of `WINDOW` global batches, then rank 0 receives and writes them.
    Errors: `UserError`, the same on every rank.
    """
    samples, known = 0, ""
    with contextlib.closing(feed.eval_epoch()) as batches:
        for window in _windows(control, feed, batches):
            pulse.at("predict")
            forward = partial(_computed, parts, recovery, window)
            own_B = agreed(control, forward, "predict")
            heads = [[[(name, array.shape, array.dtype.str) for name, array in one.items()] for one in outputs]
                     for outputs in own_B]
            heads_PB = control.gather(heads)
            for head in itertools.chain.from_iterable(itertools.chain.from_iterable(heads_PB)):
                names = ", ".join(name for name, _, _ in head)
                if known and names != known:
                    raise UserError(f"the model's outputs are {names}, and before {known}", "the same for all samples",
                                    "return the same outputs from every call of the model")
                known = names
            rows_PB = _gathered(control, own_B, heads_PB)

            def put(rows_PB: Sequence[list[list[Outputs]]] = rows_PB) -> None:
                for rows_P in zip(*rows_PB):
                    for outputs in itertools.chain.from_iterable(rows_P):
                        write(outputs)

            agreed(control, put if control.rank == 0 else lambda: None, "predict")
            samples += sum(batch.n_global for batch in window)
    return samples


def _windows(control: Control, feed: Feed, batches: Iterator[StepBatch]) -> Iterator[list[StepBatch]]:
    """Yield `WINDOW` batches at a time, the same number on every rank. Errors: `UserError`."""
    def read() -> list[StepBatch]:
        return list(itertools.islice(batches, WINDOW))

    while True:
        # Reading a stream is collective itself.
        window = agreed(control, read, "data") if isinstance(feed.data, Source) else read()
        if not window:
            return
        if feed.unlike and feed.samples is None:
            raise UserError(f"the outputs would have no order: {feed.unlike}", "the same stream on every rank",
                            "use the same seed for the shuffle and do not divide the stream by rank")
        yield window


def _computed(parts: ModelParts, recovery: Recovery, window: Sequence[StepBatch]) -> list[list[Outputs]]:
    """Return this rank's outputs of each batch, in the order of its samples."""
    found: list[list[Outputs]] = []
    for batch in window:
        forward: Any = _Forward(parts.evaluator)
        adding = RecoveringEvaluator(forward, recovery, 0)
        with told(parts.model, batch.micros[0][:1] if batch.micros else (), evaluates=True):
            adding.add(batch)
        if adding.lost:
            raise _out_of_memory("predict")
        found.append(forward.found)
    return found


def _gathered(control: Control, own_B: list[list[Outputs]], heads_PB: Sequence[Any]) -> list[list[list[Outputs]]]:
    """Return the outputs of every rank by batch, on rank 0; [] on others. Collective."""
    rows_PB = [own_B]
    for source in range(1, control.size):
        if control.rank == source:
            mine = own_B
        elif control.rank == 0:
            mine = [[{name: np.empty(shape, dtype) for name, shape, dtype in head} for head in heads]
                    for heads in heads_PB[source]]
            rows_PB.append(mine)
        else:
            mine = []
        arrays = [array for outputs in mine for one in outputs for array in one.values() if array.size]
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        control.send(flat, source, 0)
    return rows_PB if control.rank == 0 else []


class Collected:
    """Outputs in memory, for `Trainer.predict`."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def write(self, outputs: Outputs) -> None:
        for name, array in outputs.items():
            parts = self._parts.setdefault(name, [])
            check_alike(name, array, parts[0] if parts else array)
            parts.append(array)

    def result(self) -> np.ndarray | Outputs:
        """Return the array of a model with one output, else arrays by name."""
        found = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return found[OUTPUT] if list(found) == [OUTPUT] else found


def check_alike(name: str, array: np.ndarray, before: np.ndarray) -> None:
    """Raise `UserError` where two parts of an output make no one array."""
    if (array.shape[1:], array.dtype) != (before.shape[1:], before.dtype):
        raise UserError(f"the model's output {name} is {array.dtype}{list(array.shape[1:])} for a sample, and "
                        f"{before.dtype}{list(before.shape[1:])} for an earlier one", "one shape and type",
                        "pad the samples to one length, or write a .jsonl file")
