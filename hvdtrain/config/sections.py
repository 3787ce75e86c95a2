"""The sections of the configuration as typed, frozen dataclasses: their keys, units and defaults.

Owns names and defaults; `hvdtrain.config` has the keys of the top level and the checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple


def is_off(value: Any) -> bool:
    """Return whether ``value`` is one of the spellings of off: off, none, null, 0, false and empty."""
    if isinstance(value, str):
        return value.strip().lower() in ("off", "none", "null", "false", "0", "")
    if isinstance(value, (list, tuple, dict)):
        return not value
    return value is None or isinstance(value, (int, float)) and value == 0


class Unused(NamedTuple):
    """Why a changed key has no effect; ``when`` asks a `hvdtrain.config.ConfigContext`. ``but``: excepted key."""

    why: str
    when: Callable[[Any], bool]
    but: str = ""


# Only reasons that hold whatever a callback, or a later call of the run's Trainer, does.
OWN_MODEL = Unused("fit was given a model", lambda s: s.own_model)
OWN_DATA = Unused("fit was given data", lambda s: s.own_data)
OWN_TASK = Unused("the model file defines task", lambda s: s.own_task)
FILE_OPTIMIZER = Unused("the model file defines optimizer(model, config)", lambda s: s.file_optimizer)
COMPILED = Unused("the model keeps the optimizer that it was compiled with",
                  lambda s: s.own_optimizer and s.config.optimizer.name == "auto", but="name")
OWN_RATE = Unused("optimizer.args has a learning_rate",
                  lambda s: "learning_rate" in s.config.optimizer.args and not s.file_optimizer)
NO_SCHEDULE = Unused("no schedule.name is set", lambda s: not s.config.schedule.on)
NO_PLATEAU = Unused("schedule.name is not ReduceLROnPlateau", lambda s: not s.config.schedule.plateau)
NO_KEEP_BEST = Unused("no checkpoint.keep_best is set", lambda s: not s.config.checkpoint.keep_best)
NO_EARLY_STOP = Unused("no early_stop.metric is set", lambda s: not s.config.early_stop.metric)
REPLICATE = Unused("data_parallel is replicate, which shards nothing",
                   lambda s: s.config.data_parallel.name == "replicate")
NO_TRACE = Unused("no trace.steps is set", lambda s: not s.config.trace.steps)
NO_SKIP = Unused("nan_guard is not skip", lambda s: s.config.nan_guard != "skip")
NO_FP16 = Unused("precision is not fp16 or auto", lambda s: not {"fp16", "auto"} & set(s.config.precisions()))
ONE_DEVICE = Unused("model_parallel is 1", lambda s: s.config.model_parallel == 1)
NO_PIPELINE = Unused("no replica of the model is partitioned over ranks", lambda s: not s.config.pipeline.over_ranks)
NO_CHUNKS = Unused("pipeline.order is not interleaved", lambda s: s.config.pipeline.order != "interleaved")
NO_BALANCE = Unused("balance is off", lambda s: s.config.balance == "off")
NO_REBALANCE = Unused("balance is not auto", lambda s: s.config.balance != "auto")
NO_TOPK = Unused("compression is not topk or auto", lambda s: s.config.compression not in ("topk", "auto"))
NO_POWERSGD = Unused("compression is not powersgd or auto", lambda s: s.config.compression not in ("powersgd", "auto"))
NO_AUTO = Unused("compression is not auto", lambda s: s.config.compression != "auto")
ADASUM = Unused("exchange.adasum exchanges each tensor separately", lambda s: s.config.exchange.adasum)
NO_HOROVOD = Unused("gradients do not go over Horovod", lambda s: not s.horovod)


def key(default: Any, unit: str, doc: str, *, per_rank: bool = False, affects: str = "", quiet: Any = None,
        choices: str = "", unused: tuple[Unused, ...] = (), least: float | None = None,
        most: float | None = None, off: Any = None, auto: Any = None, aliases: tuple[str, ...] = (),
        alias_sets: Callable[[Any], dict[str, Any]] | None = None) -> Any:
    """Return a field with its facts, from which docs/reference/settings.md, ``--help`` and all lists of keys are made.

    ``per_rank``: may hold a value for each rank. ``affects``: what a change at a resume alters: "result" (where neither
    the key nor its section says another), "metrics" (which are measured, and when), "split" of a batch, or "nothing".
    ``quiet``: its value for commands that time or compare steps alone. ``choices``: the folder whose ``choices()`` are
    named where ``doc`` has {choices}. ``unused``: when the key, or those of a section, have no effect. ``least``,
    ``most``: bounds of its number, or of each of its numbers. ``off``: its value for the words off, none and null, 0
    and empty; ``auto``: its value for the words auto, none and null, and empty; None: these words mean nothing.
    ``aliases``: names that work as the key at the top level. ``alias_sets``: value of an alias -> the values of all
    keys of the section that the alias sets; None: it has the key's values.
    """
    meta = {"unit": unit, "doc": doc, "per_rank": per_rank, "affects": affects, "quiet": quiet, "choices": choices,
            "unused": unused, "least": least, "most": most, "off": off, "auto": auto, "aliases": aliases,
            "alias_sets": alias_sets}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    if dataclasses.is_dataclass(default):  # its own copy for each, since its args can be written to
        return field(default_factory=type(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class DataConfig:
    """Source of samples and augmentation."""

    name: str = key(
        "digits", "", "a data set by name (digits, text, synthetic, folder, npy, text_files, cifar100, parquet, hf, "
        "webdataset, tfrecord, jsonl), a .npz or .npy file, or module:callable", unused=(OWN_DATA,))
    args: dict = key({}, "", "keyword arguments of the source", unused=(OWN_DATA,))
    augment: dict = key(
        {}, "", "augmentation of training images, drawn from (seed, epoch, sample): resized_crop (least part of the "
        "area), crop (pixels of padding), flip (probability), color_jitter (strength), cutout (pixels a side), mixup "
        "(alpha), module:callable, layout (channels_first); such as {crop: 4, flip: 0.5}",
        off={})
    collate: str = key(
        "", "", "module:callable that puts rows of a torch Dataset or datasets.Dataset together to a batch, such as "
        "a data collator of transformers", off="")
    shuffle: bool = key(True, "", "permute the samples in each epoch, from (seed, epoch)")
    bucket: int = key(
        0, "samples", "put shuffled samples of similar length in buckets of so many, a multiple of global_batch: rows "
        "that are padded to the longest of their batch take less memory and time; 0: none", least=0, off=0)
    shuffle_buffer: int = key(
        0, "samples", "shuffle a stream of training data through a buffer of so many samples, from (seed, epoch); 0: "
        "keep its order", least=0, off=0)
    prefetch: int = key(
        2, "batches", "batches prefetched by one background thread; 0: no prefetching, which a dataset that "
        "draws random numbers needs for bit-equal resume", affects="nothing", least=0, off=0)
    workers: int | Literal["auto"] = key(
        "auto", "processes", "worker processes of each rank that read samples; 0: the rank reads samples itself; "
        "auto: 0 for arrays and for samples that take less than 0.05 ms and draw no random numbers, else one "
        "per spare core of the rank", affects="nothing", least=0)
    readers: Literal["auto", "host", "each"] = key(
        "auto", "", "ranks that read and decode a stream. host: one of each host, which gives the others their rows "
        "over shared memory; each: all; auto: host where the stream begins alike on all ranks and draws nothing from "
        "the global random generators, and hosts divide the files of a stream that names them", affects="nothing")


@dataclass(frozen=True)
class Named:
    """Something of the framework's own, by its name there, with keyword arguments."""

    name: str = key("auto", "", "the framework's name, any case; auto: a default")
    args: dict = key({}, "", "keyword arguments")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule."""

    OFF: ClassVar[Mapping[str, Any]] = {"name": "none", "args": {}, "warmup_steps": 0, "linear_scaling_base": 0}

    name: str = key(
        "none", "", "torch.optim.lr_scheduler or keras.optimizers.schedules class name, or module:callable "
        "of another such class; none: constant", off="none")
    args: dict = key({}, "", "keyword arguments", unused=(NO_SCHEDULE,))
    interval: Literal["step", "epoch"] = key(
        "step", "",
        "unit that a torch scheduler counts; Keras schedules count steps", unused=(NO_SCHEDULE,))
    warmup_steps: int = key(0, "steps", "increase the rate linearly from rate/steps to the rate; 0: off", least=0,
                            off=0)
    linear_scaling_base: int = key(
        0, "samples",
        "multiply the rate by global_batch / this (Goyal et al. 2017); 0: off", least=0, off=0)
    metric: str = key("", "", "evaluation metric that ReduceLROnPlateau follows; empty: loss", unused=(NO_PLATEAU,),
                      off="")

    @property
    def on(self) -> bool:
        """Return whether a schedule is named."""
        return self.name.lower() not in ("none", "")

    @property
    def plateau(self) -> bool:
        """Return whether the schedule follows evaluations."""
        return self.name.lower() == "reducelronplateau"

    @property
    def followed(self) -> str:
        """Return the metric that a schedule of evaluations follows."""
        return self.metric or "loss"


@dataclass(frozen=True)
class ExchangeConfig:
    """Summation of gradients over ranks."""

    bucket_mb: float | Literal["auto", "sweep"] = key(
        "auto", "MiB",
        "size of a bucket of gradients, one collective each (tensor fusion); auto: 2 on transports that overlap with "
        "backward (mpi, and shared over several hosts), else, and for compressors with a state, 16; "
        "sweep: measured at the start", affects="nothing", unused=(ADASUM,), auto="auto", aliases=("bucket_cap_mb",))
    fusion_threshold_mb: float = key(
        -1.0, "MiB",
        "Horovod's own fusion buffer (HOROVOD_FUSION_THRESHOLD); -1 or auto: Horovod's default", affects="nothing",
        unused=(NO_HOROVOD,), auto=-1.0)
    cycle_time_ms: float = key(
        -1.0, "ms", "Horovod's cycle time (HOROVOD_CYCLE_TIME); -1 or auto: Horovod's default", affects="nothing",
        unused=(NO_HOROVOD,), auto=-1.0)
    autotune: bool = key(False, "", "let Horovod tune its fusion buffer and cycle time while training "
                         "(HOROVOD_AUTOTUNE)", affects="nothing")
    hierarchical: bool = key(False, "", "sum within each host first, then across hosts", affects="nothing")
    adasum: bool = key(False, "", "combine the ranks' gradients by Adasum instead of their mean, through Horovod")
    powersgd_rank: int = key(
        4, "columns", "rank of powersgd: columns of the two factors that are sent for each "
                      "matrix", unused=(NO_POWERSGD,),
        least=1)
    topk_ratio: float = key(
        0.01, "share", "fraction of the gradient's entries that topk sends", unused=(NO_TOPK,), most=1.0)
    topk_momentum: float = key(
        0.0, "factor", "momentum correction of topk, for SGD without momentum; 0: off",
        unused=(NO_TOPK,), least=0, most=0.9999, off=0.0)
    topk_warmup_steps: int = key(
        0, "steps", "steps over which topk decreases to its ratio, in stages; 0: off", unused=(NO_TOPK,), least=0,
        off=0)
    auto_margin: float = key(
        0.05, "share", "fraction of a step that a compressor must save for compression auto to use it",
        affects="nothing", unused=(NO_AUTO,), least=0, most=1.0)

    @property
    def unmeasured_mb(self) -> float:
        """Return the size of a bucket in MiB where neither a sweep nor the transport decides it."""
        return 16.0 if isinstance(self.bucket_mb, str) else self.bucket_mb


def of_zero_stage(value: Any) -> dict[str, Any]:
    """Return the keys of ``data_parallel`` that ``zero_stage`` sets: of stage 0 no rank divides anything."""
    return {"name": "replicate"} if is_off(value) else {"name": "zero", "stage": value}


@dataclass(frozen=True)
class DataParallelConfig:
    """Strategy of data parallelism."""

    OFF: ClassVar[Mapping[str, Any]] = {"name": "replicate"}

    name: str = key(
        "replicate", "", "replicate: every rank holds the full state and makes every update; zero: each rank holds and "
        "updates a shard (ZeRO); or module:callable that returns another strategy", off="replicate")
    stage: int | Literal["auto"] = key(
        2, "", "ZeRO stage; 1: shard the optimizer's state; 2: summed gradients, too; auto: the "
        "lowest stage that fits by the memory plan, possibly none", unused=(REPLICATE,), aliases=("zero_stage",),
        alias_sets=of_zero_stage)
    shards: list[float] = key(
        [], "", "of zero, relative size of each rank's shard, such as [3, 1]; empty: by the free "
        "memory of each rank", per_rank=True, unused=(REPLICATE,))


@dataclass(frozen=True)
class PipelineConfig:
    """Partition of each replica over ranks."""

    BARE: ClassVar[str] = "stages"
    OFF: ClassVar[Mapping[str, Any]] = {"stages": 1, "depths": []}

    stages: int = key(
        1, "ranks", "ranks over which each replica of the model is partitioned, in contiguous runs of its named "
        "blocks; 1: no partition. `pipeline: 2` sets it", least=1)
    order: Literal["1f1b", "gpipe", "interleaved"] = key(
        "1f1b", "", "step order of forward and backward passes; 1f1b: backward as early as possible, which keeps "
        "few micro-batches; gpipe: all forward passes first; interleaved: 1f1b with several chunks on each rank",
        unused=(NO_PIPELINE,))
    depths: list[int] = key(
        [], "ranks", "ranks of each replica where they differ, such as [1, 1, 1, 1, 2]; empty: stages for each")
    micro_batches: int = key(
        0, "micro-batches", "micro-batches of a partitioned replica's share; 0: four for each of its "
        "ranks, or accumulate if that is more", unused=(NO_PIPELINE,), least=0)
    chunks: int = key(
        2, "chunks", "chunks of blocks on each rank for order interleaved", unused=(NO_PIPELINE, NO_CHUNKS),
        least=1)
    cut: list[str] = key(
        [], "", "first block of the second and every further stage; empty: found by measured times "
        "and memory", unused=(NO_PIPELINE,))

    @property
    def over_ranks(self) -> bool:
        """Return whether a replica of the model is partitioned over ranks."""
        return self.stages > 1 or any(depth > 1 for depth in self.depths)


@dataclass(frozen=True)
class RebalanceConfig:
    """Probe of shares (balance static and auto) and rebalancing (auto)."""

    every_steps: int = key(5, "steps", "steps of a window over which ranks' times are compared", least=1)
    margin: float = key(0.05, "share", "fraction of a step that a new plan must save", unused=(NO_REBALANCE,), least=0)
    lasting: int = key(2, "windows", "consecutive windows in which a new plan must save "
                                     "that", unused=(NO_REBALANCE,), least=1)
    probe_s: float = key(2.0, "s", "approximate duration of the probe at the start", unused=(NO_BALANCE,), least=0)
    probe_cache: bool = key(True, "", "reuse earlier measurements of this device with this "
                            "model, if one new measurement confirms them", unused=(NO_BALANCE,))
    max_micro_batch: list[int] | dict[str, int] = key(
        [], "samples", "largest micro-batch by rank, or by host or device such as H200=512,old=64, 0 for no "
        "limit; empty: found by the probe", per_rank=True,
        unused=(NO_BALANCE,), least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves of a run: interval, number and layout."""

    every: Literal["auto", "off"] = key(
        "auto", "", "auto: after the first minute, then as often as keeps the cost of saves below 3 % of the "
        "time; off: only by the keys below, which turn auto off", quiet="off", off="off")
    every_steps: int = key(0, "steps", "save every N steps; 0: off", quiet=0, least=0, off=0)
    every_s: float = key(0.0, "s", "save every N seconds; 0: off", quiet=0.0, least=0,
                         off=0.0)
    mtbf_s: float = key(
        0.0, "s", "mean time between failures, from which auto computes the optimal interval (Young, "
        "Daly); 0: not known", least=0, off=0.0)
    at_end: bool = key(True, "", "save when the run ends", quiet=False)
    keep: int = key(3, "checkpoints", "number of newest checkpoints to keep", least=1)
    keep_best: str = key(
        "", "", "evaluation metric, for example loss or accuracy, whose best checkpoint is kept beside the newest and "
        "never removed, not even on a full disk; empty: off", quiet="", off="")
    keep_best_mode: Literal["auto", "min", "max"] = key(
        "auto", "", "direction of improvement of keep_best, as in early_stop.mode", unused=(NO_KEEP_BEST,))
    layout: Literal["gathered", "sharded"] = key(
        "gathered", "", "gathered: rank 0 writes everything, and no other rank needs the disk; sharded: each rank "
        "writes its shard, on a shared file system. Any number of ranks can read either layout")
    on_failure: Literal["warn", "stop"] = key(
        "warn", "", "checkpoint that cannot be written: warn: report and count it, and continue; stop: "
        "end the run. For the last checkpoint the run always ends")


