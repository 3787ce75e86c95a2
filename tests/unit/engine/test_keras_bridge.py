"""Keras callbacks in `Trainer.fit`: what they see and what becomes of what they do, against `keras.Model.fit`."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from small_runs import config  # noqa: E402

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.backends.keras.compiled import setup_of  # noqa: E402
from hvdtrain.config import CheckpointConfig, Config, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine.callbacks.base import Callback  # noqa: E402

DRAW = np.random.default_rng(1)
X, V = (DRAW.standard_normal((n, 4)).astype(np.float32) for n in (22, 9))
Y, W = (X.sum(1) > 0).astype(np.int64), (V.sum(1) > 0).astype(np.int64)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(rate=0.5):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"),
                              keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(rate), "binary_crossentropy",
                  metrics=["accuracy", keras.metrics.AUC(name="auc")], run_eagerly=True)  # Trainer's graphs are its own
    return model


def settings(epochs=3, **changes):
    base = config(epochs=epochs, optimizer=Named("auto"), metrics=[], global_batch=8, eval_every=1)
    return replace(base, data=replace(base.data, shuffle=False), **changes)


def ours(model, *callbacks, epochs=3, **changes):
    return Trainer(settings(epochs, **changes)).fit(model, ((X, Y), (V, W)), callbacks=callbacks)


def keras_own(model, *callbacks, epochs=3):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, validation_data=(V, W), verbose=0,
                     callbacks=list(callbacks))


class Diary(keras.callbacks.Callback):
    """Every call with its number and the names of its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def _note(self, name, *args, logs=None):
        self.calls.append((name, *args, sorted(logs or {})))


for _name in ("train_begin", "train_end", "test_begin", "test_end"):
    setattr(Diary, f"on_{_name}", lambda self, logs=None, _n=_name: self._note(_n, logs=logs))
for _name in ("epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end", "test_batch_begin",
              "test_batch_end"):
    setattr(Diary, f"on_{_name}", lambda self, at, logs=None, _n=_name: self._note(_n, at, logs=logs))


