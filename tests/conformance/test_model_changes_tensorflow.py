"""Changes that callbacks make to a Keras model during training: a note or one error, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import bits, config, fitted, lockstep, samples, weights

from hvdtrain.config import CheckpointConfig, DataConfig, DataParallelConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

from hvdtrain.backends.keras.facts import KerasFacts  # noqa: E402

RUN = config(max_steps=6, global_batch=24, lr=0.05, optimizer=Named("AdamW", {"weight_decay": 0.1}), metrics=[],
             data=DataConfig(shuffle=False, prefetch=0))
RAGGED = samples(60)
"""Each third batch has 12 samples, for which TensorFlow traces another graph."""
DATA = samples(72)


def model(frozen=False):
    keras.utils.set_random_seed(2)
    layers = keras.layers
    inside = keras.Sequential([layers.Dense(8, activation="tanh"), layers.BatchNormalization(name="norm")],
                              name="backbone")
    made = keras.Sequential([keras.Input((12,)), inside, layers.Dense(8, activation="tanh"), layers.Dense(5)])
    inside.trainable = not frozen
    return made


class Change(Callback):
    """Changes the model before step 2, or steps ``at``, on all ranks or on the last one alone."""

    where = "all"

    def __init__(self, change, alone=False, at=(2,)):
        self.change, self.alone, self.at = change, alone, at

    def step_start(self, run):
        if run.state.cursor.step in self.at and (not self.alone or run.control.rank == run.control.size - 1):
            self.change(run.spec.model)


def trained(change=None, size=2, frozen=False, alone=False, at=(2,), data=DATA, **changes):
    """Return the runs, with ``told``: what a run told of its model."""
    def work(run):
        if change is not None:
            run.callbacks.insert(0, Change(change, alone, at))
        fitted(run)
        run.told = [note for note in run.notes if "trainable" in note]
        return run

    return lockstep(size, replace(RUN, **changes), lambda rank: model(frozen), data, work)


def switch(model):
    model.get_layer("backbone").trainable ^= True
    model.layers[2].kernel.trainable = False


@pytest.mark.parametrize("frozen, changes", [
    (False, {"data_parallel": DataParallelConfig("zero")}), (True, {"accumulate": 2})], ids=str)
def test_trainable_has_no_effect_and_a_note(frozen, changes, tmp_path):
    """Also where a graph is traced after the change: BatchNorm in a frozen layer takes its averages."""
    changes = {**changes, "data": RAGGED}
    want = trained(None, 2, frozen, out=str(tmp_path / "a"), **changes)
    for run, plain in zip(trained(switch, 2, frozen, out=str(tmp_path / "b"), **changes), want):
        assert bits(run) == bits(plain)
        told, = run.told
        now = "trainable now" if frozen else "no longer trainable"
        assert told.startswith(f"layer backbone is {now}; variable kernel (number ")
        assert "no effect on the run, as in Keras until compile() is called again" in told
        assert run.spec.model.get_layer("backbone").trainable == frozen  # as the callback left it


def freeze(model):
    model.get_layer("backbone").trainable = False


@pytest.mark.parametrize("changes", [{}, {"data_parallel": DataParallelConfig("zero"), "accumulate": 2}], ids=str)
def test_freezing_before_the_first_step_is_freezing_before_the_run(changes, tmp_path):
    """Also of a run that resumes, whose callback changes the model later than the first run's."""
    want = trained(None, frozen=True, out=str(tmp_path / "a"), **changes)
    whole = trained(freeze, at=(0,), out=str(tmp_path / "b"), **changes)
    cut = {**changes, "max_steps": 2, "out": str(tmp_path / "c"), "checkpoint": CheckpointConfig(at_end=True)}
    trained(freeze, at=(0,), **cut)
    resumed = trained(freeze, at=(3,), out=str(tmp_path / "d"), resume=str(tmp_path / "c"), **changes)
    for got in (*whole, *resumed):
        for a, b in zip(weights(got), weights(want[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
        assert not got.told


def test_unfreezing_before_the_first_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="before the first step: layer backbone is trainable now.*Set trainable before "
                                        "fit, and compile again"):
        trained(switch, frozen=True, at=(0,), out=str(tmp_path))


def test_a_layer_that_alternates_gives_one_note(tmp_path):
    def alternate(model):
        model.get_layer("backbone").trainable ^= True

    for run in trained(alternate, at=range(1, 6), out=str(tmp_path)):
        told, = run.told
        assert "Later changes of trainable have no effect and are not reported" in told


@pytest.mark.parametrize("change, said", [
    (lambda model: model.add(keras.layers.Dense(5)), "layer dense (number "),
    (lambda model: model.pop(), "was removed"),
    (lambda model: model.compile("sgd", "mse"), "the model was compiled again"),
    (lambda model: setattr(model, "optimizer", keras.optimizers.SGD()), "the model got a new optimizer")])
def test_other_changes_are_refused(change, said):
    built, notes = model(), []
    facts = KerasFacts(built)
    assert facts.changes() == []
    change(built)
    with pytest.raises(UserError) as error:
        facts.follow(facts.changes(), notes.append)
    assert said in str(error.value) and not notes and facts.changes() == []


def test_compiling_again_and_a_change_on_one_rank_alone_end_the_run_on_all(tmp_path):
    for change, alone, said in ((lambda model: model.compile("sgd", "mse"), False, "compiled again"),
                                (switch, True, "some ranks only.*layer backbone is no longer trainable")):
        with pytest.raises(UserError, match=said):
            trained(change, alone=alone, out=str(tmp_path / str(alone)))


def test_the_rate_and_the_state_of_the_optimizer_may_change():
    built = model()
    built.compile(keras.optimizers.Adam(), "mse")
    built.optimizer.build(built.trainable_variables)
    facts = KerasFacts(built)
    built.optimizer.learning_rate = 0.01
    built.optimizer.iterations.assign(3)
    built.stop_training = True
    assert facts.changes() == []
