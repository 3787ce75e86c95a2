"""Keys that were changed and do nothing are named, each with its reason, and no other key is."""

from dataclasses import replace

import pytest
from small_runs import config, lockstep, make_model, samples

from hvdtrain.config import (
    Config,
    Data,
    DataParallel,
    EarlyStop,
    Exchange,
    Named,
    Pipeline,
    Rebalance,
    Schedule,
    Setup,
    Trace,
    notes,
    schema,
)
from hvdtrain.config.sections import COMPILED, FILE_OPTIMIZER

TOPK = {"topk_ratio": 0.1, "topk_momentum": 0.5, "topk_warmup_steps": 3}
IDLE = [
    ({"trace": Trace(profiler=True)}, ["trace.profiler"]),
    ({"schedule": Schedule(args={"T_max": 3}, interval="epoch")}, ["schedule.args", "schedule.interval"]),
    ({"early_stop": EarlyStop(mode="max", patience=2, min_delta=0.1)},
     ["early_stop.mode", "early_stop.patience", "early_stop.min_delta"]),
    ({"exchange": Exchange(**TOPK)}, [f"exchange.{name}" for name in TOPK]),
    ({"exchange": Exchange(**TOPK), "compression": "powersgd"}, [f"exchange.{name}" for name in TOPK]),
    ({"exchange": Exchange(powersgd_rank=2, auto_margin=0.1), "compression": "topk"},
     ["exchange.powersgd_rank", "exchange.auto_margin"]),
    ({"exchange": Exchange(adasum=True, bucket_mb="auto")}, ["exchange.bucket_mb"]),
    ({"max_skipped": 3}, ["max_skipped"]),
    ({"data_parallel": DataParallel(stage=1, shards=[3, 1])}, ["data_parallel.stage", "data_parallel.shards"]),
    ({"loss_scale": 2.0, "precision": "bf16:fp32"}, ["loss_scale"]),
    ({"split_micro_batches": 3}, ["split_micro_batches"]),
    ({"pipeline": Pipeline(1, "gpipe", [1, 1], 3, 3, ["a"])},
     [f"pipeline.{name}" for name in ("order", "micro_batches", "chunks", "cut")]),
    ({"pipeline": Pipeline(2, chunks=3)}, ["pipeline.chunks"]),
    ({"rebalance": Rebalance(margin=0.1, lasting=3, probe_s=1.0, probe_cache=False, max_micro_batch=[3])},
     [f"rebalance.{name}" for name in ("margin", "lasting", "probe_s", "probe_cache", "max_micro_batch")]),
    ({"rebalance": Rebalance(margin=0.1, probe_s=1.0), "balance": "static"}, ["rebalance.margin"]),
    ({"optimizer": Named("SGD", {"learning_rate": 0.1}), "lr": 0.2}, ["lr"]),
]
BUSY = [
    {},
    {"data_parallel": DataParallel("zero", 1, [3, 1])},
    {"pipeline": Pipeline(2, "interleaved", micro_batches=3, chunks=3, cut=["a", "b", "c", "d", "e"])},
    {"schedule": Schedule("StepLR", {"step_size": 3}, "epoch"), "early_stop": EarlyStop("loss", "max", 2, 0.1)},
    {"schedule": Schedule(warmup_steps=3, linear_scaling_base=32), "nan_guard": "skip", "max_skipped": 3},
    {"exchange": Exchange(powersgd_rank=2, auto_margin=0.1, bucket_mb=3.0, cycle_time_ms=1.0, **TOPK),
     "compression": "auto"},
    {"exchange": Exchange(**TOPK), "compression": "topk"},
    {"exchange": Exchange(powersgd_rank=2), "compression": "powersgd"},
    {"loss_scale": 2.0, "precision": "auto"},
    {"loss_scale": 2.0, "precision": "fp32:fp16"},
    {"split_micro_batches": 3, "model_parallel": 2},
    {"rebalance": Rebalance(9, 0.1, 3, 1.0, False, [3]), "balance": "auto"},
    {"model": "m:f", "model_args": {"a": 1}, "data": Data("text", {"n": 1}), "lr": 0.1, "loss": Named("mse"),
     "optimizer": Named(args={"amsgrad": True}), "metrics": ["mse_loss"], "rebalance": Rebalance(every_steps=3)},
]


def named(setup):
    """The keys that the notes name."""
    return [note.partition(" ")[0] for note in notes(setup)]


@pytest.mark.parametrize("values, keys", IDLE, ids=str)
def test_changed_keys_without_an_effect_are_named(values, keys):
    assert named(Setup(Config(**values).check())) == keys
    assert all(" has no effect: " in note for note in notes(Setup(Config(**values))))


@pytest.mark.parametrize("values", BUSY, ids=str)
def test_keys_that_do_something_are_not(values):
    assert notes(Setup(Config(**values).check())) == []


def test_what_became_of_the_run_counts_too():
    given = Config(model="m:f", model_args={"a": 1}, data=Data("text", {"n": 1}, shuffle=False), lr=0.1,
                   optimizer=Named(args={"amsgrad": True}), loss=Named("mse", {"b": 1}), metrics=["mse_loss"],
                   exchange=Exchange(cycle_time_ms=1.0, fusion_threshold_mb=2.0))
    assert named(Setup(given, own_model=True)) == ["model", "model_args"]
    assert named(Setup(given, own_data=True)) == ["data.name", "data.args"]
    assert named(Setup(given, own_task=True)) == ["loss.name", "loss.args", "metrics"]
    assert named(Setup(given, own_optimizer=True)) == ["lr", "optimizer.args"]
    assert named(Setup(replace(given, optimizer="Adam"), own_optimizer=True)) == []
    assert named(Setup(given, file_optimizer=True)) == ["optimizer.args"]
    assert named(Setup(replace(given, optimizer="Adam"), file_optimizer=True)) == ["optimizer.name"]
    assert named(Setup(given, horovod=False)) == ["exchange.fusion_threshold_mb", "exchange.cycle_time_ms"]
    assert named(Setup(replace(given, metrics=[], loss="auto"), own_task=True)) == []


def test_facts_of_a_section_hold_for_its_keys():
    keys = {key.name: key for key in schema.keys(Config)}
    assert keys["trace.steps"].affects == "nothing" and keys["schedule.name"].affects == ""
    assert keys["optimizer.name"].unused == (FILE_OPTIMIZER,) and COMPILED in keys["optimizer.args"].unused
    assert {"trace", "trace.steps", "out", "data.workers"} <= schema.affecting(Config, "nothing")
    assert schema.affecting(Config, "metrics") == {"eval_every", "metrics"}
    assert schema.affecting(Config, "split") == {"shares", "accumulate", "micro_batch", "remat", "split_micro_batches"}


def test_it_is_said_once_by_rank_0_when_the_run_starts(capsys):
    odd = config(schedule=Schedule(args={"T_max": 3}), max_skipped=3, progress="plain", data=Data("text", prefetch=0))
    for seen in lockstep(2, odd, lambda rank: make_model("numpy"), samples(9), lambda run: run.notes):
        assert [note.partition(" ")[0] for note in seen] == ["data.name", "schedule.args", "max_skipped"]
    said = capsys.readouterr().out
    assert said.count("note: schedule.args has no effect: no schedule.name is set") == 1
    assert said.count("has no effect") == 3