@dataclass(frozen=True)
class EarlyStopConfig:
    """Early stopping when a metric no longer improves."""

    OFF: ClassVar[Mapping[str, Any]] = {"metric": ""}

    metric: str = key("", "", "evaluation metric to watch, for example loss or accuracy; empty: off", quiet="", off="")
    mode: Literal["auto", "min", "max"] = key(
        "auto", "", "direction of improvement; auto: max for accuracy and other scores, min "
        "for losses and unknown metrics", unused=(NO_EARLY_STOP,))
    patience: int = key(
        5, "evaluations", "evaluations without improvement before the run stops", unused=(NO_EARLY_STOP,), least=1)
    min_delta: float = key(0.0, "", "smallest change that counts as improvement", unused=(NO_EARLY_STOP,))
    restore: bool = key(
        True, "", "end the run with the weights of the best evaluation, in memory and in model/; keeps their "
        "checkpoint as checkpoint.keep_best does. false: end with the last weights", unused=(NO_EARLY_STOP,))


@dataclass(frozen=True)
class TraceConfig:
    """Recording of all ranks over some steps, as one file for Perfetto and chrome://tracing."""

    OFF: ClassVar[Mapping[str, Any]] = {"steps": ""}

    steps: str = key(
        "", "", "window of steps to trace, such as 20:30 for steps 21 to 30, written to trace.json.gz in "
        "the run's directory; empty: none", off="")
    profiler: bool = key(
        False, "", "add operations and kernels from the framework's profiler (torch.profiler, tf.profiler) "
        "to the trace", unused=(NO_TRACE,))


def __getattr__(name: str) -> Any:
    """Keep the names of sections before release 0.2: ``Schedule`` is `ScheduleConfig`."""
    if f"{name}Config" not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[f"{name}Config"]
