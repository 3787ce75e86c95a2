"""The configuration of a run: its keys, the checks that need no cluster, and which keys have no effect.

Does not parse: `hvdtrain.commands.train` does, with jsonargparse (YAML file < environment < command line).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import aliases, schema, texts
from hvdtrain.config.keys import Keys
from hvdtrain.config.sections import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    EarlyStopConfig,
    ExchangeConfig,
    Named,
    PipelineConfig,
    RebalanceConfig,
    ScheduleConfig,
    TraceConfig,
)
from hvdtrain.config.sections import __getattr__ as __getattr__
from hvdtrain.config.texts import seconds_of, window_of
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.core.resolve import ask, check_url

__all__ = ["CheckpointConfig", "Config", "DataConfig", "DataParallelConfig", "EarlyStopConfig", "ExchangeConfig",
           "Named", "PipelineConfig", "RebalanceConfig", "ScheduleConfig", "TraceConfig"]

MOST = 2**53
"""Largest whole number of a key: beyond it a float64 skips numbers, and sums over ranks are float64."""

LEAST_HEARTBEAT_S = 2.0
"""Shortest time after which a rank counts as frozen (`hvdtrain.cluster.liveness.watch`)."""

PRECISIONS = ("fp32", "bf16", "fp16", "auto")


@aliases.accepting
@dataclass(frozen=True)
class Config(Keys):
    """Configuration of one training run."""

    def check(self) -> Config:
        """Return self if every value is possible, else raise `UserError` naming the first that is not."""
        if self._refused is not None:
            raise self._refused
        try:
            return self._check()
        except UserError as error:
            raise aliases.as_written(error, self._written) from None

    def _check(self) -> Config:
        """Raise `UserError` naming the first value that is not possible; return self."""
        schema.check_types(self)
        values = dict(schema.leaves(self))
        for key in schema.keys(type(self)):
            for number in _numbers(values[key.name]):
                if not isinstance(number, (int, float)):
                    continue
                if not abs(number) <= MOST:  # NaN is not, nor what no float holds
                    raise UserError(f"{key.name} is {schema.shown(number)}", "a finite number below 2^53",
                                    f"correct {key.name}")
                if key.least is not None:
                    _at_least(key.name, number, key.least)
                if key.most is not None and number > key.most:
                    raise UserError(f"{key.name} is {number}", f"{key.most:.10g} at most", f"correct {key.name}")
        if 0 < self.devices_per_rank < self.model_parallel:
            raise UserError(f"devices_per_rank is {self.devices_per_rank} with model_parallel {self.model_parallel}",
                            "one device for each stage of the model", f"set devices_per_rank: {self.model_parallel}")
        self._check_texts()
        self._check_balance()
        self._check_names()
        self._check_data_parallel()
        if self.heartbeat_timeout_s != 0:
            _at_least("heartbeat_timeout_s", self.heartbeat_timeout_s, LEAST_HEARTBEAT_S)
        exchange = self.exchange
        for name, value in (("lr", self.lr), ("exchange.bucket_mb", exchange.unmeasured_mb),
                            ("exchange.topk_ratio", exchange.topk_ratio)):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}", "a finite number above 0", f"set {name} to one")
        for name in ("fusion_threshold_mb", "cycle_time_ms"):
            if getattr(exchange, name) != -1:
                _at_least(f"exchange.{name}", getattr(exchange, name), 0)
        shares = _numbers(self.shares)
        if shares and (min(shares) < 0 or not sum(shares) > 0 or not math.isfinite(sum(shares))):
            raise UserError(f"shares is {self.shares}", "numbers of 0 or more, at least one above 0",
                            "for example shares: [3, 1]")
        return self

    def _check_texts(self) -> None:
        """Raise `UserError` for a text that means no time, or no steps, and for a decay that is none."""
        if not 0 <= self.ema < 1:
            raise UserError(f"ema is {self.ema}", "0, or a decay below 1 such as 0.999", "correct ema")
        seconds_of(self.time_limit)
        if self.budget and not self.inventory:
            raise UserError(f"budget is {self.budget:g} and no inventory is given", "a file with the prices of the "
                            "hosts", "set inventory to a YAML file with price_per_hour for each host")
        check_url("out", self.out)
        check_url("resume", self.resume)
        window_of(self.trace.steps)
        eval_sets(self.eval)
        best, stop = self.checkpoint, self.early_stop
        modes = best.keep_best_mode, stop.mode
        if best.keep_best == stop.metric != "" and stop.restore and set(modes) == {"min", "max"}:
            raise UserError(f"keep_best_mode {modes[0]} and early_stop.mode {modes[1]} for {stop.metric}",
                            "one direction of a metric", "leave out one of the two modes")

    def _check_names(self) -> None:
        """Raise `UserError` for what is neither built in nor spelt as a callable."""
        ask("hvdtrain.data.augment", "check", self.data.augment)
        known = [*ask("hvdtrain.comm.compressors", "choices"), "auto"]
        if ":" not in self.compression and self.compression not in known:
            raise UserError(f"compression is {self.compression!r}", f"{nearest(self.compression, known)}, one of "
                            f"{', '.join(known)}, or module:callable", "correct compression")
        ask("hvdtrain.reports.trackers", "check", self.trackers)

    def _check_data_parallel(self) -> None:
        """Raise `UserError` for a stage or shards that cannot be, and for a pipeline that cannot."""
        check_pipeline(self)
        stage, shards = self.data_parallel.stage, self.data_parallel.shards
        if stage not in (1, 2, "auto"):
            what = "parameters sharded, too" if stage == 3 else "not a stage"
            raise UserError(f"data_parallel.stage is {stage} ({what})", "1, 2 or auto: parameters are not sharded",
                            "set model_parallel to partition a model that does not fit")
        if shards and (min(shards) < 0 or not 0 < sum(shards) < math.inf):
            raise UserError(f"data_parallel.shards is {shards}", "numbers of 0 or more, at least one above 0",
                            "for example data_parallel.shards: [3, 1]")

    def _check_balance(self) -> None:
        """Raise `UserError` for what cannot be among the keys of heterogeneous ranks and of their memory."""
        texts.check_text(self.remat)
        if self.balance != "off" and self.shares:
            raise UserError(f"balance {self.balance} with shares {self.shares}", "one of the two: balance finds shares",
                            "leave shares out, or set balance: off")
        if any(not 0.01 <= speed <= 1 for speed in self.emulate_speed):
            raise UserError(f"emulate_speed is {self.emulate_speed}", "numbers from 0.01 to 1 at most",
                            "for example emulate_speed: [1, 0.4]")
        for name in self.precisions():
            if name not in PRECISIONS or (name == "auto" and ":" in self.precision):
                raise UserError(f"precision is {self.precision!r}", nearest(name, PRECISIONS) + ", or one of fp32, "
                                "bf16, fp16 for each rank, such as bf16:fp32, or by host or device",
                                "correct precision")
        if not 1 <= self.loss_scale <= 2**24 or math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(f"loss_scale is {self.loss_scale}", "a power of two from 1 to 2^24",
                            "set loss_scale: 65536")

    @property
    def mixes_classes(self) -> bool:
        """Return whether training targets are shares of classes (mixup), whatever the data's own are."""
        return bool(ask("hvdtrain.data.augment", "mixes", self.data.augment))