@pytest.mark.slow
def test_history_and_weights_are_those_of_model_fit():
    one, two = made(), made()
    history = keras_own(two).history
    result = ours(one, keras.callbacks.LambdaCallback())
    assert set(result.history) == set(history)
    for name, values in history.items():
        assert result.history[name] == [pytest.approx(v, rel=1e-4) for v in values], name
    assert one.history.history == result.history
    for a, b in zip(one.get_weights(), two.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert setup_of(one).follow is None


@pytest.mark.slow
def test_calls_come_in_keras_order_with_keras_names():
    mine, theirs = Diary(), Diary()
    ours(made(), mine, epochs=2)
    keras_own(made(), theirs, epochs=2)

    def plain(calls):
        return [call if "batch" not in call[0] else call[:2] for call in calls]

    assert plain(mine.calls) == plain(theirs.calls)
    assert ("train_batch_end", 0, ["loss"]) in mine.calls


@pytest.mark.slow
def test_early_stopping_restores_and_plateaus_lower_the_rate():
    def watching():
        return (keras.callbacks.EarlyStopping("val_auc", patience=2, restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10, min_lr=1e-3),
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9))
    one, two = made(3.0), made(3.0)
    history = keras_own(two, *watching(), epochs=12)
    result = ours(one, *watching(), epochs=12)
    assert len(history.history["loss"]) < 12 and result.stop == "a Keras callback set model.stop_training"
    for name, values in history.history.items():
        assert result.history[name] == [pytest.approx(v, rel=1e-4) for v in values], name
    for a, b in zip(one.get_weights(), two.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_stop_in_the_middle_of_an_epoch_closes_it():
    class Stops(Diary):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.model.stop_training = batch == 0

    diary = Stops()
    result = ours(made(), diary)
    assert result.steps == 2  # the agreement that stops comes with the next step
    assert [c[:2] for c in diary.calls if c[0].startswith("epoch")] == [("epoch_begin", 0), ("epoch_end", 0)]
    assert len(result.history["loss"]) == len(result.history["val_loss"]) == 1


def test_writers_write_what_keras_would(tmp_path):
    model, kept = made(), tmp_path / "best.keras"
    ours(model, keras.callbacks.ModelCheckpoint(kept, monitor="val_loss", save_best_only=True),
         keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert {"accuracy", "auc", "loss", "val_accuracy", "val_auc", "val_loss"} < set(rows[0])
    loaded = keras.models.load_model(kept)
    for a, b in zip(loaded.get_weights(), model.get_weights()):  # the last epoch was the best
        np.testing.assert_allclose(a, b)
    assert int(loaded.optimizer.iterations) == 9


@pytest.mark.slow
def test_a_backup_is_taken_up_where_it_ended(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    whole, parts = made(), made()
    ours(whole, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        ours(parts, backup(), Fails(), epochs=4)
    again = made()
    diary = Diary()
    result = ours(again, backup(), diary, epochs=4)
    assert [c[1] for c in diary.calls if c[0] == "epoch_begin"] == [2, 3] and result.steps == 12
    for a, b in zip(again.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_patience_used(tmp_path):
    def plateau():
        return keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=3, min_delta=10.0)

    kept = CheckpointConfig(at_end=True)
    whole, parts, again = made(), plateau(), plateau()
    want = ours(whole, plateau(), epochs=5).history["learning_rate"]
    ours(made(), parts, epochs=2, checkpoint=kept, out="part")
    assert parts.wait == 1
    result = ours(made(), again, epochs=5, resume="part")
    assert result.history["learning_rate"] == [pytest.approx(v) for v in want[2:]] and want[-1] < want[0]


def test_callbacks_of_both_kinds_and_the_optimizer_in_use():
    class Rate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(type(self.model.optimizer).__name__)
            self.model.optimizer.learning_rate = 0.25

    class Ends(Callback):
        def fit_end(self, run):
            seen.append(run.parts.optimizer.learning_rate())

    seen: list = []
    model = made()
    compiled_optimizer = model.optimizer
    ours(model, Rate(), Ends(), epochs=1, optimizer=Named("adam"))
    assert seen == ["Adam", 0.25] and model.optimizer is compiled_optimizer


def test_a_run_without_keras_callbacks_has_its_history():
    result = ours(made())
    assert set(result.history) == {"loss", "accuracy", "auc", "val_loss", "val_accuracy", "val_auc"}
    assert all(len(v) == 3 and all(map(math.isfinite, v)) for v in result.history.values())


def test_a_model_compiled_without_metrics_has_none():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    assert set(ours(model, epochs=1, metrics=Config().metrics).history) == {"loss", "val_loss"}


@pytest.mark.slow
def test_class_weight_is_model_fits():
    one, two = made(), made()
    Trainer(settings()).fit(one, (X, Y), class_weight={0: 3.0, 1: 0.5})
    two.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, class_weight={0: 3.0, 1: 0.5})
    for a, b in zip(one.get_weights(), two.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    Trainer(settings(1)).fit(one, (X, Y))
    assert setup_of(one).class_weight is None  # the next run begins without


@pytest.mark.parametrize("kwargs, words", [
    (dict(callbacks=[object()]), "callbacks hold a object"),
    (dict(class_weight=[1.0, 2.0]), "class_weight is"), (dict(class_weight={"a": 1.0}), "class_weight is"),
    (dict(class_weight={}), "class_weight is"),
])
def test_mistakes_are_told(kwargs, words):
    with pytest.raises(UserError, match=words):
        Trainer(settings(1)).fit(made(), (X, Y), **kwargs)


def test_a_second_fit_takes_no_other_callbacks():
    trainer = Trainer(settings(1))
    trainer.fit(made(), (X, Y))
    with pytest.raises(UserError, match="callbacks, class_weight, eval and collate in its first fit"):
        trainer.fit(callbacks=[keras.callbacks.History()])


def test_keras_callbacks_want_a_keras_model():
    from small_runs import make_model, samples

    with pytest.raises(UserError, match="Keras callbacks for a Model"):
        Trainer(config()).fit(make_model("numpy"), samples(8), callbacks=[keras.callbacks.History()])
    with pytest.raises(UserError, match="class_weight for a Model"):
        Trainer(config()).fit(make_model("numpy"), samples(8), class_weight={0: 1.0})


def test_a_distributed_optimizer_is_refused():
    from hvdtrain.keras import DistributedOptimizer

    model = made()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "binary_crossentropy", jit_compile=False)
    with pytest.raises(UserError, match="the optimizer is a DistributedOptimizer"):
        Trainer(settings(1)).fit(model, (X, Y))


def test_what_a_run_does_by_itself_is_left_out(capsys):
    class MetricAverageCallback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise AssertionError("asked")

    ours(made(), MetricAverageCallback(), epochs=1)
    assert "MetricAverageCallback is not used" in capsys.readouterr().out
