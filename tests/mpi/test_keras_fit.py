"""`Trainer.fit` and plain `model.fit` of a compiled Keras model over ranks with unequal shares, against one process."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from small_runs import config  # noqa: E402

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.config import CheckpointConfig, Named  # noqa: E402
from hvdtrain.keras.data import shard  # noqa: E402
from hvdtrain.keras.metrics import MetricAverageCallback  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

DRAW = np.random.default_rng(6)
N, BATCH = 29, 12  # the last global batch holds 5
X = {"a": DRAW.standard_normal((N, 5)).astype(np.float32), "b": DRAW.standard_normal((N, 2)).astype(np.float32)}
Y = {"kind": (X["a"].sum(1, keepdims=True) > 0).astype(np.int64), "size": X["b"][:, :1] * 2 + 1}
WEIGHTS = {"kind": DRAW.uniform(0.2, 3, N).astype(np.float32), "size": DRAW.uniform(0.2, 3, N).astype(np.float32)}


def made(optimizer=None):
    keras.utils.set_random_seed(7)
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(keras.layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"kind": keras.layers.Dense(1, activation="sigmoid", name="kind")(hidden),
                                           "size": keras.layers.Dense(1, name="size")(hidden)})
    model.compile(optimizer or keras.optimizers.SGD(0.2, momentum=0.9), {"kind": "binary_crossentropy", "size": "mse"},
                  loss_weights={"kind": 1.0, "size": 0.25},
                  metrics={"kind": ["accuracy", keras.metrics.AUC(name="auc")]},
                  weighted_metrics={"size": ["mae"]}, run_eagerly=optimizer is None)
    return model


def shares_of(size):
    """3 to 1, and a last rank of three or more with less than one sample of a short batch."""
    return [3.0, 1.0, 0.1, 2.0][:size]


def same(got, want, rel):
    assert set(got) == set(want)
    for name, values in want.items():
        assert got[name] == [pytest.approx(v, rel=rel) for v in values], name


@pytest.mark.world_size(3)
def test_trainer_fit_is_keras_fit(control, tmp_path, monkeypatch):
    """Weights and every log of two outputs with weights of their own; one rank's wish stops all."""
    class Wishes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and control.rank == control.size - 1:
                self.model.stop_training = True

    monkeypatch.chdir(tmp_path)
    settings = config(epochs=9, optimizer=Named("auto"), metrics=[], global_batch=BATCH, eval_every=1,
                      control_timeout_s=90.0, shares=shares_of(control.size))
    settings = replace(settings, data=replace(settings.data, shuffle=False))
    model, single = made(), made()
    watch = [keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
             keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)]
    result = Trainer(settings).fit(model, ((X, Y, WEIGHTS), (X, Y, WEIGHTS)), callbacks=[*watch, Wishes()])
    assert result.steps == 9 and "stop_training" in result.stop
    want = single.fit(X, Y, sample_weight=WEIGHTS, batch_size=BATCH, epochs=3, shuffle=False, verbose=0,
                      validation_data=(X, Y, WEIGHTS), validation_batch_size=N, callbacks=[
                          keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
                          keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)])
    same(result.history, want.history, 2e-4)
    for a, b in zip(model.get_weights(), single.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(set(control.gather(repr(result.history)))) == 1


def test_callbacks_resume_and_leave_what_was_measured_on_all_ranks(control, tmp_path, monkeypatch):
    """Files of rank 0 hold statistics of all ranks; metrics of an epoch count what all ranks saw before the resume."""
    if control.size > 2:
        pytest.skip("runs with 2 ranks, to keep the file short")
    monkeypatch.chdir(control.bcast(str(tmp_path)))
    monkeypatch.setattr("hvdtrain.engine.summary.show", lambda run: None)

    def fit(out, **changes):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization(),
                                  keras.layers.Dense(1, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.2), "binary_crossentropy", metrics=["accuracy"], run_eagerly=True)
        stop = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)  # epoch 0
        files = keras.callbacks.ModelCheckpoint(f"{out}-{{epoch}}-{{batch}}.keras", save_freq=3)
        rates = keras.callbacks.ReduceLROnPlateau("accuracy", patience=0, factor=0.5)
        base = config(epochs=3, optimizer=Named("auto"), metrics=[], global_batch=BATCH, eval_every=1, out=out,
                      checkpoint=CheckpointConfig(at_end=True), shares=[3.0, 1.0], ema=0.5, **changes)
        result = Trainer(base).fit(model, ((X["a"], Y["kind"]), (X["a"], Y["kind"])), callbacks=[stop, files, rates])
        return model, result

    whole, want = fit("whole")
    fit("parts", max_steps=4)
    parts, got = fit("parts", resume="auto")
    weights = [w.tobytes() for w in parts.get_weights()]
    assert weights == [w.tobytes() for w in whole.get_weights()] and len(set(control.gather(tuple(weights)))) == 1
    assert got.metrics == want.metrics and got.metrics_at == 3
    assert got.history["accuracy"] == want.history["accuracy"][1:]
    if control.rank == 0:
        first = keras.saving.load_model("whole-1-3.keras")  # what is written after an epoch's last step is measured
        assert [w.tobytes() for w in first.get_weights()] == weights


