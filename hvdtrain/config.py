"""The whole configuration as typed, frozen dataclasses: every key, unit and default.

Owns the keys of the top level and the checks that need no cluster; `hvdtrain.sections` has the others. Does not parse:
`hvdtrain.cli.train` does, with jsonargparse (YAML file < environment < command line). The docs table in docs/config.md
is made from these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain import placed, schema
from hvdtrain.errors import UserError, nearest
from hvdtrain.pipeline import settings
from hvdtrain.remat import names as remat_names
from hvdtrain.sections import key as _key
from hvdtrain.sections import Checkpoint as Checkpoint
from hvdtrain.sections import Data as Data
from hvdtrain.sections import DataParallel as DataParallel
from hvdtrain.sections import EarlyStop as EarlyStop
from hvdtrain.sections import Exchange as Exchange
from hvdtrain.sections import Named as Named
from hvdtrain.sections import Pipeline as Pipeline
from hvdtrain.sections import Rebalance as Rebalance
from hvdtrain.sections import Schedule as Schedule
from hvdtrain.sections import Trace as Trace
from hvdtrain.slots import ask, in_slot
from hvdtrain.trace.window import window_of
from hvdtrain.wall_limit import seconds_of


MOST = 2**53
"""Largest whole number of a key: beyond it a float64 skips numbers, and sums over ranks are float64."""


LARGEST = {"seed": 2**32 - 1, "threads": 4096, "control_timeout_s": 1e9, "heartbeat_timeout_s": 1e9,
           "model_parallel": 1024, "devices_per_rank": 1024}
"""Bounds of keys. Of devices: without GPUs TensorFlow divides the CPU into so many, each of which takes memory."""

LEAST_TIMEOUT_S = 1.0
"""Shortest bound of a wait: below it ranks that merely take turns on a core would count as lost."""

LEAST_HEARTBEAT_S = 2.0
"""Shortest time after which a rank counts as frozen (`hvdtrain.faults.watch`)."""

PRECISIONS = ("fp32", "bf16", "fp16", "auto")


@dataclass(frozen=True)
class Config:
    """One training run."""

    model: str = _key(
        "auto", "",
        "module:callable (or path/file.py:callable) that returns an nn.Module or a keras.Model; "
        "auto: the built-in CNN of the installed framework")
    model_args: dict = _key({}, "", "keyword arguments of that callable")
    data: Data = _key(Data(), "", "")
    epochs: int = _key(12, "epochs", "passes over the data; 0 trains nothing")
    max_steps: int = _key(0, "steps", "stop after so many steps in all; 0: no limit")
    global_batch: int = _key(
        64, "samples",
        "samples of one step over all ranks; the curve depends on this, not on the ranks")
    shares: list[float] | dict[str, float] = _key(
        [], "", "relative part of the batch for each rank, such as [3, 1], or for each rank of a host or kind of "
        "device, such as fast=3,old=1 (a mapping in a file), which holds for any ranks; empty: equal", per_rank=True)
    balance: Literal["off", "static", "auto"] = _key(
        "off", "", "off: equal parts, or shares; static: the parts that a probe of all ranks at the start "
        "asks for; auto: also made anew while training, when speeds change")
    rebalance: Rebalance = _key(Rebalance(), "", "")
    emulate_speed: list[float] = _key(
        [], "factor", "for tests: ranks' speeds as parts of their own, such as [1, 0.4]; below 1 a rank's computing "
        "is stretched by waiting", per_rank=True)
    accumulate: int = _key(1, "micro-batches", "micro-batches each rank cuts its part into")
    micro_batch: int | Literal["auto"] = _key(
        0, "samples", "largest micro-batch; more are made where a part exceeds it; 0: no limit; auto: the largest that "
        "each rank's memory holds, found at the start")
    remat: Literal["off", "auto"] | list[str] | str = _key(
        "off", "", "which named blocks of the model forget what they computed and compute it again in backward "
        "(activation checkpointing): off; auto: of each rank the cheapest that make it fit its memory; every:K: each "
        "K-th; or their names, with commas between or as a list. The gradients are the same to the bit")
    on_oom: Literal["shrink", "stop"] = _key(
        "shrink", "", "shrink: a rank that runs out of memory makes its micro-batches smaller, alone, and all ranks "
        "repeat the step; stop: the run ends")
    compile: Literal["off", "auto"] = _key(
        "off", "", "auto: time the model compiled (torch.compile of each block, XLA in TensorFlow) and in "
        "channels_last on real batches at the start, and keep what is fastest")
    peak_tflops: list[float] | dict[str, float] = _key(
        [], "TFLOPS", "what a device could compute a second in the type that the run multiplies in, by rank, or by "
        "host or device such as A100=312, for its utilisation (MFU); empty: by the table of devices", per_rank=True)
    seed: int = _key(0, "", "seeds the data order, the initial weights and the ranks' random generators")
    lr: float = _key(2e-3, "", "base learning rate")
    optimizer: Named = _key(
        Named(), "",
        "torch.optim or keras.optimizers class; auto: Adam, or the compiled model's own")
    schedule: Schedule = _key(Schedule(), "", "")
    loss: Named = _key(
        Named(), "",
        "torch.nn.functional or keras.losses name; auto: cross entropy for integer targets, else squared "
        "error")
    metrics: list[str] = _key(
        ["accuracy"], "",
        "accuracy, a torch.nn.functional or keras.metrics name, or module:callable(outputs, targets) -> "
        "(sum, weight)")
    clip_norm: float = _key(0.0, "", "clip gradients to this global L2 norm; 0: off")
    ema: float = _key(
        0.0, "factor", "decay of an exponential moving average of the weights, such as 0.999, which is evaluated and "
        "saved as the final model in their place; 0: none")
    precision: dict[str, str] | str = _key(
        "fp32", "", "what ranks compute in: fp32 (the model's own types), bf16, fp16 (with loss scaling), auto (by "
        "what each rank's device does well), one for each rank such as bf16:fp32, or by host or device such as "
        "cpu=fp32,H200=bf16 (a mapping in a file); parameters and gradients keep their types", per_rank=True)
    loss_scale: float = _key(65536.0, "factor", "first loss scale of ranks that compute in fp16, a power of two")
    model_parallel: int = _key(
        1, "devices", "devices of each rank that the model's named blocks are split over, in contiguous parts")
    split_micro_batches: int = _key(
        0, "micro-batches", "parts in which a split model computes a micro-batch, so that its devices work at once; "
        "0: four for each device")
    pipeline: Pipeline = _key(Pipeline(), "", "")
    devices_per_rank: int = _key(
        0, "devices", "GPUs that each rank owns, or logical devices of a CPU in TensorFlow; 0: as many as "
        "model_parallel")
    sync_batchnorm: bool = _key(False, "", "BatchNorm takes its statistics over the samples of all ranks")
    exchange_device: Literal["auto", "device", "cpu"] = _key(
        "auto", "", "where gradients are exchanged from: device (where they are made), cpu (over host memory), or "
        "auto: cpu where ranks' devices are unlike, else device")
    collectives: Literal["auto", "horovod", "mpi", "shared", "null"] = _key(
        "auto", "", "what carries gradients; shared: memory that the ranks of a host share, mpi between hosts; auto: "
        "between CPUs shared where a host has several ranks, else mpi, and over several hosts what is measured to be "
        "best of these and horovod; between GPUs, and with sync_batchnorm in Keras on TensorFlow, horovod where it is "
        "built, else mpi; null: nothing, only to measure")
    compression: str = _key(
        "none", "", "how gradients are compressed for the wire: none, fp16, bf16, int8, topk, powersgd, or "
        "module:callable (path/file.py:callable) that makes another way; auto: measures, and picks one only where it "
        "saves time")
    exchange: Exchange = _key(Exchange(), "", "")
    data_parallel: DataParallel = _key(DataParallel(), "", "")
    transforms: list[str] = _key(
        [], "", "module:callable (path/file.py:callable) of further changes to how the model computes, installed for "
        "the time of a run")
    callbacks: list[str] = _key(
        [], "", "module:callable (path/file.py:callable) of further callbacks, made before those that report")
    eval_every: int = _key(1, "epochs", "evaluate every so many epochs; 0: only at the end")
    early_stop: EarlyStop = _key(EarlyStop(), "", "")
    on_bad_sample: Literal["stop", "skip"] = _key(
        "stop", "", "a sample that cannot be read (a broken picture): stop: it is named and the run ends; skip: it is "
        "left out on all ranks, named, and counted; more than 1 % of the data ends the run all the same")
    nan_guard: Literal["stop", "skip"] = _key(
        "stop", "",
        "stop: a loss or gradient that is not finite ends the run before its update; skip: that step is left out on "
        "every rank")
    max_skipped: int = _key(20, "steps", "with nan_guard skip: skipped steps in a row that end the run")
    check_every: int | Literal["auto"] = _key(
        "auto", "steps", "compare the ranks' weights every so many steps, at the start and at the end, and end the run "
        "where they differ; auto: every 200, seldomer where that took more than 0.3 % of the time; 0: never")
    audit: int = _key(
        0, "steps", "every so many steps compute a micro-batch on another rank too, and end the run where a device "
        "computes wrongly; 100 takes 1 to 1.5 % of the time; 0: off")
    checkpoint: Checkpoint = _key(Checkpoint(), "", "")
    time_limit: str = _key(
        "", "", "wall limit of this job, in seconds or as 04:00:00, counted from its start: the run ends before it, "
        "saved, with status 75, for another job to go on with --resume auto; empty: none is known")
    resume: str = _key(
        "", "",
        "auto: newest whole checkpoint of this run, if any; or the path of a checkpoint; empty: start anew")
    out: str = _key("", "", "directory of this run; empty: a new runs/MODEL-NNN")
    log_every: int = _key(10, "steps", "progress and log interval")
    progress: Literal["auto", "rich", "plain", "off"] = _key(
        "auto", "",
        "auto: a line that moves on a terminal, under a launcher on the launcher's, else plain lines; what is silent "
        "for over 3 s says what it does; off: neither")
    trackers: list[str] = _key(
        [], "", "what else gets the records of rank 0: tensorboard, wandb, mlflow, csv, prometheus, or module:callable "
        "(path/file.py:callable) that makes another")
    trace: Trace = _key(Trace(), "", "")
    threads: int = _key(0, "threads", "compute threads of one rank; 0: its share of the host's cores")
    deterministic: bool = _key(False, "", "ask the framework for deterministic kernels (bit-equal resume on GPUs)")
    control_timeout_s: float = _key(
        600.0, "s",
        "longest wait for other ranks before the run ends with the name of the wait; 1 or more")
    heartbeat_timeout_s: float = _key(
        30.0, "s",
        "how long a rank may be frozen, hang in a step, or a host not answer, before it is named and the job ends; 2 "
        "or more; 0: nobody watches")

    def __post_init__(self) -> None:
        """Take a bare text for a section that has a name: ``Config(optimizer="SGD")``; and precision's text by name."""
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", placed.entries(self.precision) or self.precision)
        for name, kind in schema.named_sections(type(self)).items():
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, kind(name=getattr(self, name)))
        if isinstance(self.pipeline, int) and not isinstance(self.pipeline, bool):
            object.__setattr__(self, "pipeline", Pipeline(self.pipeline))

    def check(self) -> Config:
        """Return self if every value is possible, else raise `UserError` naming the first that is not."""
        schema.check_types(self)
        for name, value in schema.leaves(self):
            for number in _numbers(value):
                if isinstance(number, (int, float)) and not abs(number) <= MOST:  # NaN is not, nor what no float holds
                    raise UserError(f"{name} is {schema.shown(number)}", "a finite number below 2^53",
                                    f"correct {name}")
        for name, most in LARGEST.items():
            if getattr(self, name) > most:
                raise UserError(f"{name} is {getattr(self, name)}", f"{most:.10g} at most", f"correct {name}")
        _at_least("global_batch", self.global_batch, 1)
        for name in ("audit", "epochs", "max_steps", "eval_every", "threads", "seed",
                     "split_micro_batches", "devices_per_rank"):
            _at_least(name, getattr(self, name), 0)
        for name in ("accumulate", "log_every", "max_skipped", "model_parallel"):
            _at_least(name, getattr(self, name), 1)
        if 0 < self.devices_per_rank < self.model_parallel:
            raise UserError(f"devices_per_rank is {self.devices_per_rank} with model_parallel {self.model_parallel}",
                            "a device for each part of the model", f"set devices_per_rank: {self.model_parallel}")
        self._check_texts()
        self._check_balance()
        self._check_names()
        self._check_data_parallel()
        _at_least("data.prefetch", self.data.prefetch, 0)
        _at_least("check_every", 0 if self.check_every == "auto" else self.check_every, 0)
        _at_least("checkpoint.keep", self.checkpoint.keep, 1)
        _at_least("checkpoint.every_steps", self.checkpoint.every_steps, 0)
        _at_least("checkpoint.every_s", self.checkpoint.every_s, 0)
        _at_least("checkpoint.mtbf_s", self.checkpoint.mtbf_s, 0)
        _at_least("schedule.warmup_steps", self.schedule.warmup_steps, 0)
        _at_least("schedule.linear_scaling_base", self.schedule.linear_scaling_base, 0)
        _at_least("early_stop.patience", self.early_stop.patience, 1)
        _at_least("clip_norm", self.clip_norm, 0)
        _at_least("control_timeout_s", self.control_timeout_s, LEAST_TIMEOUT_S)
        if self.heartbeat_timeout_s != 0:
            _at_least("heartbeat_timeout_s", self.heartbeat_timeout_s, LEAST_HEARTBEAT_S)
        exchange = self.exchange
        bucket_mb = 1.0 if exchange.bucket_mb == "auto" else exchange.bucket_mb
        for name, value in (("lr", self.lr), ("exchange.bucket_mb", bucket_mb),
                            ("exchange.topk_ratio", exchange.topk_ratio)):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}", "a finite number above 0", f"set {name} to one")
        for name in ("fusion_threshold_mb", "cycle_time_ms"):
            if getattr(exchange, name) != -1:
                _at_least(f"exchange.{name}", getattr(exchange, name), 0)
        _at_least("exchange.powersgd_rank", exchange.powersgd_rank, 1)
        _at_least("exchange.topk_warmup_steps", exchange.topk_warmup_steps, 0)
        for name, value, most in (("exchange.topk_ratio", exchange.topk_ratio, 1.0),
                                  ("exchange.topk_momentum", exchange.topk_momentum, 0.9999),
                                  ("exchange.auto_margin", exchange.auto_margin, 1.0)):
            _at_least(name, value, 0)
            if value > most:
                raise UserError(f"{name} is {value}", f"{most:g} at most", f"set {name} accordingly")
        shares = _numbers(self.shares)
        if shares and (min(shares) < 0 or not sum(shares) > 0 or not math.isfinite(sum(shares))):
            raise UserError(f"shares is {self.shares}", "numbers of 0 or more, at least one above 0",
                            "for example shares: [3, 1]")
        return self

    def _check_texts(self) -> None:
        """Raise `UserError` for a text that means no time, or no steps, and for a decay that is none."""
        if not 0 <= self.ema < 1:
            raise UserError(f"ema is {self.ema}", "0, or a decay below 1 such as 0.999", "correct ema")
        _at_least("data.workers", 0 if self.data.workers == "auto" else self.data.workers, 0)
        seconds_of(self.time_limit)
        window_of(self.trace.steps)

    def _check_names(self) -> None:
        """Raise `UserError` for what is neither built in nor spelt as a callable."""
        ask("hvdtrain.data.augment", "check", self.data.augment)
        built_in = in_slot("hvdtrain.exchange.compressors", "make")
        known = [*(name for name in built_in if name != "adasum"), "auto"]  # adasum has a key of its own
        if ":" not in self.compression and self.compression not in known:
            raise UserError(f"compression is {self.compression!r}", f"{nearest(self.compression, known)}, one of "
                            f"{', '.join(known)}, or module:callable", "correct compression")
        ask("hvdtrain.trackers", "check", self.trackers)

    def _check_data_parallel(self) -> None:
        """Raise `UserError` for a stage or shards that cannot be, and for a pipeline that cannot."""
        settings.check(self)
        stage, shards = self.data_parallel.stage, self.data_parallel.shards
        if stage not in (1, 2, "auto"):
            what = "parameters divided too" if stage == 3 else "no such stage"
            raise UserError(f"data_parallel.stage is {stage} ({what})", "1, 2 or auto: every rank keeps the parameters",
                            "where they do not fit, split the model over devices (model_parallel)")
        if shards and (min(shards) < 0 or not 0 < sum(shards) < math.inf):
            raise UserError(f"data_parallel.shards is {shards}", "numbers of 0 or more, at least one above 0",
                            "for example data_parallel.shards: [3, 1]")

    def _check_balance(self) -> None:
        """Raise `UserError` for what cannot be among the keys of unlike ranks and of their memory."""
        remat_names.check_text(self.remat)
        _at_least("micro_batch", self.micro_batch_limit, 0)
        rebalance = self.rebalance
        for name, value, least in (("every_steps", rebalance.every_steps, 1), ("lasting", rebalance.lasting, 1),
                                   ("margin", rebalance.margin, 0), ("probe_s", rebalance.probe_s, 0)):
            _at_least(f"rebalance.{name}", value, least)
        for number in _numbers(rebalance.max_micro_batch):
            _at_least("rebalance.max_micro_batch", number, 0)
        if self.balance != "off" and self.shares:
            raise UserError(f"balance {self.balance} with shares {self.shares}", "one of the two: balance finds shares",
                            "leave shares out, or set balance: off")
        for number in _numbers(self.peak_tflops):
            _at_least("peak_tflops", number, 0)
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

    def precisions(self) -> list[str]:
        """The types that ``precision`` names, of ranks or of hosts and devices."""
        return self.precision.split(":") if isinstance(self.precision, str) else list(self.precision.values())

    @property
    def micro_batch_limit(self) -> int:
        """Samples of the largest micro-batch as far as it is configured; 0: no limit is."""
        return 0 if self.micro_batch == "auto" else self.micro_batch

    @property
    def mixes_classes(self) -> bool:
        """Whether training targets are shares of classes (mixup), whatever the data's own are."""
        return bool(ask("hvdtrain.data.augment", "mixes", self.data.augment))

    @property
    def in_parts(self) -> bool:
        """Whether a rank may have several micro-batches in a step from the start."""
        return self.accumulate > 1 or self.micro_batch != 0 or self.balance != "off"

    def time_limit_s(self) -> float:
        """Seconds of ``time_limit``; 0 where none is known."""
        return seconds_of(self.time_limit)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, JSON-able if the free-form ``args`` are."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Short hash of every key, to compare between ranks."""
        text = json.dumps(self.to_dict(), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _numbers(value: Any) -> list[Any]:
    """What a key's value holds: the entries of a list or mapping, or itself."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _at_least(name: str, value: float, least: float) -> None:
    """Raise `UserError` unless ``value`` is finite and not below ``least``."""
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"{name} is {value}", f"a value of {least:g} or more", f"set {name} accordingly")
