"""The keys of a run as a typed, frozen dataclass: every key, unit and default.

Owns the keys of the top level; `hvdtrain.config.sections` has the others, `hvdtrain.config` the checks. The docs table
in docs/reference/settings.md is made from these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from hvdtrain.config import placed, schema
from hvdtrain.config.sections import (
    COMPILED,
    FILE_OPTIMIZER,
    NO_FP16,
    NO_SKIP,
    ONE_DEVICE,
    OWN_MODEL,
    OWN_RATE,
    OWN_TASK,
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
from hvdtrain.config.sections import key as _key
from hvdtrain.config.texts import seconds_of
from hvdtrain.core import metric_entries
from hvdtrain.core.errors import UserError

K = TypeVar("K", bound="Keys")

LEAST_TIMEOUT_S = 1.0
"""Shortest bound of a wait: below it ranks that merely take turns on a core would count as lost."""

MOST_DEVICES = 1024
"""Without GPUs TensorFlow divides the CPU into so many devices, each of which takes memory."""


@dataclass(frozen=True)
class Keys:
    """Every key of one training run, unchecked; `hvdtrain.config.Config` is what a run has."""

    _written: ClassVar[Mapping[str, str]] = {}
    _refused: ClassVar[UserError | None] = None
    _unset: ClassVar[frozenset[str]] = frozenset()
    """Top-level keys at their defaults that nobody set; `dataclasses.replace` sets them all."""

    model: str = _key(
        "auto", "",
        "module:callable (or path/file.py:callable) that returns an nn.Module or a keras.Model; "
        "auto: the built-in CNN of the installed framework", unused=(OWN_MODEL,))
    model_args: dict = _key({}, "", "keyword arguments of that callable", unused=(OWN_MODEL,))
    data: DataConfig = _key(DataConfig(), "", "")
    # Of lr, epochs and metrics the defaults are those that are assumed for a user's own training; a run prints them.
    epochs: int = _key(12, "epochs", "passes over the data; 0: no training", affects="nothing", least=0)
    max_steps: int = _key(0, "steps", "stop after this number of steps; 0: no limit", affects="nothing", least=0, off=0)
    global_batch: int = _key(
        64, "samples",
        "samples of one step over all ranks; results depend on this, not on the number of ranks", least=1,
        aliases=("global_batch_size",))
    shares: list[float] | dict[str, float] = _key(
        [], "", "relative share of the batch for each rank, such as [3, 1]; or by host or kind of device, "
        "such as fast=3,old=1 (a mapping in a file); empty: equal shares", per_rank=True,
        affects="split", off=[])
    balance: Literal["off", "static", "auto"] = _key(
        "off", "", "off: equal shares, or the key shares; static: by a probe of every rank's "
        "speed at the start; auto: also rebalance when speeds change", affects="nothing", off="off")
    rebalance: RebalanceConfig = _key(RebalanceConfig(), "", "", affects="nothing")
    emulate_speed: list[float] = _key(
        [], "factor", "for tests: slow each rank down to this share of its speed, such as [1, 0.4]",
        per_rank=True, affects="nothing")
    accumulate: int = _key(1, "micro-batches", "micro-batches into which each rank divides its "
                                               "share", affects="split", least=1,
                           aliases=("gradient_accumulation_steps", "accumulate_grad_batches"))
    micro_batch: int | Literal["auto"] = _key(
        0, "samples", "largest micro-batch; a larger share is divided into more; 0: no limit; auto: the largest "
        "that fits each rank's memory", affects="split", least=0, off=0,
        aliases=("micro_batch_size",))
    remat: Literal["off", "auto"] | list[str] | str = _key(
        "off", "", "activation checkpointing: named blocks of the model whose activations are "
        "recomputed in backward. off; auto: on each rank the cheapest blocks that make it fit its memory; every:K: "
        "each K-th block; or names. Gradients stay bit-identical",
        affects="split", off="off", aliases=("activation_checkpointing", "gradient_checkpointing"))
    on_oom: Literal["shrink", "stop"] = _key(
        "shrink", "", "shrink: a rank that runs out of memory reduces its own micro-batches, and all "
        "ranks repeat the step; stop: end the run", affects="nothing")
    compile: Literal["off", "auto"] = _key(
        "off", "", "auto: at the start, time torch.compile (XLA in TensorFlow) "
        "and channels_last on real batches, and keep the fastest", affects="nothing", off="off")
    peak_tflops: list[float] | dict[str, float] = _key(
        [], "TFLOPS", "peak speed of a device in the run's compute type, for the utilisation (MFU), by rank, or by "
        "host or device such as A100=312; empty: from the table of devices", per_rank=True,
        affects="nothing", least=0)
    seed: int = _key(
        0, "", "seed of the data order, the initial weights and the ranks' random generators", least=0,
        most=2**32 - 1)
    lr: float = _key(2e-3, "", "base learning rate", unused=(COMPILED, OWN_RATE), aliases=("learning_rate",))
    optimizer: Named = _key(
        Named(), "",
        "torch.optim or keras.optimizers class; auto: Adam, or the compiled model's own",
        unused=(FILE_OPTIMIZER, COMPILED))
    schedule: ScheduleConfig = _key(ScheduleConfig(), "", "")
    freeze: list[str] | dict[str, int] = _key(
        [], "epochs", "patterns of names of parameters, modules or layers that are not trained, such as backbone or "
        "*.bias; backbone=2 (a mapping in a file): trained after 2 epochs. Frozen BatchNorm keeps its running "
        "statistics and normalizes with them", least=0, off=[])
    loss: Named = _key(
        Named(), "",
        "torch.nn.functional or keras.losses name; auto: cross entropy for integer targets, else squared "
        "error", unused=(OWN_TASK,))
    metrics: list[str] = _key(
        ["accuracy"], "",
        "accuracy, a torch.nn.functional or keras.metrics name, a class of metrics with its arguments such as "
        "torchmetrics.F1Score(task=...), or module:callable(outputs, targets) -> "
        "(sum, weight); default: accuracy for integer class labels, otherwise none",
        affects="metrics", unused=(OWN_TASK,), off=[])
    clip_norm: float = _key(0.0, "", "clip gradients to this global L2 norm; 0: off", least=0, off=0.0,
                            aliases=("max_grad_norm", "gradient_clip_val"))
    ema: float = _key(
        0.0, "factor", "decay of an exponential moving average of the weights, such as 0.999; evaluation "
        "and the final model use the average; 0: none", off=0.0)
    precision: dict[str, str] | str = _key(
        "fp32", "", "compute type: fp32 (the model's own types), bf16, fp16 (with loss scaling), auto (the "
        "fastest type of each rank's device), by rank such as bf16:fp32, or by host or device such "
        "as cpu=fp32,H200=bf16; parameters and gradients keep their types", per_rank=True)
    loss_scale: float = _key(
        65536.0, "factor", "initial loss scale of ranks that compute in fp16, a power of two",
        unused=(NO_FP16,))
    model_parallel: int = _key(
        1, "devices", "devices of each rank over which the model's named blocks are partitioned, in contiguous stages",
        affects="nothing", least=1, most=MOST_DEVICES)
    split_micro_batches: int = _key(
        0, "micro-batches", "parts of a micro-batch that pass through a model partitioned by model_parallel, so that "
        "its devices work at the same time; 0: four for each device", affects="split", unused=(ONE_DEVICE,), least=0)
    pipeline: PipelineConfig = _key(PipelineConfig(), "", "", affects="nothing")
    devices_per_rank: int = _key(
        0, "devices", "GPUs of each rank, or logical CPU devices in TensorFlow; 0: as many "
        "as model_parallel", affects="nothing", least=0, most=MOST_DEVICES)
    sync_batchnorm: bool = _key(False, "", "compute BatchNorm statistics over the samples of all ranks")
    exchange_device: Literal["auto", "device", "cpu"] = _key(
        "auto", "", "memory from which gradients are exchanged: device, cpu (host memory), "
        "or auto: cpu where ranks have different devices, else device", affects="nothing")
    collectives: Literal["auto", "horovod", "mpi", "shared", "null"] = _key(
        "auto", "", "transport of gradients; shared: shared memory within a host, mpi between hosts; auto: "
        "between CPUs shared where a host has several ranks, else mpi, and over several hosts the fastest, as "
        "measured; between GPUs, and with sync_batchnorm in Keras on TensorFlow, horovod where it is "
        "built, else mpi; null: no exchange, for measurements only", affects="nothing", off="null",
        aliases=("backend",))
    compression: str = _key(
        "none", "", "compression of exchanged gradients: {choices}, or "
        "module:callable that returns a compressor; auto: measure, and compress only "
        "where that saves time", choices="hvdtrain.comm.compressors", off="none")
    exchange: ExchangeConfig = _key(ExchangeConfig(), "", "")
    data_parallel: DataParallelConfig = _key(DataParallelConfig(), "", "")
    transforms: list[str] = _key(
        [], "", "module:callable of further model transforms, installed for the duration of a run", off=[])
    callbacks: list[str] = _key(
        [], "", "module:callable of further callbacks, called before those that report",
        affects="nothing", off=[])
    eval_every: int = _key(
        1, "epochs", "evaluate every N epochs; 0: only at the end", affects="metrics",
        quiet=0, least=0)
    eval_steps: int = _key(
        0, "steps", "evaluate every N steps, too; 0: off", affects="metrics", quiet=0, least=0, off=0)
    eval: dict = _key(
        {}, "", "further evaluation sets: NAME: {name, args}, as data has them, such as {wiki: {name: wiki.npz}}; the "
        "test split of each, or all of it; metrics are called NAME/METRIC", affects="metrics", quiet={}, off={})
    eval_max_samples: int = _key(
        0, "samples", "evaluate the first N samples of each evaluation set; 0: all", affects="metrics", least=0, off=0)
    early_stop: EarlyStopConfig = _key(EarlyStopConfig(), "", "")
    on_bad_sample: Literal["stop", "skip"] = _key(
        "stop", "", "unreadable sample (a corrupt image): stop: name it and end the run; "
        "skip: skip it on all ranks, name and count it; more than 1 % of the data ends the run anyway")
    nan_guard: Literal["stop", "skip"] = _key(
        "stop", "",
        "loss or gradient that is not finite: stop: end the run before the update; skip: skip the "
        "step on every rank")
    max_skipped: int = _key(
        20, "steps", "with nan_guard skip: consecutive skipped steps that end the run", affects="nothing",
        unused=(NO_SKIP,), least=1)
    check_every: int | Literal["auto"] = _key(
        "auto", "steps", "compare the ranks' weights every N steps, at the start and at the end, and end the run if "
        "they differ; auto: every 200 steps, less often where that takes more than 0.3 % of the time; 0: never",
        affects="nothing", least=0, off=0)
    audit: int = _key(
        0, "steps", "every N steps repeat a micro-batch on another rank, and end the run if a device "
        "computes wrong results; 100 takes 1 to 1.5 % of the time; 0: off", affects="nothing", least=0, off=0)
    checkpoint: CheckpointConfig = _key(CheckpointConfig(), "", "", affects="nothing")
    time_limit: str = _key(
        "", "", "time limit of this job, in seconds or as 04:00:00, counted from its start: the run saves and ends "
        "before the limit with status 75; empty: no limit", affects="nothing",
        off="", aliases=("max_time",))
    budget: float = _key(
        0.0, "currency of the inventory", "most that this job may cost, counted from its start by the hour of "
        "each of its hosts: the run saves and ends before with status 75; 0: no limit", affects="nothing", least=0,
        off=0.0)
    inventory: str = _key(
        "", "", "YAML file of hosts with their prices per hour, which budget needs, as for the command plan",
        affects="nothing", off="")
    resume: str = _key(
        "", "",
        "auto: newest complete checkpoint of this run, if any; or the path or URL of a checkpoint or a run; empty: "
        "start from scratch",
        affects="nothing", off="", aliases=("resume_from_checkpoint", "ckpt_path"))
    out: str = _key("", "", "directory of this run, or a URL such as s3://bucket/run; empty: a new runs/MODEL-NNN",
                    affects="nothing", aliases=("output_dir", "default_root_dir"))
    log_every: int = _key(10, "steps", "progress and log interval", affects="nothing", least=1)
    progress: Literal["auto", "rich", "plain", "off"] = _key(
        "auto", "",
        "auto: a live line on a terminal, plain lines elsewhere and under a launcher; off: neither",
        affects="nothing", quiet="off", off="off")
    trackers: list[str] = _key(
        [], "", "trackers that receive the records of rank 0: {choices}, or "
        "module:callable that returns one", affects="nothing", quiet=[],
        choices="hvdtrain.reports.trackers", off=[], aliases=("logger", "report_to", "log_with"))
    trace: TraceConfig = _key(TraceConfig(), "", "", affects="nothing")
    forecast: bool = _key(
        True, "", "write forecast.json at the start (time of a step, by earlier runs of the model on these devices), "
        "its errors into completed.json, and remember what this run takes", affects="nothing", quiet=False)
    threads: int = _key(
        0, "threads", "compute threads of one rank; 0: its share of the host's cores", affects="nothing", least=0,
        most=4096)
    deterministic: bool = _key(
        False, "", "use the framework's deterministic kernels (bit-equal resume on GPUs)",
        affects="nothing")
    control_timeout_s: float = _key(
        600.0, "s",
        "longest wait for other ranks before the run ends with an error that names the operation; 1 or "
        "more", affects="nothing",
        least=LEAST_TIMEOUT_S, most=1e9)
    heartbeat_timeout_s: float = _key(
        30.0, "s",
        "longest time for which a rank may freeze or hang in a step, or a host may not answer, before the job ends "
        "with an error that names it; 2 or more; 0 disables the watchdog", affects="nothing", most=1e9, off=0.0)

    def __post_init__(self) -> None:
        """Take a bare text for a section that has a name: ``Config(optimizer="SGD")``; and precision's text by name.

        Spellings of off, a bare item of a list and the like become the key's own values.
        """
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", placed.entries(self.precision) or self.precision)
        for name, kind in schema.off_sections(type(self)).items():
            if schema.is_off(getattr(self, name)):
                object.__setattr__(self, name, kind())  # by default they are
        for name, kind in schema.named_sections(type(self)).items():
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, kind(name=getattr(self, name)))
        object.__setattr__(self, "metrics", metric_entries.entries(self.metrics))
        if isinstance(self.pipeline, int) and not isinstance(self.pipeline, bool):
            object.__setattr__(self, "pipeline", PipelineConfig(self.pipeline))
        for key in schema.respelled(type(self)):  # type: ignore[arg-type]
            section, _, last = key.name.rpartition(".")
            holder = getattr(self, section) if section else self
            if not dataclasses.is_dataclass(holder):
                continue
            value = getattr(holder, last)
            own = value if value is key.default else schema.own_value(key, value)
            if own is not value and section:
                object.__setattr__(self, section, schema.replaced(holder, {last: own}))
            elif own is not value:
                object.__setattr__(self, last, own)

    def precisions(self) -> list[str]:
        """Return the types that ``precision`` names, of ranks or of hosts and devices."""
        return self.precision.split(":") if isinstance(self.precision, str) else list(self.precision.values())

    @property
    def micro_batch_limit(self) -> int:
        """Return the configured size of the largest micro-batch; 0: no limit."""
        return 0 if self.micro_batch == "auto" else self.micro_batch

    @property
    def in_parts(self) -> bool:
        """Return whether a rank may have several micro-batches in a step from the start."""
        return self.accumulate > 1 or self.micro_batch != 0 or self.balance != "off"

    def time_limit_s(self) -> float:
        """Return the seconds of ``time_limit``; 0 where none is known."""
        return seconds_of(self.time_limit)

    def quiet(self: K) -> K:
        """Return a copy for commands that time or compare steps alone: without evaluation, checkpoints, reports."""
        return schema.replaced(self, schema.quiet(type(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return a plain nested dictionary, JSON-able if the free-form ``args`` are."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Return a short hash of every key, to compare between ranks."""
        text = json.dumps(self.to_dict(), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
