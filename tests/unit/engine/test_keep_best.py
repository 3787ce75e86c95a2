"""Best checkpoints and the weights that a run ends with: kept, restored, known after a resume at other ranks."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small_runs import apart, bits, config, fitted, lockstep, make_model, samples, solo, weights

from hvdtrain.checkpoint import CheckpointStore, Snapshot
from hvdtrain.commands.checkpoints import look, sorted_out
from hvdtrain.config import CheckpointConfig, DataParallelConfig, EarlyStopConfig, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.early_stop import watched
from hvdtrain.trainer import Trainer

TRAIN, TEST = samples(20), samples(15, 1)
EVERY, KEPT = 2, 1
BASE = config(global_batch=10, epochs=6, eval_every=1, lr=2.0,
              checkpoint=CheckpointConfig(every_steps=EVERY, keep=KEPT, keep_best="loss"),
              early_stop=EarlyStopConfig("loss", patience=3))


class Measured(Callback):
    """Puts given values in the place of what is evaluated, and keeps the weights at each evaluation."""

    where = "all"
    state_key = "Measured"

    def __init__(self, *values):
        self.values, self.seen = dict(zip(range(2, 100, 2), values)), {}

    def eval_end(self, run):
        step = run.state.cursor.step
        run.state.metrics["loss"] = self.values[step]
        with loop.averaged(run.average):
            self.seen[step] = [np.array(array) for array in weights(run)]


def measuring(run, *values):
    run.callbacks.insert(0, measured := Measured(*values))
    return measured


def steps(out):
    return [one.step for one in CheckpointStore(out / "checkpoints", 1).list()]


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_run_ends_with_the_best_weights_and_keeps_their_checkpoint(framework, ema, tmp_path):
    own = Trainer(replace(BASE, out=str(tmp_path), ema=ema))
    result = own.fit(make_model(framework), (TRAIN, TEST), callbacks=[])
    run, best = own.run, own.run.state.findings.best["loss"][0]
    assert 0 < best.step < result.steps and result.metrics_at == best.step, "else the test shows nothing"
    assert result.metrics == best.metrics and own.evaluate() == pytest.approx(best.metrics, rel=1e-6)
    assert result.history["val_loss"][best.step // 2 - 1] == best.metrics["loss"] == min(result.history["val_loss"])
    assert steps(tmp_path) == [best.step, result.steps]
    completed = json.loads((tmp_path / "completed.json").read_text())
    assert completed["weights_at"] == completed["metrics_at"] == best.step < completed["steps"]
    assert completed["best"]["loss"] == {"step": best.step, "value": best.metrics["loss"]}
    assert json.loads((tmp_path / "model" / "weights.json").read_text())["step"] == best.step
    assert any(f"has the weights of step {best.step}, the best by loss" in note for note in completed["notes"])
    final = bits(run)
    own.save()
    assert bits(run) == final, "a checkpoint has the weights of training, the model its final ones"
    resumed = solo(replace(BASE, ema=ema, out=str(tmp_path / "b"), resume=str(tmp_path)), make_model(framework),
                   (TRAIN, TEST))
    assert bits(resumed) != final and resumed.state.findings.best["loss"][0] == best


@pytest.mark.parametrize("changes, kept, final", [
    ({}, [4, 10], 4), ({"checkpoint": CheckpointConfig(keep=1, at_end=False)}, [4], 4),
    ({"early_stop": EarlyStopConfig("loss", restore=False)}, [4, 12], 12),
    ({"early_stop": EarlyStopConfig("loss", restore=False), "checkpoint": CheckpointConfig(every_steps=2, keep=1)},
     [12], 12),
    ({"early_stop": EarlyStopConfig(), "checkpoint": CheckpointConfig(keep_best="loss", keep_best_mode="max", keep=2)},
     [10, 12], 12)])
def test_which_is_kept_and_which_is_final(changes, kept, final, tmp_path):
    best_step = kept[0]
    own = Trainer(replace(BASE, out=str(tmp_path), **changes))
    run = own._assembled(make_model("numpy"), (TRAIN, TEST))
    seen = measuring(run, 5.0, 1.0, math.nan, 1.0, 7.0, 7.0).seen
    result = own.fit()
    assert steps(tmp_path) == kept and result.steps >= 10 and result.metrics_at == final
    assert apart(weights(run), seen[final]) == 0
    own.fit()
    assert apart(weights(run), seen[final]) == 0, "a second call leaves the same model"
    rows = {row.step: row.state for row in look(tmp_path / "checkpoints", False)}
    keeps = own.config.checkpoint.keep_best or own.config.early_stop.restore
    assert {step: "best by loss" in state for step, state in rows.items()} == {
        step: bool(keeps) and step == best_step for step in kept}
    assert sorted_out(tmp_path / "checkpoints", 1)[1] == [], "the command keeps the best too"


def test_the_evaluation_of_an_epoch_cut_short_may_be_the_best(tmp_path):
    settings = replace(BASE, out=str(tmp_path), max_steps=5, checkpoint=CheckpointConfig(keep=1, at_end=False))
    run = solo(settings, make_model("numpy"), (TRAIN, TEST))
    measuring(run, 3.0, 1.0).values[5] = 0.5
    fitted(run)
    assert steps(tmp_path) == [5] and run.state.findings.best["loss"][0].step == run.state.findings.metrics_at == 5
    assert run.state.findings.weights_at == -1, "the last weights are the best"


def test_the_newest_checkpoint_names_itself_where_it_is_the_best(tmp_path):
    """The one of the last step, which was saved before its evaluation."""
    settings = replace(BASE, out=str(tmp_path), epochs=2, early_stop=EarlyStopConfig(),
                       checkpoint=replace(BASE.checkpoint, at_end=False))
    run = solo(settings, make_model("numpy"), (TRAIN, TEST))
    measuring(run, 2.0, 1.0)
    fitted(run)
    assert [row.state.partition("; ")[2] for row in look(tmp_path / "checkpoints", False)] == ["best by loss"]


ZERO, ONE = DataParallelConfig("zero", 2, [1, 3]), DataParallelConfig("zero", 1)


@pytest.mark.parametrize("framework, size, changes", [
    ("numpy", 3, {"shares": [2, 0, 1]}), ("numpy", 2, {"data_parallel": ZERO}),
    ("numpy", 2, {"data_parallel": ONE, "ema": 0.5}), ("numpy", 2, {"pipeline": PipelineConfig(2)}),
    ("numpy", 2, {"checkpoint": replace(BASE.checkpoint, layout="sharded"), "ema": 0.5}),
    ("numpy", 4, {"pipeline": PipelineConfig(2), "data_parallel": ONE, "ema": 0.5}),
    *(pytest.param(framework, 2, changes, marks=pytest.mark.slow) for framework in ("torch", "tensorflow")
      for changes in ({"data_parallel": ZERO}, {"pipeline": PipelineConfig(2), "ema": 0.5}))])
def test_a_killed_run_restores_its_best_weights_at_other_ranks(framework, size, changes, tmp_path):
    def work(run):
        seen = measuring(run, 5.0, 1.0, 2.0, 3.0, 4.0, 4.0).seen
        fitted(run)
        with loop.averaged(run.average):
            return run, [np.array(array) for array in weights(run)], seen

    def train(size, name, **more):
        settings = replace(BASE, out=str(tmp_path / name), **{**changes, **more})
        return lockstep(size, settings, lambda rank: make_model(framework), (TRAIN, TEST), work)

    one = {"data_parallel": DataParallelConfig(), "pipeline": PipelineConfig(), "shares": []}
    ((_, _, seen),) = train(1, "alone", **one)
    train(size, "a", max_steps=8)  # its final weights are those of step 4; step 8 is the newest checkpoint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ((run, got, _),) = train(1, "a", resume="auto", **one)
    assert run.state.findings.weights_at == 4 and apart(got, seen[4]) < 1e-5 and steps(tmp_path / "a") == [4, 10]
    # At as many ranks, into another directory: the best checkpoint stays where it is.
    runs = train(size, "c", resume=str(tmp_path / "b"))
    assert steps(tmp_path / "c") == [10] and {run.state.findings.weights_at for run, *_ in runs} == {4}
    assert not any("cannot be read" in note for note in runs[0][0].notes)
    if "pipeline" not in changes:
        assert all(apart(got, seen[4]) < 1e-5 for _, got, _ in runs)


def test_another_runs_checkpoint_of_the_best_step_is_not_taken(tmp_path):
    """The run is resumed into a directory that has one; and the folder of the resumed run was moved."""
    def train(out, seed=0, **more):
        run = solo(replace(BASE, out=str(tmp_path / out), **more), make_model("numpy", seed), (TRAIN, TEST))
        measured = measuring(run, 5.0, 1.0, 2.0, 3.0, 4.0, 4.0)
        fitted(run)
        return run, measured

    _, measured = train("a", max_steps=8)
    shutil.move(tmp_path / "a", tmp_path / "moved")
    for other in "ab":
        train(other, seed=7, max_steps=4)
    run, _ = train("b", resume=str(tmp_path / "moved"))
    assert run.state.findings.weights_at == 4 and apart(weights(run), measured.seen[4]) == 0


def test_a_best_checkpoint_that_is_damaged_is_told(tmp_path):
    run = solo(replace(BASE, out=str(tmp_path)), make_model("numpy"), (TRAIN, TEST))
    measured = measuring(run, 5.0, 1.0, 2.0, 3.0, 4.0, 4.0)

    class Damages(Callback):
        def fit_end(self, run):
            next((tmp_path / "checkpoints" / "step-00000004").glob("model*")).write_bytes(b"")

    run.callbacks.append(Damages())
    fitted(run)
    assert apart(weights(run), measured.seen[10]) == 0 and run.state.findings.weights_at == -1
    assert any("the weights of step 4, the best by loss, cannot be read" in note for note in run.notes)


def test_a_callback_that_changes_measured_weights_is_refused(tmp_path):
    class Changes(Callback):
        where = "all"

        def epoch_end(self, run):
            next(iter(run.spec.model.params.values()))[...] *= 0.5

    own = Trainer(replace(BASE, out=str(tmp_path)))
    with pytest.raises(UserError, match="a callback changed the weights after an evaluation"):
        own.fit(make_model("numpy"), (TRAIN, TEST), callbacks=[Changes()])


def test_a_best_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    plain = CheckpointStore.save
    settings = replace(BASE, out=str(tmp_path), checkpoint=CheckpointConfig(keep=1, keep_best="loss", every_steps=3))

    def save(store, content, step, log):
        if step == 6:
            raise OSError(28, "No space left on device")
        return plain(store, content, step, log)

    class Waits(Callback):  # so that the failure is known before the evaluation of step 8
        where = "all"

        def step_end(self, run):
            if run.saver is not None:
                run.saver.wait()

    monkeypatch.setattr(CheckpointStore, "save", save)
    run = solo(settings, make_model("numpy"), (TRAIN, TEST))
    run.callbacks.insert(0, Waits())
    measured = measuring(run, 5.0, 3.0, 1.0, 2.0, 4.0, 4.0)
    fitted(run)
    # Step 6 is lost, so that the best that is kept is the one of step 8, and that of step 4 until then.
    assert run.state.findings.weights_at == 8 and apart(weights(run), measured.seen[8]) == 0
    assert steps(tmp_path)[0] == 8


def test_a_last_checkpoint_that_fails_leaves_the_best_weights_in_memory(tmp_path, monkeypatch):
    def save(store, content, step, log, plain=CheckpointStore.save):
        if step == 4:
            raise OSError(28, "No space left on device")
        return plain(store, content, step, log)

    monkeypatch.setattr(CheckpointStore, "save", save)
    run = solo(replace(BASE, out=str(tmp_path), epochs=2, checkpoint=CheckpointConfig(keep=1, at_end=False)),
               make_model("numpy"), (TRAIN, TEST))
    measured = measuring(run, 5.0, 1.0)
    fitted(run)
    assert run.state.findings.weights_at == -1 and apart(weights(run), measured.seen[4]) == 0


def test_neither_a_later_save_nor_a_full_disk_removes_the_best(tmp_path, monkeypatch):
    """Of each metric the first candidate that is there, as the newest checkpoint names them."""
    store = CheckpointStore(tmp_path / "checkpoints", 1)

    def save(step, **best):
        store.save(Snapshot({"model": {"w": np.zeros(5)}}, {"best": best}), step)

    save(1, loss=[1])
    save(2, loss=[1], score=[2])
    save(4, loss=[3, 1], score=[2])  # the save of step 3 has failed
    save(5, loss=[3, 1], score=[2])
    save(6, loss=[3, 1], score=[2])
    assert steps(tmp_path) == [1, 2, 6]
    assert store.drop_oldest() is None, "a full disk at the end of a run"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("hvdtrain.checkpoint.files.free_bytes", lambda path: 0)
        save(7, loss=[3, 1], score=[2])
    assert steps(tmp_path) == [1, 2, 6], "a full disk during a run"
    save(8, loss=[8, 1], score=[2])
    save(9, loss=[8, 1])
    assert steps(tmp_path) == [8, 9]


def test_directions_of_a_metric():
    def signs(metric, mode, stop, stop_mode, **more):
        return watched(replace(BASE, checkpoint=CheckpointConfig(keep_best=metric, keep_best_mode=mode),
                               early_stop=EarlyStopConfig(stop, stop_mode, **more)))

    assert signs("accuracy", "auto", "loss", "auto") == {"accuracy": 1.0, "loss": -1.0}
    assert signs("accuracy", "min", "accuracy", "auto") == {"accuracy": -1.0}
    assert signs("accuracy", "auto", "accuracy", "min") == {"accuracy": -1.0}
    assert signs("", "auto", "loss", "auto", restore=False) == {}


def test_what_is_not_evaluated_is_refused(tmp_path):
    own = replace(BASE, out=str(tmp_path), early_stop=EarlyStopConfig(), checkpoint=CheckpointConfig(keep_best="los"))
    with pytest.raises(UserError, match=r"checkpoint.keep_best 'los' is not evaluated.*one of accuracy, loss"):
        fitted(solo(own, make_model("numpy"), (TRAIN, TEST)))
    with pytest.raises(UserError, match="checkpoint.keep_best is set and there is no evaluation data"):
        fitted(solo(replace(own, out=str(tmp_path / "b")), make_model("numpy"), TRAIN))
    run = solo(replace(BASE, out=str(tmp_path / "c"), eval_every=0), make_model("numpy"), (TRAIN, TEST))
    assert any("eval_every 0" in note for note in fitted(run).notes)
    with pytest.raises(UserError, match="keep_best_mode max and early_stop.mode min"):
        replace(BASE, checkpoint=CheckpointConfig(keep_best="loss", keep_best_mode="max"),
                early_stop=EarlyStopConfig("loss", "min")).check()
