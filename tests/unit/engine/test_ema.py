"""The moving average of the weights: its formula, where it is used, and its way through checkpoints of any ranks."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import apart, bits, config, fitted, lockstep, make_model, samples, solo, weights

from hvdtrain import trainer
from hvdtrain.checkpoint import read_snapshot
from hvdtrain.config import CheckpointConfig, Config, DataParallelConfig, Named, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.average import averaged
from hvdtrain.engine.callbacks.base import Callback

DECAY, STEPS, HALF = 0.8, 8, 5
TRAIN, TEST = samples(60), samples(21, 1)
BASE = config(global_batch=20, max_steps=STEPS, ema=DECAY, optimizer=Named("SGD", {"momentum": 0.9}))


class Expected(Callback):
    """Averages the weights by the formula, in float64, after every step that has made an update."""

    where = "all"

    def __init__(self) -> None:
        self.average: list[np.ndarray] = []
        self.skipped = 0

    def fit_start(self, run):
        self.average = [array.astype(np.float64) for array in copy.deepcopy(weights(run))]

    def step_end(self, run):
        if run.updated:
            self.average = [DECAY * a + (1 - DECAY) * w for a, w in zip(self.average, weights(run))]
        self.skipped += not run.updated


def averages(run):
    with averaged(run.average):
        return copy.deepcopy(weights(run))


def trained(run):
    run.callbacks.append(expected := Expected())
    return fitted(run), expected


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_it_is_evaluated_and_written_in_place_of_the_weights(framework, tmp_path):
    run, expected = trained(solo(replace(BASE, out=str(tmp_path)), make_model(framework), (TRAIN, TEST)))
    own = bits(run)
    assert apart(averages(run), expected.average) < 1e-6 and bits(run) == own, "the weights return bit by bit"
    assert apart(weights(run), expected.average) > 1e-3, "they are another thing than their average"
    trainer.export(run)
    with averaged(run.average):
        with_average = loop.measure(run, run.eval_feed)["loss"]
    assert run.state.metrics["loss"] == loop.measure(run, run.eval_feed)["loss"] == with_average
    run.average = None
    assert loop.measure(run, run.eval_feed)["loss"] != pytest.approx(with_average, rel=1e-4)
    if framework != "numpy":
        final = load_file(tmp_path / "model" / "model.safetensors")
        norms = sorted(float(np.square(array, dtype=np.float64).sum()) for array in final.values())
        wanted = sorted(float(np.square(array).sum()) for array in expected.average)
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_after_a_fit_the_model_is_what_was_measured_and_a_checkpoint_has_the_weights(framework, tmp_path):
    own = trainer.Trainer(replace(BASE, out=str(tmp_path), checkpoint=CheckpointConfig()))
    result = own.fit(make_model(framework), (TRAIN, TEST))
    final = bits(own.run)
    assert own.evaluate() == result.metrics and bits(own.run) == final
    own.save()
    assert bits(own.run) == final
    resumed = solo(replace(BASE, out=str(tmp_path / "again"), resume=str(tmp_path)), make_model(framework),
                   (TRAIN, TEST))
    assert bits(resumed) != final
    with averaged(resumed.average):
        assert bits(resumed) == final


def test_a_skipped_update_is_not_averaged(tmp_path):
    x, y = TRAIN
    torn = x.copy()
    torn[7] = np.nan
    run, expected = trained(solo(replace(BASE, out=str(tmp_path), nan_guard="skip"), make_model("numpy"), (torn, y)))
    assert 0 < expected.skipped < STEPS and apart(averages(run), expected.average) < 1e-12


@pytest.mark.parametrize("size, changes", [
    (2, {"data_parallel": DataParallelConfig("zero", 2, [1, 3])}), (3, {"shares": [2, 0, 1]}),
    (2, {"checkpoint": CheckpointConfig(every_steps=HALF, layout="sharded")}), (2, {"pipeline": PipelineConfig(2)}),
    (4, {"pipeline": PipelineConfig(2), "data_parallel": DataParallelConfig("zero", stage=1)}),
], ids=["zero", "replicate", "sharded", "pipeline", "pipeline zero"])
def test_it_goes_on_at_other_ranks_as_if_nothing_had_been(size, changes, tmp_path):
    saved = {"checkpoint": CheckpointConfig(every_steps=HALF), **changes}

    def work(run):
        fitted(run)
        return run, averages(run)

    def train(size, name, **more):
        return lockstep(size, replace(BASE, out=str(tmp_path / name), **more), lambda rank: make_model("numpy"),
                        (TRAIN, TEST), work)

    ((alone, want),) = train(1, "alone")
    train(size, "first", **{**saved, "max_steps": HALF})
    ((run, got),) = train(1, "back", resume=str(tmp_path / "first"))
    assert apart(got, want) < 1e-12
    runs = train(size, "several", **{**saved, "resume": str(tmp_path / "first")})
    assert runs[0][0].state.metrics["loss"] == pytest.approx(alone.state.metrics["loss"], rel=1e-12)
    kept = read_snapshot(tmp_path / "several" / "checkpoints" / f"step-{STEPS:08d}").tensors["ema"]
    one = {name: array for name, array in alone.average.arrays()}
    assert list(kept) == sorted(one) and all(apart([kept[n]], [one[n]]) < 1e-12 for n in one)


def test_a_checkpoint_without_it_starts_it_anew(tmp_path):
    fitted(solo(replace(BASE, ema=0.0, max_steps=HALF, out=str(tmp_path), checkpoint=CheckpointConfig()),
                make_model("numpy"),
                TRAIN))
    run, expected = trained(solo(replace(BASE, out=str(tmp_path / "b"), resume=str(tmp_path)), make_model("numpy"),
                                 TRAIN))
    assert any("no moving average" in note for note in run.notes) and apart(averages(run), expected.average) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("framework, size, changes", [
    ("torch", 2, {"data_parallel": DataParallelConfig("zero", 2, [1, 3])}),
    ("torch", 2, {"pipeline": PipelineConfig(2)}),
    ("tensorflow", 2, {"data_parallel": DataParallelConfig("zero", 2, [1, 3])})],
    ids=["torch zero", "torch pipeline", "keras zero"])
def test_frameworks_take_it_back_too(framework, size, changes, tmp_path):
    def train(size, name, **more):
        return lockstep(size, replace(BASE, out=str(tmp_path / name), **more), lambda rank: make_model(framework),
                        (TRAIN, TEST), lambda run: (fitted(run), averages(run)))

    ((_, want),) = train(1, "alone")
    saved = {"checkpoint": CheckpointConfig(every_steps=HALF), **changes}
    train(size, "first", **{**saved, "max_steps": HALF})
    ((_, got),) = train(1, "back", resume=str(tmp_path / "first"))
    assert apart(got, want) < 1e-5


def test_what_cannot_be_is_refused_in_words(tmp_path):
    with pytest.raises(UserError, match="ema is 1.0"):
        Config(ema=1.0).check()
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    both = replace(BASE, optimizer=Named("SGD", {"use_ema": True}), out=str(tmp_path))
    with pytest.raises(UserError, match="use_ema"):
        solo(both, make_model("tensorflow"), TRAIN)