def _numbers(value: Any) -> list[Any]:
    """Return the entries of a list or mapping, or the value itself."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _at_least(name: str, value: float, least: float) -> None:
    """Raise `UserError` unless ``value`` is finite and not below ``least``."""
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"{name} is {value}", f"a value of {least:g} or more", f"set {name} accordingly")


SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of evaluation sets: a metric is NAME/METRIC."""


def check_set_name(name: Any) -> str:
    """Return ``name``; `UserError` for what cannot name an evaluation set."""
    if not (isinstance(name, str) and SET_NAME.fullmatch(name)):
        raise UserError(f"eval has a set named {schema.shown(name)}", "letters, digits, _, . and -", "rename the set")
    return name


def eval_sets(given: dict[str, Any]) -> dict[str, Named]:
    """Return name and arguments of each evaluation set of the key eval; `UserError` for what cannot be one. Pure."""
    found = {}
    for name, spec in given.items():
        check_set_name(name)
        spec = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, dict):
            raise UserError(f"eval.{name} is {schema.shown(spec)}", "a mapping with name and args, as data has them",
                            f"set eval.{name}.name")
        known = [key.name for key in schema.keys(Named)]
        for key in spec:
            if key not in known:
                raise UserError(f"eval.{name} has the key {key!r}", nearest(str(key), known),
                                f"arguments of the data are set below eval.{name}.args")
        source, args = spec.get("name"), spec.get("args") or {}
        if not (isinstance(source, str) and source):
            raise UserError(f"eval.{name}.name is {schema.shown(source)}", "the data to read, as in data.name",
                            f"set eval.{name}.name")
        if not schema.fits(args, dict):
            raise UserError(f"eval.{name}.args is {schema.shown(args)}", schema.in_words(dict),
                            f"correct eval.{name}.args")
        found[name] = Named(source, args)
    return found


