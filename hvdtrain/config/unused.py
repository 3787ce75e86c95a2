"""Which keys were changed from their default and do nothing as the run is set up.

Owns the table of such keys; `hvdtrain.engine.assemble` puts what it finds among the notes of the run. A key is in the
table only where it is sure to do nothing, whatever a callback or a later call of the run's Trainer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import Config, schema
from hvdtrain.config.pipeline import cut_over_ranks


@dataclass(frozen=True)
class Setup:
    """What decides about keys: the configuration, and what became of it.

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


TABLE: tuple[tuple[str, str, Callable[[Setup], bool]], ...] = (
    ("model model_args", "fit was given a model", lambda s: s.own_model),
    ("data.name data.args", "fit was given data", lambda s: s.own_data),
    ("loss.name loss.args metrics", "the model file has a task of its own", lambda s: s.own_task),
    ("optimizer.name optimizer.args", "the model file gives optimizer(model, config)", lambda s: s.file_optimizer),
    ("lr optimizer.args", "the model keeps the optimizer that it was compiled with",
     lambda s: s.own_optimizer and s.config.optimizer.name == "auto"),
    ("lr", "optimizer.args has a learning_rate",
     lambda s: "learning_rate" in s.config.optimizer.args and not s.file_optimizer),
    ("schedule.args schedule.interval", "no schedule.name is set",
     lambda s: s.config.schedule.name.lower() in ("none", "")),
    ("early_stop.mode early_stop.patience early_stop.min_delta", "no early_stop.metric is set",
     lambda s: not s.config.early_stop.metric),
    ("data_parallel.stage data_parallel.shards", "data_parallel is replicate, which divides nothing",
     lambda s: s.config.data_parallel.name == "replicate"),
    ("trace.profiler", "no trace.steps is set", lambda s: not s.config.trace.steps),
    ("max_skipped", "nan_guard is not skip", lambda s: s.config.nan_guard != "skip"),
    ("loss_scale", "precision is not fp16 or auto",
     lambda s: not {"fp16", "auto"} & set(s.config.precisions())),
    ("split_micro_batches", "model_parallel is 1", lambda s: s.config.model_parallel == 1),
    ("pipeline.order pipeline.micro_batches pipeline.chunks pipeline.cut", "no copy of the model is cut over ranks",
     lambda s: not cut_over_ranks(s.config)),
    ("pipeline.chunks", "pipeline.order is not interleaved", lambda s: s.config.pipeline.order != "interleaved"),
    ("rebalance.probe_s rebalance.probe_cache rebalance.max_micro_batch", "balance is off",
     lambda s: s.config.balance == "off"),
    ("rebalance.margin rebalance.lasting", "balance is not auto", lambda s: s.config.balance != "auto"),
    ("exchange.topk_ratio exchange.topk_momentum exchange.topk_warmup_steps", "compression is not topk or auto",
     lambda s: s.config.compression not in ("topk", "auto")),
    ("exchange.powersgd_rank", "compression is not powersgd or auto",
     lambda s: s.config.compression not in ("powersgd", "auto")),
    ("exchange.auto_margin", "compression is not auto", lambda s: s.config.compression != "auto"),
    ("exchange.bucket_mb", "exchange.adasum exchanges each tensor by itself", lambda s: s.config.exchange.adasum),
    ("exchange.fusion_threshold_mb exchange.cycle_time_ms", "gradients do not go over Horovod",
     lambda s: not s.horovod),
)
"""(keys, why they do nothing, when that is so)."""


def notes(setup: Setup) -> list[str]:
    """Say of each changed key that does nothing why; the first reason of the table counts. Pure."""
    defaults = {key.name: key.default for key in schema.keys(Config)}
    changed = {name for name, value in schema.leaves(setup.config) if value not in (defaults[name], [])}
    found: dict[str, str] = {}
    for keys, why, idle in TABLE:
        for key in keys.split():
            if key in changed and idle(setup):
                found.setdefault(key, f"{key} has no effect: {why}")
    return list(found.values())


def idle(setup: Setup) -> frozenset[str]:
    """Return all keys that do nothing, changed or not. Pure."""
    return frozenset(key for keys, _, idles in TABLE for key in keys.split() if idles(setup))


def setup_of(config: Config, spec: Any, wire: str, kind: str, model: Any, data: Any) -> Setup:
    """The `Setup` of a run: its model's ``spec``, the name of its ``wire``, the launcher's ``kind``, what fit got."""
    compiled = getattr(spec.model, "compiled", False) and getattr(spec.model, "optimizer", None) is not None
    return Setup(config, "horovod" in wire or kind == "gloo", model is not None, data is not None,
                 spec.task is not None, bool(compiled), spec.optimizer is not None)
