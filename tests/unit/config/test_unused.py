"""Keys that were changed and do nothing are named, each with its reason, and no other key is."""

from dataclasses import replace

import pytest
from small_runs import config, lockstep, make_model, samples

from hvdtrain.config import (
    Config,
    ConfigContext,
    DataConfig,
    DataParallelConfig,
    EarlyStopConfig,
    ExchangeConfig,
    Named,
    PipelineConfig,
    RebalanceConfig,
    ScheduleConfig,
    TraceConfig,
    notes,
    schema,
)
from hvdtrain.config.sections import COMPILED, FILE_OPTIMIZER

TOPK = {"topk_ratio": 0.1, "topk_momentum": 0.5, "topk_warmup_steps": 3}
IDLE = [
    ({"trace": TraceConfig(profiler=True)}, ["trace.profiler"]),
    ({"schedule": ScheduleConfig(args={"T_max": 3}, interval="epoch")}, ["schedule.args", "schedule.interval"]),
    ({"early_stop": EarlyStopConfig(mode="max", patience=2, min_delta=0.1)},
     ["early_stop.mode", "early_stop.patience", "early_stop.min_delta"]),
    ({"exchange": ExchangeConfig(**TOPK)}, [f"exchange.{name}" for name in TOPK]),
    ({"exchange": ExchangeConfig(**TOPK), "compression": "powersgd"}, [f"exchange.{name}" for name in TOPK]),
    ({"exchange": ExchangeConfig(powersgd_rank=2, auto_margin=0.1), "compression": "topk"},
     ["exchange.powersgd_rank", "exchange.auto_margin"]),
    ({"exchange": ExchangeConfig(adasum=True, bucket_mb="sweep")}, ["exchange.bucket_mb"]),
    ({"max_skipped": 3}, ["max_skipped"]),
    ({"data_parallel": DataParallelConfig(stage=1, shards=[3, 1])}, ["data_parallel.stage", "data_parallel.shards"]),
    ({"loss_scale": 2.0, "precision": "bf16:fp32"}, ["loss_scale"]),
    ({"split_micro_batches": 3}, ["split_micro_batches"]),
    ({"pipeline": PipelineConfig(1, "gpipe", [1, 1], 3, 3, ["a"])},
     [f"pipeline.{name}" for name in ("order", "micro_batches", "chunks", "cut")]),
    ({"pipeline": PipelineConfig(2, chunks=3)}, ["pipeline.chunks"]),
    ({"rebalance": RebalanceConfig(margin=0.1, lasting=3, probe_s=1.0, probe_cache=False, max_micro_batch=[3])},
     [f"rebalance.{name}" for name in ("margin", "lasting", "probe_s", "probe_cache", "max_micro_batch")]),
    ({"rebalance": RebalanceConfig(margin=0.1, probe_s=1.0), "balance": "static"}, ["rebalance.margin"]),
    ({"optimizer": Named("SGD", {"learning_rate": 0.1}), "lr": 0.2}, ["lr"]),
]
BUSY = [
    {},
    {"data_parallel": DataParallelConfig("zero", 1, [3, 1])},
    {"pipeline": PipelineConfig(2, "interleaved", micro_batches=3, chunks=3, cut=["a", "b", "c", "d", "e"])},
    {"schedule": ScheduleConfig("StepLR", {"step_size": 3}, "epoch"),
     "early_stop": EarlyStopConfig("loss", "max", 2, 0.1)},
    {"schedule": ScheduleConfig(warmup_steps=3, linear_scaling_base=32), "nan_guard": "skip", "max_skipped": 3},
    {"exchange": ExchangeConfig(powersgd_rank=2, auto_margin=0.1, bucket_mb=3.0, cycle_time_ms=1.0, **TOPK),
     "compression": "auto"},
    {"exchange": ExchangeConfig(**TOPK), "compression": "topk"},
    {"exchange": ExchangeConfig(powersgd_rank=2), "compression": "powersgd"},
    {"loss_scale": 2.0, "precision": "auto"},
    {"loss_scale": 2.0, "precision": "fp32:fp16"},
    {"split_micro_batches": 3, "model_parallel": 2},
    {"rebalance": RebalanceConfig(9, 0.1, 3, 1.0, False, [3]), "balance": "auto"},
    {"model": "m:f", "model_args": {"a": 1}, "data": DataConfig("text", {"n": 1}), "lr": 0.1, "loss": Named("mse"),
     "optimizer": Named(args={"amsgrad": True}), "metrics": ["mse_loss"], "rebalance": RebalanceConfig(every_steps=3)},
]


