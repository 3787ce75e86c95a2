"""The sections of the configuration as typed, frozen dataclasses: their keys, units and defaults.

Owns names and defaults; `hvdtrain.config` has the keys of the top level and the checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple


class Unused(NamedTuple):
    """Why a changed key has no effect; ``when`` asks a `hvdtrain.config.ConfigContext`, which lies above this file.

    ``but``: the key of a section for which it does not hold.
    """

    why: str
    when: Callable[[Any], bool]
    but: str = ""


# Only reasons that hold whatever a callback, or a later call of the run's Trainer, does.
OWN_MODEL = Unused("fit was given a model", lambda s: s.own_model)
OWN_DATA = Unused("fit was given data", lambda s: s.own_data)
OWN_TASK = Unused("the model file has a task of its own", lambda s: s.own_task)
FILE_OPTIMIZER = Unused("the model file gives optimizer(model, config)", lambda s: s.file_optimizer)
COMPILED = Unused("the model keeps the optimizer that it was compiled with",
                  lambda s: s.own_optimizer and s.config.optimizer.name == "auto", but="name")
OWN_RATE = Unused("optimizer.args has a learning_rate",
                  lambda s: "learning_rate" in s.config.optimizer.args and not s.file_optimizer)
NO_SCHEDULE = Unused("no schedule.name is set", lambda s: not s.config.schedule.on)
NO_EARLY_STOP = Unused("no early_stop.metric is set", lambda s: not s.config.early_stop.metric)
REPLICATE = Unused("data_parallel is replicate, which divides nothing",
                   lambda s: s.config.data_parallel.name == "replicate")
NO_TRACE = Unused("no trace.steps is set", lambda s: not s.config.trace.steps)
NO_SKIP = Unused("nan_guard is not skip", lambda s: s.config.nan_guard != "skip")
NO_FP16 = Unused("precision is not fp16 or auto", lambda s: not {"fp16", "auto"} & set(s.config.precisions()))
ONE_DEVICE = Unused("model_parallel is 1", lambda s: s.config.model_parallel == 1)
NO_PIPELINE = Unused("no copy of the model is cut over ranks", lambda s: not s.config.pipeline.over_ranks)
NO_CHUNKS = Unused("pipeline.order is not interleaved", lambda s: s.config.pipeline.order != "interleaved")
NO_BALANCE = Unused("balance is off", lambda s: s.config.balance == "off")
NO_REBALANCE = Unused("balance is not auto", lambda s: s.config.balance != "auto")
NO_TOPK = Unused("compression is not topk or auto", lambda s: s.config.compression not in ("topk", "auto"))
NO_POWERSGD = Unused("compression is not powersgd or auto", lambda s: s.config.compression not in ("powersgd", "auto"))
NO_AUTO = Unused("compression is not auto", lambda s: s.config.compression != "auto")
ADASUM = Unused("exchange.adasum exchanges each tensor by itself", lambda s: s.config.exchange.adasum)
NO_HOROVOD = Unused("gradients do not go over Horovod", lambda s: not s.horovod)


def key(default: Any, unit: str, doc: str, *, per_rank: bool = False, affects: str = "", quiet: Any = None,
        choices: str = "", unused: tuple[Unused, ...] = (), least: float | None = None,
        most: float | None = None) -> Any:
    """Return a field with its facts, from which docs/config.md, ``--help`` and all lists of keys are made.

    ``per_rank``: may hold a value for each rank. ``affects``: what a change at a resume alters: "result" (where neither
    the key nor its section says another), "metrics" (which are measured, and when), "split" of a batch, or "nothing".
    ``quiet``: its value for commands that time or compare steps alone. ``choices``: the folder whose ``choices()`` are
    named where ``doc`` has {choices}. ``unused``: when the key, or those of a section, have no effect. ``least``,
    ``most``: bounds of its number, or of each of its numbers.
    """
    meta = {"unit": unit, "doc": doc, "per_rank": per_rank, "affects": affects, "quiet": quiet, "choices": choices,
            "unused": unused, "least": least, "most": most}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    if dataclasses.is_dataclass(default):  # its own copy for each, since its args can be written to
        return field(default_factory=type(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class DataConfig:
    """Source of samples and augmentation."""

    name: str = key(
        "digits", "", "a set by name (digits, text, synthetic, folder, npy, text_files, cifar100), a .npz or .npy "
        "file, or module:callable (also path/file.py:callable)", unused=(OWN_DATA,))
    args: dict = key({}, "", "keyword arguments of the source", unused=(OWN_DATA,))
    augment: dict = key(
        {}, "", "changes of training pictures, drawn from (seed, epoch, sample): crop (pixels of padding), flip "
        "(probability), cutout (pixels a side), mixup (alpha), or module:callable; such as {crop: 4, flip: 0.5}")
    shuffle: bool = key(True, "", "permute the samples anew each epoch, from (seed, epoch)")
    prefetch: int = key(
        2, "batches", "batches fetched ahead by one background thread; 0 fetches in line, which a dataset that draws "
        "random numbers needs for bit-equal resume", affects="nothing", least=0)
    workers: int | Literal["auto"] = key(
        "auto", "processes", "of each rank that read samples for it; 0: the rank reads itself; auto: 0 for arrays and "
        "for samples that take less than 0.05 ms and draw no random numbers, else a process for each core that the "
        "rank has to spare", affects="nothing", least=0)


@dataclass(frozen=True)
class Named:
    """Something of the framework's own, by its name there, with keyword arguments."""

    name: str = key("auto", "", "the framework's own name, any case; auto picks a default")
    args: dict = key({}, "", "keyword arguments")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule."""

    name: str = key(
        "none", "", "torch.optim.lr_scheduler or keras.optimizers.schedules class name, or module:callable "
        "(path/file.py:callable) of another such class; none: constant")
    args: dict = key({}, "", "keyword arguments", unused=(NO_SCHEDULE,))
    interval: Literal["step", "epoch"] = key(
        "step", "",
        "what a torch scheduler counts; Keras schedules count steps", unused=(NO_SCHEDULE,))
    warmup_steps: int = key(0, "steps", "grow the rate linearly from rate/steps to the rate; 0: off", least=0)
    linear_scaling_base: int = key(
        0, "samples",
        "multiply the rate by global_batch / this (Goyal et al. 2017); 0: off", least=0)

    @property
    def on(self) -> bool:
        """Return whether a schedule is named."""
        return self.name.lower() not in ("none", "")


@dataclass(frozen=True)
class ExchangeConfig:
    """Summation of gradients over ranks."""

    bucket_mb: float | Literal["auto"] = key(
        16.0, "MiB",
        "size of a flat bucket of gradients, one collective each (fusion); 16, the default, means 2 on wires that move "
        "pieces beside backward (mpi, and shared over several hosts), but with compressors that keep a state; auto: by "
        "a short sweep at start", affects="nothing", unused=(ADASUM,))
    fusion_threshold_mb: float = key(
        -1.0, "MiB",
        "Horovod's own fusion buffer (HOROVOD_FUSION_THRESHOLD); -1: Horovod's default", affects="nothing",
        unused=(NO_HOROVOD,))
    cycle_time_ms: float = key(
        -1.0, "ms", "Horovod's cycle time (HOROVOD_CYCLE_TIME); -1: Horovod's default", affects="nothing",
        unused=(NO_HOROVOD,))
    autotune: bool = key(False, "", "let Horovod tune its fusion buffer and cycle time while training "
                         "(HOROVOD_AUTOTUNE)", affects="nothing")
    hierarchical: bool = key(False, "", "sum within each host first, then across hosts", affects="nothing")
    adasum: bool = key(False, "", "combine the ranks' gradients by Adasum instead of their mean, through Horovod")
    powersgd_rank: int = key(
        4, "columns", "columns of the two factors that powersgd sends for each matrix", unused=(NO_POWERSGD,),
        least=1)
    topk_ratio: float = key(
        0.01, "share", "part of the gradient's entries that topk sends", unused=(NO_TOPK,), most=1.0)
    topk_momentum: float = key(
        0.0, "factor", "momentum that topk corrects for, with an SGD without any; 0: off",
        unused=(NO_TOPK,), least=0, most=0.9999)
    topk_warmup_steps: int = key(
        0, "steps", "steps over which topk comes down to its ratio, in stages; 0: off", unused=(NO_TOPK,), least=0)
    auto_margin: float = key(
        0.05, "share", "part of a step that a compressor has to save for compression auto",
        affects="nothing", unused=(NO_AUTO,), least=0, most=1.0)


@dataclass(frozen=True)
class DataParallelConfig:
    """Strategy of data parallelism."""

    name: str = key(
        "replicate", "", "replicate: every rank holds all state and makes every update; zero: each holds and updates a "
        "part of it (ZeRO); or module:callable (path/file.py:callable) that makes another way")
    stage: int | Literal["auto"] = key(
        2, "", "of zero, what is divided over the ranks; 1: the optimizer's state; 2: summed gradients too; auto: as "
        "little as the memory plan says is needed, which may be nothing", unused=(REPLICATE,))
    shards: list[float] = key(
        [], "", "of zero, relative part of the state for each rank, such as [3, 1]; empty: by the memory that each "
        "rank has free", per_rank=True, unused=(REPLICATE,))


@dataclass(frozen=True)
class PipelineConfig:
    """A model that is cut over ranks."""

    BARE: ClassVar[str] = "stages"

    stages: int = key(
        1, "ranks", "ranks that each copy of the model is cut over, in contiguous runs of its named blocks; 1: none is "
        "cut. `pipeline: 2` and `--pipeline 2` set it", least=1)
    order: Literal["1f1b", "gpipe", "interleaved"] = key(
        "1f1b", "", "of forwards and backwards; 1f1b: a stage goes back as soon as it can, so that it keeps few "
        "micro-batches; gpipe: all forwards first; interleaved: 1f1b with several shorter runs of blocks on each rank",
        unused=(NO_PIPELINE,))
    depths: list[int] = key(
        [], "ranks", "ranks of each copy where they are unlike, such as [1, 1, 1, 1, 2]: four whole copies beside one "
        "that two ranks share; empty: stages for each")
    micro_batches: int = key(
        0, "micro-batches", "parts that a copy which is cut computes its part of a batch in; 0: four for each rank of "
        "it, or accumulate where that is more", unused=(NO_PIPELINE,), least=0)
    chunks: int = key(
        2, "chunks", "runs of blocks on each rank where the order is interleaved", unused=(NO_PIPELINE, NO_CHUNKS),
        least=1)
    cut: list[str] = key(
        [], "", "the blocks that the second and every further stage begin with; empty: searched, together with the "
        "order of the ranks, by measured times and memory", unused=(NO_PIPELINE,))

    @property
    def over_ranks(self) -> bool:
        """Return whether a replica of the model is partitioned over ranks."""
        return self.stages > 1 or any(depth > 1 for depth in self.depths)


@dataclass(frozen=True)
class RebalanceConfig:
    """Probe of shares (balance static and auto) and rebalancing (auto)."""

    every_steps: int = key(5, "steps", "steps of a window that ranks' own times are compared over", least=1)
    margin: float = key(0.05, "share", "part of a step that a new plan has to save", unused=(NO_REBALANCE,), least=0)
    lasting: int = key(2, "windows", "windows in a row in which it would", unused=(NO_REBALANCE,), least=1)
    probe_s: float = key(2.0, "s", "about how long the probe measures at the start", unused=(NO_BALANCE,), least=0)
    probe_cache: bool = key(True, "", "reuse what was measured before on this device with this model, if one "
                            "measurement confirms it", unused=(NO_BALANCE,))
    max_micro_batch: list[int] | dict[str, int] = key(
        [], "samples", "largest micro-batch that the memory of each rank holds, one number per rank or by host or "
        "device such as H200=512,old=64, 0 for no limit; empty: found by the probe", per_rank=True,
        unused=(NO_BALANCE,), least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves of a run: interval, number and layout."""

    every: Literal["auto", "off"] = key(
        "auto", "", "auto: after the first minute, and then so often that saves cost less than 3 % of the time; off: "
        "only as the keys below say; they turn auto off", quiet="off")
    every_steps: int = key(0, "steps", "save every so many steps; 0: off", quiet=0, least=0)
    every_s: float = key(0.0, "s", "save when so many seconds have passed since the last; 0: off", quiet=0.0, least=0)
    mtbf_s: float = key(
        0.0, "s", "mean time between failures, from which auto finds the interval that loses least (Young, Daly); 0: "
        "not known", least=0)
    at_end: bool = key(True, "", "save when the run ends", quiet=False)
    keep: int = key(3, "checkpoints", "how many of the newest are kept", least=1)
    layout: Literal["gathered", "sharded"] = key(
        "gathered", "", "gathered: rank 0 writes all, so that no other rank needs the disk; sharded: each rank writes "
        "its part, on a file system that all ranks share. Either is read by any number of ranks")
    on_failure: Literal["warn", "stop"] = key(
        "warn", "", "a checkpoint that cannot be written: warn: is told and counted, and training goes on; stop: ends "
        "the run. The last one always does")


