"""Files, memory and metrics of Keras callbacks hold the same weights; two owners of one value are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import best_weights  # noqa: E402
import keras  # noqa: E402
from keras_kit import KerasKit  # noqa: E402
from keras_runs import BCE, STEPS, V, W, X, Y, best, made, trained

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.config import ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine.callbacks.base import Callback  # noqa: E402


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluated(model):
    """Keras' own loss of a model on the test data."""
    return float(np.mean(keras.losses.binary_crossentropy(W[:, None], model(V, training=False))))


# --- one owner -----------------------------------------------------------------------------------------------------

class Measures(Callback):
    """Keeps the weights that each evaluation measures, and those that training continues from at its end."""

    where = "all"

    def __init__(self, model):
        self.model, self.measured = model, []

    def epoch_end(self, run):
        from hvdtrain.engine.average import averaged

        with averaged(run.average):
            self.measured.append(self.model.get_weights())

    def fit_end(self, run):
        self.training = self.model.get_weights()


def loaded(path):
    return keras.saving.load_model(path, compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("ema, restores", [(0.5, False), (0.0, True), (0.5, True)])
def test_files_memory_and_metrics_are_of_the_same_weights(ema, restores):
    """Files of the best epoch and of every second step, the final file, the model in memory and all records."""
    model = made()
    measures = Measures(model)
    files = [keras.callbacks.ModelCheckpoint("best.keras", "loss", mode="max", save_best_only=True),
             keras.callbacks.ModelCheckpoint("step-{epoch}-{batch}.keras", save_freq=2)]
    trainer, result = trained(model, measures, *files, *([best(patience=9)] if restores else []), ema=ema)
    final = 0 if restores else 2
    for one in (model, loaded("run/model/model.keras")):
        for got, want in zip(one.get_weights(), measures.measured[final], strict=True):
            np.testing.assert_array_equal(got, want)
        assert evaluated(one) == pytest.approx(result.metrics["loss"], rel=1e-5)
    assert result.metrics["loss"] == pytest.approx(result.history["val_loss"][final], rel=1e-6)
    record = json.loads(open("run/completed.json").read())
    assert record["metrics"]["loss"] == result.metrics["loss"]
    assert record["metrics_at"] == result.metrics_at == STEPS * (final + 1)
    assert any("of step 3" in note for note in record["notes"]) is restores
    assert evaluated(loaded("best.keras")) == pytest.approx(result.history["val_loss"][0], rel=1e-5)
    for got, want in zip(loaded("step-2-3.keras").get_weights(), measures.measured[1], strict=True):
        np.testing.assert_array_equal(got, want)  # step 6 is an epoch's last: what is written is what is measured
    assert trainer.evaluate()["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6)
    trainer.save()  # the weights of training, which a resumed run continues from
    again = made()
    other = Trainer(replace(trainer.config, out="again", resume="run", epochs=3))
    other.evaluate(model=again, data=((X, Y), (V, W))[1])
    for got, want in zip(again.get_weights(), measures.training, strict=True):
        np.testing.assert_array_equal(got, want)


class Saves(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.save("by_batch.keras")

    def on_epoch_end(self, epoch, logs=None):
        self.model.save("by_epoch.keras")


def test_files_of_any_callback_hold_the_types_of_the_user(tmp_path):
    trained(made(), Saves(), keras.callbacks.ModelCheckpoint("each.keras", save_freq=1), epochs=1, precision="bf16")
    for name in ("by_batch", "by_epoch", "each"):
        policies = {layer.dtype_policy.name for layer in loaded(f"{name}.keras").layers}
        assert policies == {"float32"}, name


class AssignsRate(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.1)


class ChangesWeights(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([w * 0.9 for w in self.model.get_weights()])


class SetsRate(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1


PLATEAU, WARM = keras.callbacks.ReduceLROnPlateau, ScheduleConfig(warmup_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("callback, changes, words", [
    (lambda: PLATEAU("loss"), {"schedule": WARM}, "ReduceLROnPlateau sets the learning rate together with "
                                                  "schedule.warmup_"),
    (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
     {"schedule": ScheduleConfig("CosineDecay", {"decay_steps": 9})},
     "LearningRateScheduler sets .* schedule.name Cosine"),
    (SetsRate, {"schedule": WARM}, "SetsRate sets the learning rate together with a schedule"),
    (AssignsRate, {"schedule": WARM}, "AssignsRate sets the learning rate together with a schedule"),
    (ChangesWeights, {"ema": 0.5}, "changed the weights at the end of an epoch, where with ema"),
    (lambda: keras.callbacks.BackupAndRestore("backup"), {"ema": 0.5}, "BackupAndRestore with ema"),
])
def test_two_owners_are_refused(callback, changes, words):
    with pytest.raises(UserError, match=words):
        trained(made(), callback(), **changes)


class Freezes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = not epoch


@pytest.mark.slow
@pytest.mark.parametrize("restores", [False, True], ids=["average", "best"])
def test_with_use_ema_file_memory_and_metrics_are_of_the_same_weights(restores):
    """Also where a callback has frozen a layer meanwhile."""
    model = made()
    model.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), BCE, run_eagerly=True)
    trainer, result = trained(model, *([best(patience=9)] if restores else [Freezes()]))
    for one in (model, loaded("run/model/model.keras")):
        assert evaluated(one) == pytest.approx(result.metrics["loss"], rel=1e-5)
    assert (result.metrics["loss"] == pytest.approx(result.history["val_loss"][0], rel=1e-6)) is restores
    assert result.metrics["loss"] != pytest.approx(result.history["val_loss"][-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("use_ema", [False, True])
def test_a_run_that_stops_early_ends_with_its_best_weights(tmp_path, use_ema):
    best_weights.check(KerasKit().model(noisy=True), tmp_path, use_ema)


def test_weights_that_a_callback_sets_at_the_end_are_measured():
    class Ends(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([w * 0.5 for w in self.model.get_weights()])

    model = made()
    trainer, result = trained(model, Ends())
    assert result.metrics["loss"] == pytest.approx(evaluated(model), rel=1e-5) != result.history["val_loss"][-1]
    assert any("a Keras callback has set in on_train_end" in note for note in trainer.run.notes)