FOR_EACH = 4
"""Micro-batches for each rank of a copy where nothing is configured: a bubble below a fifth."""


def cut_over_ranks(config: Keys) -> bool:
    """Return whether the model is cut over ranks."""
    return config.pipeline.over_ranks


def micro_batches(config: Keys, depth: int) -> int:
    """Return the parts in which a copy of ``depth`` ranks computes its part of a batch, given enough samples."""
    if depth == 1:
        return config.accumulate
    return config.pipeline.micro_batches or max(config.accumulate, FOR_EACH * depth)


def check_pipeline(config: Keys) -> None:
    """Raise `UserError` for values that cannot be, and for keys that do not go together with a cut model."""
    pipeline = config.pipeline
    if any(depth < 1 for depth in pipeline.depths):
        raise UserError(f"pipeline.depths is {pipeline.depths}", "1 or more ranks for each replica", "correct it")
    if pipeline.depths and pipeline.stages > 1:
        raise UserError(f"pipeline.stages {pipeline.stages} with pipeline.depths {pipeline.depths}",
                        "one of the two: depths gives the ranks of each replica", "leave stages out")
    if not cut_over_ranks(config):
        return
    if config.model_parallel > 1:
        raise UserError(f"model_parallel {config.model_parallel} with a pipeline over ranks", "one of the "
                        "two: a rank's stage is on one device", "start one rank per device, "
                        "or leave pipeline out")
    auto = [name for name, value in (("micro_batch", config.micro_batch), ("remat", config.remat)) if value == "auto"]
    if auto:
        raise UserError(f"{auto[0]}: auto with a pipeline over ranks, whose partition already accounts for memory",
                        "a number" if auto[0] == "micro_batch" else "names of blocks, or off",
                        f"set {auto[0]}, or leave it out")
    if isinstance(config.freeze, dict) and any(config.freeze.values()):
        raise UserError("freeze with epochs and a pipeline over ranks, whose stages are fixed", "layers that stay "
                        "frozen: a list of patterns", "give freeze a list, or leave pipeline out")
    _check_exchange(config)