@pytest.mark.parametrize("weighted", [pytest.param("class", marks=pytest.mark.world_size(2)),
                                      pytest.param("sample", marks=pytest.mark.world_size(3))])
def test_plain_fit_over_shards_is_keras_fit(control, weighted):
    """Shuffled, with a short last batch, every log over all ranks; one output with class weights, two with samples'."""
    import hvdtrain.keras as hvd

    hvd.init()
    shares = shares_of(control.size)
    if weighted == "class":
        def build(optimizer=None):
            keras.utils.set_random_seed(8)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")])
            model.compile(optimizer or keras.optimizers.SGD(0.2), "binary_crossentropy", run_eagerly=optimizer is None,
                          weighted_metrics=["accuracy"])
            return model
        args, more = (X["a"], Y["kind"], WEIGHTS["kind"]), {"class_weight": {0: 0.25, 1: 2.0}}
    else:
        build, args, more = made, (X, Y, WEIGHTS), {}
    plain = keras.optimizers.SGD(0.2, momentum=0.0 if weighted == "class" else 0.9)
    model, single = build(hvd.DistributedOptimizer(plain)), build()
    data = [shard(*args, global_batch=BATCH, shares=shares, seed=3, **more),
            shard(*args, global_batch=BATCH, shares=shares, shuffle=False)]
    got = model.fit(data[0], validation_data=data[1], epochs=2, verbose=0, callbacks=[MetricAverageCallback()])
    whole = [shard(*args, global_batch=BATCH, shuffle=shuffle, seed=3, rank=0, size=1, **(more if shuffle else {}))
             for shuffle in (True, False)]
    want = single.fit(whole[0], validation_data=whole[1], epochs=2, verbose=0)
    for a, b in zip(model.get_weights(), single.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    same(got.history, want.history, 2e-4)
    assert len(set(control.gather(repr(got.history)))) == 1


@pytest.mark.world_size(2)
def test_the_guard_compares_at_the_end_of_a_fit_of_one_update(control):
    import hvdtrain.keras as hvd
    from hvdtrain.engine.weight_checks import Diverged

    class Spoils(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if spoils and hvd.rank() == 1:
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 1.5)

    hvd.init()
    for spoils, built in ((False, True), (False, False), (True, True), (True, False)):
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([*[keras.Input((5,))] * built, keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        with pytest.raises(Diverged, match="after update") if spoils else contextlib.nullcontext():
            model.fit(X["a"][:8], Y["size"][:8], batch_size=8, verbose=0,
                      callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Spoils()])