@dataclass(frozen=True)
class EarlyStopConfig:
    """Stop when a metric no longer gets better."""

    metric: str = key("", "", "evaluation metric to watch, for example loss or accuracy; empty: off", quiet="")
    mode: Literal["auto", "min", "max"] = key(
        "auto", "", "whether smaller or larger is better; auto: larger for accuracy and other scores, smaller for "
        "losses and for what is not known", unused=(NO_EARLY_STOP,))
    patience: int = key(
        5, "evaluations", "evaluations without a better value before the run stops", unused=(NO_EARLY_STOP,), least=1)
    min_delta: float = key(0.0, "", "smallest change that counts as better", unused=(NO_EARLY_STOP,))


@dataclass(frozen=True)
class TraceConfig:
    """Recording of all ranks over some steps, as one file for Perfetto and chrome://tracing."""

    steps: str = key(
        "", "", "20:30: a trace of the steps after the first 20 until 30 have ended, in trace.json.gz in the run's "
        "directory; empty: none")
    profiler: bool = key(
        False, "", "merge the events of the framework's own profiler (torch.profiler, tf.profiler) into it: operations "
        "and kernels", unused=(NO_TRACE,))


def __getattr__(name: str) -> Any:
    """Keep the names of sections before release 0.2: ``Schedule`` is `ScheduleConfig`."""
    if f"{name}Config" not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[f"{name}Config"]