def named(setup):
    """Return the keys that the notes name."""
    return [note.partition(" ")[0] for note in notes(setup)]


@pytest.mark.parametrize("values, keys", IDLE, ids=str)
def test_changed_keys_without_an_effect_are_named(values, keys):
    assert named(ConfigContext(Config(**values).check())) == keys
    assert all(" has no effect: " in note for note in notes(ConfigContext(Config(**values))))


@pytest.mark.parametrize("values", BUSY, ids=str)
def test_keys_that_do_something_are_not(values):
    assert notes(ConfigContext(Config(**values).check())) == []


def test_what_became_of_the_run_counts_too():
    given = Config(model="m:f", model_args={"a": 1}, data=DataConfig("text", {"n": 1}, shuffle=False), lr=0.1,
                   optimizer=Named(args={"amsgrad": True}), loss=Named("mse", {"b": 1}), metrics=["mse_loss"],
                   exchange=ExchangeConfig(cycle_time_ms=1.0, fusion_threshold_mb=2.0))
    assert named(ConfigContext(given, own_model=True)) == ["model", "model_args"]
    assert named(ConfigContext(given, own_data=True)) == ["data.name", "data.args"]
    assert named(ConfigContext(given, own_task=True)) == ["loss.name", "loss.args", "metrics"]
    assert named(ConfigContext(given, own_optimizer=True)) == ["lr", "optimizer.args"]
    assert named(ConfigContext(replace(given, optimizer="Adam"), own_optimizer=True)) == []
    assert named(ConfigContext(given, file_optimizer=True)) == ["optimizer.args"]
    assert named(ConfigContext(replace(given, optimizer="Adam"), file_optimizer=True)) == ["optimizer.name"]
    assert named(ConfigContext(given, horovod=False)) == ["exchange.fusion_threshold_mb", "exchange.cycle_time_ms"]
    assert named(ConfigContext(replace(given, metrics=[], loss="auto"), own_task=True)) == []


def test_facts_of_a_section_hold_for_its_keys():
    keys = {key.name: key for key in schema.keys(Config)}
    assert keys["trace.steps"].affects == "nothing" and keys["schedule.name"].affects == ""
    assert keys["optimizer.name"].unused == (FILE_OPTIMIZER,) and COMPILED in keys["optimizer.args"].unused
    assert {"trace", "trace.steps", "out", "data.workers"} <= schema.affecting(Config, "nothing")
    assert schema.affecting(Config, "metrics") == {"eval", "eval_every", "eval_max_samples", "eval_steps", "metrics"}
    assert schema.affecting(Config, "split") == {"shares", "accumulate", "micro_batch", "remat", "split_micro_batches"}


def test_it_is_said_once_by_rank_0_when_the_run_starts(capsys):
    odd = config(schedule=ScheduleConfig(args={"T_max": 3}), max_skipped=3, progress="plain",
                 data=DataConfig("text", prefetch=0))
    for seen in lockstep(2, odd, lambda rank: make_model("numpy"), samples(9), lambda run: run.notes):
        assert [note.partition(" ")[0] for note in seen] == ["data.name", "schedule.args", "max_skipped"]
    said = capsys.readouterr().out
    assert said.count("note: schedule.args has no effect: no schedule.name is set") == 1
    assert said.count("has no effect") == 3
