"""The keys of a run as a typed, frozen dataclass: every key, unit and default.

Owns the keys of the top level; `hvdtrain.config.sections` has the others, `hvdtrain.config` the checks. The docs table
in docs/config.md is made from these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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

K = TypeVar("K", bound="Keys")

LEAST_TIMEOUT_S = 1.0
"""Shortest bound of a wait: below it ranks that merely take turns on a core would count as lost."""

MOST_DEVICES = 1024
"""Without GPUs TensorFlow divides the CPU into so many devices, each of which takes memory."""


@dataclass(frozen=True)
class Keys:
    """Every key of one training run, unchecked; `hvdtrain.config.Config` is what a run has."""

    model: str = _key(
        "auto", "",
        "module:callable (or path/file.py:callable) that returns an nn.Module or a keras.Model; "
        "auto: the built-in CNN of the installed framework", unused=(OWN_MODEL,))
    model_args: dict = _key({}, "", "keyword arguments of that callable", unused=(OWN_MODEL,))
    data: DataConfig = _key(DataConfig(), "", "")
    epochs: int = _key(12, "epochs", "passes over the data; 0 trains nothing", affects="nothing", least=0)
    max_steps: int = _key(0, "steps", "stop after so many steps in all; 0: no limit", affects="nothing", least=0)
    global_batch: int = _key(
        64, "samples",
        "samples of one step over all ranks; the curve depends on this, not on the ranks", least=1)
    shares: list[float] | dict[str, float] = _key(
        [], "", "relative part of the batch for each rank, such as [3, 1], or for each rank of a host or kind of "
        "device, such as fast=3,old=1 (a mapping in a file), which holds for any ranks; empty: equal", per_rank=True,
        affects="split")
    balance: Literal["off", "static", "auto"] = _key(
        "off", "", "off: equal parts, or shares; static: the parts that a probe of all ranks at the start "
        "asks for; auto: also made anew while training, when speeds change", affects="nothing")
    rebalance: RebalanceConfig = _key(RebalanceConfig(), "", "", affects="nothing")
    emulate_speed: list[float] = _key(
        [], "factor", "for tests: ranks' speeds as parts of their own, such as [1, 0.4]; below 1 a rank's computing "
        "is stretched by waiting", per_rank=True, affects="nothing")
    accumulate: int = _key(1, "micro-batches", "micro-batches each rank cuts its part into", affects="split", least=1)
    micro_batch: int | Literal["auto"] = _key(
        0, "samples", "largest micro-batch; more are made where a part exceeds it; 0: no limit; auto: the largest that "
        "each rank's memory holds, found at the start", affects="split", least=0)
    remat: Literal["off", "auto"] | list[str] | str = _key(
        "off", "", "which named blocks of the model forget what they computed and compute it again in backward "
        "(activation checkpointing): off; auto: of each rank the cheapest that make it fit its memory; every:K: each "
        "K-th; or their names, with commas between or as a list. The gradients are the same to the bit",
        affects="split")
    on_oom: Literal["shrink", "stop"] = _key(
        "shrink", "", "shrink: a rank that runs out of memory makes its micro-batches smaller, alone, and all ranks "
        "repeat the step; stop: the run ends", affects="nothing")
    compile: Literal["off", "auto"] = _key(
        "off", "", "auto: time the model compiled (torch.compile of each block, XLA in TensorFlow) and in "
        "channels_last on real batches at the start, and keep what is fastest", affects="nothing")
    peak_tflops: list[float] | dict[str, float] = _key(
        [], "TFLOPS", "what a device could compute a second in the type that the run multiplies in, by rank, or by "
        "host or device such as A100=312, for its utilisation (MFU); empty: by the table of devices", per_rank=True,
        affects="nothing", least=0)
    seed: int = _key(
        0, "", "seeds the data order, the initial weights and the ranks' random generators", least=0,
        most=2**32 - 1)
    lr: float = _key(2e-3, "", "base learning rate", unused=(COMPILED, OWN_RATE))
    optimizer: Named = _key(
        Named(), "",
        "torch.optim or keras.optimizers class; auto: Adam, or the compiled model's own",
        unused=(FILE_OPTIMIZER, COMPILED))
    schedule: ScheduleConfig = _key(ScheduleConfig(), "", "")
    loss: Named = _key(
        Named(), "",
        "torch.nn.functional or keras.losses name; auto: cross entropy for integer targets, else squared "
        "error", unused=(OWN_TASK,))
    metrics: list[str] = _key(
        ["accuracy"], "",
        "accuracy, a torch.nn.functional or keras.metrics name, or module:callable(outputs, targets) -> "
        "(sum, weight)", affects="metrics", unused=(OWN_TASK,))
    clip_norm: float = _key(0.0, "", "clip gradients to this global L2 norm; 0: off", least=0)
    ema: float = _key(
        0.0, "factor", "decay of an exponential moving average of the weights, such as 0.999, which is evaluated and "
        "saved as the final model in their place; 0: none")
    precision: dict[str, str] | str = _key(
        "fp32", "", "what ranks compute in: fp32 (the model's own types), bf16, fp16 (with loss scaling), auto (by "
        "what each rank's device does well), one for each rank such as bf16:fp32, or by host or device such as "
        "cpu=fp32,H200=bf16 (a mapping in a file); parameters and gradients keep their types", per_rank=True)
    loss_scale: float = _key(
        65536.0, "factor", "first loss scale of ranks that compute in fp16, a power of two",
        unused=(NO_FP16,))
    model_parallel: int = _key(
        1, "devices", "devices of each rank that the model's named blocks are split over, in contiguous parts",
        affects="nothing", least=1, most=MOST_DEVICES)
    split_micro_batches: int = _key(
        0, "micro-batches", "parts in which a split model computes a micro-batch, so that its devices work at once; "
        "0: four for each device", affects="split", unused=(ONE_DEVICE,), least=0)
    pipeline: PipelineConfig = _key(PipelineConfig(), "", "", affects="nothing")
    devices_per_rank: int = _key(
        0, "devices", "GPUs that each rank owns, or logical devices of a CPU in TensorFlow; 0: as many as "
        "model_parallel", affects="nothing", least=0, most=MOST_DEVICES)
    sync_batchnorm: bool = _key(False, "", "BatchNorm takes its statistics over the samples of all ranks")
    exchange_device: Literal["auto", "device", "cpu"] = _key(
        "auto", "", "where gradients are exchanged from: device (where they are made), cpu (over host memory), or "
        "auto: cpu where ranks' devices are unlike, else device", affects="nothing")
    collectives: Literal["auto", "horovod", "mpi", "shared", "null"] = _key(
        "auto", "", "what carries gradients; shared: memory that the ranks of a host share, mpi between hosts; auto: "
        "between CPUs shared where a host has several ranks, else mpi, and over several hosts what is measured to be "
        "best of these and horovod; between GPUs, and with sync_batchnorm in Keras on TensorFlow, horovod where it is "
        "built, else mpi; null: nothing, only to measure", affects="nothing")
    compression: str = _key(
        "none", "", "how gradients are compressed for the wire: {choices}, or "
        "module:callable (path/file.py:callable) that makes another way; auto: measures, and picks one only where it "
        "saves time", choices="hvdtrain.comm.compressors")
    exchange: ExchangeConfig = _key(ExchangeConfig(), "", "")
    data_parallel: DataParallelConfig = _key(DataParallelConfig(), "", "")
    transforms: list[str] = _key(
        [], "", "module:callable (path/file.py:callable) of further changes to how the model computes, installed for "
        "the time of a run")
    callbacks: list[str] = _key(
        [], "", "module:callable (path/file.py:callable) of further callbacks, made before those that report",
        affects="nothing")
    eval_every: int = _key(
        1, "epochs", "evaluate every so many epochs; 0: only at the end", affects="metrics",
        quiet=0, least=0)
    early_stop: EarlyStopConfig = _key(EarlyStopConfig(), "", "")
    on_bad_sample: Literal["stop", "skip"] = _key(
        "stop", "", "a sample that cannot be read (a broken picture): stop: it is named and the run ends; skip: it is "
        "left out on all ranks, named, and counted; more than 1 % of the data ends the run all the same")
    nan_guard: Literal["stop", "skip"] = _key(
        "stop", "",
        "stop: a loss or gradient that is not finite ends the run before its update; skip: that step is left out on "
        "every rank")
    max_skipped: int = _key(
        20, "steps", "with nan_guard skip: skipped steps in a row that end the run", affects="nothing",
        unused=(NO_SKIP,), least=1)
    check_every: int | Literal["auto"] = _key(
        "auto", "steps", "compare the ranks' weights every so many steps, at the start and at the end, and end the run "
        "where they differ; auto: every 200, seldomer where that took more than 0.3 % of the time; 0: never",
        affects="nothing", least=0)
    audit: int = _key(
        0, "steps", "every so many steps compute a micro-batch on another rank too, and end the run where a device "
        "computes wrongly; 100 takes 1 to 1.5 % of the time; 0: off", affects="nothing", least=0)
    checkpoint: CheckpointConfig = _key(CheckpointConfig(), "", "", affects="nothing")
    time_limit: str = _key(
        "", "", "wall limit of this job, in seconds or as 04:00:00, counted from its start: the run ends before it, "
        "saved, with status 75, for another job to go on with --resume auto; empty: none is known", affects="nothing")
    resume: str = _key(
        "", "",
        "auto: newest whole checkpoint of this run, if any; or the path of a checkpoint; empty: start anew",
        affects="nothing")
    out: str = _key("", "", "directory of this run; empty: a new runs/MODEL-NNN", affects="nothing")
    log_every: int = _key(10, "steps", "progress and log interval", affects="nothing", least=1)
    progress: Literal["auto", "rich", "plain", "off"] = _key(
        "auto", "",
        "auto: a line that moves on a terminal, plain lines elsewhere and under a launcher; phases longer than 3 s are "
        "announced; off: neither", affects="nothing", quiet="off")
    trackers: list[str] = _key(
        [], "", "what else gets the records of rank 0: {choices}, or module:callable "
        "(path/file.py:callable) that makes another", affects="nothing", quiet=[],
        choices="hvdtrain.reports.trackers")
    trace: TraceConfig = _key(TraceConfig(), "", "", affects="nothing")
    threads: int = _key(
        0, "threads", "compute threads of one rank; 0: its share of the host's cores", affects="nothing", least=0,
        most=4096)
    deterministic: bool = _key(
        False, "", "ask the framework for deterministic kernels (bit-equal resume on GPUs)",
        affects="nothing")
    control_timeout_s: float = _key(
        600.0, "s",
        "longest wait for other ranks before the run ends with the name of the wait; 1 or more", affects="nothing",
        least=LEAST_TIMEOUT_S, most=1e9)
    heartbeat_timeout_s: float = _key(
        30.0, "s",
        "how long a rank may be frozen, hang in a step, or a host not answer, before it is named and the job ends; 2 "
        "or more; 0: nobody watches", affects="nothing", most=1e9)

    def __post_init__(self) -> None:
        """Take a bare text for a section that has a name: ``Config(optimizer="SGD")``; and precision's text by name."""
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", placed.entries(self.precision) or self.precision)
        for name, kind in schema.named_sections(type(self)).items():
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, kind(name=getattr(self, name)))
        if isinstance(self.pipeline, int) and not isinstance(self.pipeline, bool):
            object.__setattr__(self, "pipeline", PipelineConfig(self.pipeline))

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