def _check_exchange(config: Keys) -> None:
    """Raise `UserError` for keys of what copies of a cut model exchange that ask for more than one rank knows."""
    exchange, horovod = config.exchange, config.collectives == "horovod"
    for name, asked, expected, do in (
            ("compression auto", config.compression == "auto", "a compression by name: auto measures the gradient "
             "of one rank, and stages have different gradients", "set compression: none, or another"),
            ("exchange.bucket_mb sweep", exchange.bucket_mb == "sweep", "auto, or a size: sweep measures the "
             "gradient of one rank, and stages have different gradients", "leave exchange.bucket_mb out"),
            ("exchange.adasum", exchange.adasum, "sums: Adasum combines the gradients of all ranks of a job",
             "leave exchange.adasum out"),
            ("collectives horovod", horovod, "a transport for groups of ranks: Horovod sums over all ranks of a job",
             "set collectives: auto, shared or mpi"),
            ("exchange.autotune", exchange.autotune, "Horovod's own settings: it tunes them for sums over all ranks",
             "leave exchange.autotune out"),
            ("on_bad_sample skip", config.on_bad_sample == "skip", "stop: each rank of a replica reads the "
             "samples itself, and all would have to skip the same ones", "leave on_bad_sample out"),
            (f"audit {config.audit}", config.audit, "none: an audit repeats a rank's micro-batch on "
             "another rank, which holds a different stage", "leave audit out; check_every compares the replicas' "
                                                            "weights"),
            ("data_parallel.stage auto", config.data_parallel.name == "zero" and config.data_parallel.stage == "auto",
             "stage 1 or 2: auto measures samples on one rank alone, and no rank has the whole model",
             "name data_parallel.stage")):
        if asked:
            raise UserError(f"{name} with a pipeline over ranks", expected, do)


def check_launcher(config: Keys, kind: str) -> None:
    """Raise `UserError` where ranks that were started by ``kind`` of launcher can send each other nothing."""
    if kind == "gloo" and cut_over_ranks(config):
        raise UserError("a pipeline over ranks under horovodrun --gloo, whose ranks cannot send each other messages",
                        "a job over MPI", "start it with mpirun, or horovodrun --mpi")


@dataclass(frozen=True)
class ConfigContext:
    """The configuration and the facts that decide which keys have an effect.

    ``horovod``: gradients or the control plane go over Horovod. ``own_model``, ``own_data``: given to fit as objects.
    ``own_task``, ``file_optimizer``: the model file has one. ``own_optimizer``: the model was compiled with one.
    """

    config: Config
    horovod: bool = True
    own_model: bool = False
    own_data: bool = False
    own_task: bool = False
    own_optimizer: bool = False
    file_optimizer: bool = False


def notes(setup: ConfigContext) -> list[str]:
    """Say of each changed key that does nothing why; the first of its reasons counts. Pure."""
    values, found = dict(schema.leaves(setup.config)), []
    for key in schema.keys(type(setup.config)):
        why = [reason.why for reason in key.unused if reason.when(setup)]
        if why and values[key.name] not in (key.default, []):
            found.append(f"{key.name} has no effect: {why[0]}")
    return found


def assumed(config: Config, idle: Collection[str]) -> str:
    """Return the line that names what is assumed of a user's own training, or ""; ``idle``: idle keys. Pure."""
    values, names = [], []
    if config.optimizer.name == "auto" and "optimizer.args" not in idle:
        values.append("Adam")
    if "lr" in config._unset and "lr" not in idle:
        values.append(f"lr {config.lr:g}")
        names.append("lr")
    if "epochs" in config._unset and not config.max_steps:
        values.append(count(config.epochs, "epoch"))
        names.append("epochs")
    names += ["optimizer"] if "Adam" in values else []
    return f"assumed: {', '.join(values)}; set {', '.join(names)}" if values else ""


def idle(setup: ConfigContext) -> frozenset[str]:
    """Return all keys that do nothing, changed or not. Pure."""
    return frozenset(key.name for key in schema.keys(type(setup.config))
                     if any(reason.when(setup) for reason in key.unused))


def setup_of(config: Config, spec: Any, wire: str, kind: str, model: Any, data: Any) -> ConfigContext:
    """Return the context of a run: its model's ``spec``, name of its ``wire``, ``kind`` of launcher, what fit got."""
    compiled = getattr(spec.model, "compiled", False) and getattr(spec.model, "optimizer", None) is not None
    return ConfigContext(config, "horovod" in wire or kind == "gloo", model is not None, data is not None,
                 spec.task is not None, bool(compiled), spec.optimizer is not None)
