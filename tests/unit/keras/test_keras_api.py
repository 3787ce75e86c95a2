"""Horovod's Keras API in one process: its names and arguments, serialisation, callbacks, what is refused."""

import inspect
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

X, Y = np.random.default_rng(0).normal(size=(2, 24, 4)).astype("float32")


@pytest.fixture(autouse=True)
def started():
    hvd.init()


def mlp(*extra):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5, activation="tanh"), *extra,
                             keras.layers.Dense(4)])


def trained(optimizer, epochs=1, model=None, callbacks=None, **more):
    model = model or mlp()
    model.compile(optimizer, keras.losses.MeanSquaredError(), **more)
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def same(model, other, within=0.0):
    for a, b in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_allclose(a, b, rtol=within, atol=within)


# --- names and arguments ---------------------------------------------------------------------------------------------

OWN = {"DistributedOptimizer": ["check_every"], "BestModelCheckpoint": ["filepath"],
       "PartialDistributedOptimizer": ["backward_passes_per_step", "average_aggregated_gradients", "check_every"],
       "MetricAverageCallback": ["process_set"], "load_model": ["distributed"]}


def arguments(function, own=()):
    return [(p.name, repr(p.default)) for p in inspect.signature(function).parameters.values()
            if p.name not in own and not callable(p.default) and p.name not in ("compression", "process_set")]


@pytest.mark.parametrize("name", ["DistributedOptimizer", "PartialDistributedOptimizer", "allreduce", "allgather",
                                  "broadcast", "reducescatter", "load_model", "broadcast_global_variables"])
def test_arguments_are_those_of_horovod(name):
    theirs = pytest.importorskip("horovod.tensorflow.keras", reason="Horovod is not built here")
    if name == "PartialDistributedOptimizer":
        theirs = pytest.importorskip("horovod.keras", reason="Horovod is not built here")
    ours, own = getattr(hvd, name), OWN.get(name, [])
    assert arguments(ours, own) == arguments(getattr(theirs, name))
    order = [p for p in inspect.signature(ours).parameters if p not in own]
    assert order == list(inspect.signature(getattr(theirs, name)).parameters)


@pytest.mark.parametrize("name", ["BroadcastGlobalVariablesCallback", "MetricAverageCallback", "BestModelCheckpoint",
                                  "LearningRateScheduleCallback", "LearningRateWarmupCallback"])
def test_callbacks_take_what_horovods_take(name):
    theirs = pytest.importorskip("horovod.tensorflow.keras.callbacks", reason="Horovod is not built here")
    ours = getattr(hvd.callbacks, name)
    assert arguments(ours, OWN.get(name, [])) == arguments(getattr(theirs, name))
    assert issubclass(ours, keras.callbacks.Callback)


def test_every_public_name_of_horovod_is_there():
    theirs = pytest.importorskip("horovod.tensorflow.keras", reason="Horovod is not built here")
    modules = {"inspect", "warnings", "version", "tf", "keras", "K", "is_version_greater_equal_than"}
    names = {n for n in dir(theirs) if not n.startswith("_")} - modules
    assert not {n for n in names if n not in dir(hvd)}
    assert all(getattr(hvd, n) is not None for n in names - {"elastic"})


def test_the_package_imports_no_framework():
    code = "import sys, hvdtrain.keras; print([m for m in ('keras', 'tensorflow', 'horovod') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_what_is_left_out_says_why():
    with pytest.raises(UserError, match="CVE-2024-10190.*checkpoint"):
        hvd.elastic.run
    with pytest.raises(UserError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(AttributeError, match="DistributedOptimizer"):
        hvd.distributed_optimizer


@pytest.mark.parametrize("backend, words", [("torch", "Trainer"), ("jax", "KERAS_BACKEND=tensorflow, or torch")])
def test_other_backends_of_keras_are_told_where_to_go(monkeypatch, backend, words):
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(UserError, match=f"DistributedOptimizer with Keras on the {backend} backend.*{words}"):
        hvd.DistributedOptimizer


# --- one process -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [n for n in sorted(dir(keras.optimizers)) if inspect.isclass(getattr(
    keras.optimizers, n)) and issubclass(getattr(keras.optimizers, n), keras.optimizers.Optimizer) and n not in (
    "Optimizer", "LossScaleOptimizer", "MultiOptimizer")])
def test_every_optimizer_of_keras_is_copied_with_its_settings(name):
    plain = getattr(keras.optimizers, name)(learning_rate=0.02, weight_decay=0.1, clipnorm=0.5, use_ema=True)
    made = hvd.DistributedOptimizer(plain)
    assert isinstance(made, type(plain)) and made is not plain
    assert made.get_config() == plain.get_config()
    assert keras.saving.serialize_keras_object(made)["class_name"] == name


@pytest.mark.slow
def test_optimizers_of_several_optimizers():
    def several():
        inner = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        inner["dense_.*/bias"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(inner)
    same(trained(hvd.DistributedOptimizer(several())), trained(several()))
    chosen = keras.optimizers.MultiOptimizer(lambda variable, one=keras.optimizers.SGD(0.1): one)
    same(trained(hvd.DistributedOptimizer(chosen)), trained(keras.optimizers.SGD(0.1)))


@pytest.mark.slow
def test_one_process_trains_as_without():
    make = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1)  # noqa: E731
    same(trained(hvd.DistributedOptimizer(make())), trained(make()))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "clipnorm": 0.1}])
def test_sgd_has_the_bits_of_keras_own_also_by_sparse_gradients(settings):
    """A single kernel makes the update where Keras takes several operations."""
    def weights(distribute):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 8),
                                  keras.layers.Flatten(), keras.layers.Dense(5)])
        own = keras.optimizers.SGD(0.1, **settings)
        model.compile(distribute(own), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        draw = np.random.default_rng(0)
        model.fit(draw.integers(0, 20, (32, 6)), draw.integers(0, 5, 32), batch_size=16, verbose=0, shuffle=False)
        return model.get_weights()

    for got, want in zip(weights(hvd.DistributedOptimizer), weights(lambda own: own)):
        np.testing.assert_array_equal(got, want)


def test_passes_accumulate_in_one_process_too():
    made = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=3,
                                    average_aggregated_gradients=True)
    ours, other = trained(made), mlp()
    other.compile(keras.optimizers.Adam(0.01), "mse")
    other.fit(X, Y, batch_size=24, shuffle=False, verbose=0)
    assert int(made.iterations) == 1
    same(ours, other, 1e-6)


@pytest.mark.parametrize("around", ["plain", "loss scaled", "multi", "loss scaled multi"])
def test_a_schedule_is_as_long_as_under_horovod(around):
    """Horovod reads it at the pass that updates, of passes counted from 0, whether they update or not."""
    made = scale = keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [1.0, 0.5, 0.25]))
    if "multi" in around:
        scale = keras.optimizers.MultiOptimizer(lambda variable: made)
    if "scaled" in around:
        scale = keras.optimizers.LossScaleOptimizer(scale, initial_scale=1.0)
    optimizer, weight = hvd.DistributedOptimizer(scale, backward_passes_per_step=3), keras.Variable([0.0])
    optimizer.build([weight])
    rates = []
    for n in range(9):
        before = float(weight.numpy()[0])
        optimizer.apply([tf.constant([-1.0])], [weight])
        rates.append((float(weight.numpy()[0]) - before) / 3)
    assert rates == [0, 0, 1.0, 0, 0, 0.5, 0, 0, 0.25]  # made by passes 2, 5 and 8
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    assert int(inner.iterations) == 3
    if "multi" in around:
        assert type(keras.optimizers.deserialize(keras.optimizers.serialize(made))) is keras.optimizers.SGD
        return
    assert float(optimizer.learning_rate) == 0.25
    plain = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(plain) is type(scale) and type(getattr(plain, "inner_optimizer", plain)) is keras.optimizers.SGD


@pytest.mark.slow
def test_a_built_optimizer_hands_on_its_state_and_keeps_its_own():
    first = trained(keras.optimizers.Adam(0.01))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    made = hvd.DistributedOptimizer(first.optimizer)
    assert int(made.iterations) == 3 and made.variables[2] is not first.optimizer.variables[2]
    for a, b in zip(made.variables, first.optimizer.variables):
        np.testing.assert_array_equal(a, b)
    made.learning_rate = 0.5
    assert float(first.optimizer.learning_rate) == np.float32(0.01)
    same(trained(hvd.DistributedOptimizer(first.optimizer), model=first), trained(keras.optimizers.Adam(0.01), 2))
    assert hvd.DistributedOptimizer(keras.optimizers.SGD(rate))._learning_rate is rate
    excluding = keras.optimizers.AdamW(0.1)
    excluding.exclude_from_weight_decay(var_names=["bias"])
    assert not hvd.DistributedOptimizer(excluding)._use_weight_decay(first.layers[0].bias.value)


def test_the_class_makes_distributed_optimizers_anew():
    made = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), backward_passes_per_step=2)
    again = made.__class__.from_config(made.get_config())
    assert again.momentum == 0.5 and again._hvd_exchange.settings.passes == 2
    assert again._hvd_exchange is not made._hvd_exchange


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_saved_model_loads_without_hvdtrain_and_comes_back_distributed(tmp_path, ending):
    path = str(tmp_path / f"model.{ending}")
    model = trained(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam and int(plain.optimizer.iterations) == 3
    if ending == "keras":
        assert b"hvdtrain" not in zipfile.ZipFile(path).read("config.json")
    again = hvd.load_model(path)
    assert again.optimizer._hvd_exchange and type(again.optimizer) is not keras.optimizers.Adam
    again.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    same(again, trained(keras.optimizers.Adam(0.01), 2), 1e-6)


@keras.saving.register_keras_serializable(package="own")
class Own(keras.optimizers.SGD):
    """An optimizer of a user's own, registered."""


class Forgetful(keras.optimizers.SGD):
    """An optimizer whose config leaves out an argument."""

    def __init__(self, learning_rate=0.01, twist=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.twist = twist


def test_optimizers_of_ones_own(tmp_path):
    path = str(tmp_path / "model.keras")
    model = trained(hvd.DistributedOptimizer(Own(0.1)))
    assert json.loads(model.to_json())["class_name"] == "Sequential"
    model.save(path)
    assert type(keras.models.load_model(path).optimizer) is Own
    assert isinstance(hvd.load_model(path, custom_optimizers=[Own]).optimizer, Own)
    with pytest.raises(UserError, match="leaves out twist"):
        hvd.DistributedOptimizer(Forgetful(twist=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["outside", "inside"])
def test_loss_scales_wrap_and_are_wrapped(tmp_path, form):
    scaled, sgd, path = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(0.1), str(tmp_path / "m.keras")
    made = hvd.DistributedOptimizer(scaled(sgd)) if form == "outside" else scaled(hvd.DistributedOptimizer(sgd))
    model = trained(made)
    same(model, trained(keras.optimizers.SGD(0.1)), 1e-5)
    made.learning_rate = 0.05
    model.save(path)
    plain, ours = keras.models.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer) is scaled and type(plain.optimizer.inner_optimizer) is keras.optimizers.SGD
    assert isinstance(ours.optimizer, scaled) and int(ours.optimizer.iterations) == 3
    assert float(ours.optimizer.learning_rate) == np.float32(0.05)


@pytest.mark.parametrize("arguments, words", [
    (("no such",), "no such"), ((3,), "Keras 3"),
    ((keras.optimizers.SGD(), None, "", "", hvd.Compression.none, False, 1.0, 17), "hvd.Average, hvd.Sum"),
    ((keras.optimizers.SGD(), None, "", "", hvd.Compression.none, False, 1.0, 0, 0), "backward_passes_per_step=0"),
])
def test_mistakes_are_told(arguments, words):
    with pytest.raises((UserError, ValueError), match=words):
        hvd.DistributedOptimizer(*arguments)


def test_more_mistakes_are_told():
    with pytest.raises(UserError, match="already distributed"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer("sgd"))
    with pytest.raises(UserError, match="groups=-1"):
        hvd.DistributedOptimizer("sgd", groups=-1)
    with pytest.warns(DeprecationWarning, match="old name of groups"):
        hvd.DistributedOptimizer("sgd", num_groups=2)
    with pytest.raises(UserError, match="local_layers"):
        hvd.PartialDistributedOptimizer("sgd", local_layers=[3])
    with pytest.raises(UserError, match="legacy_opts"):
        hvd.load_model("nowhere.keras", legacy_opts=True)
    with pytest.raises(UserError, match="check_every=-1"):
        hvd.DistributedOptimizer("sgd", check_every=-1)


# --- callbacks -------------------------------------------------------------------------------------------------------

def test_momentum_correction_is_that_of_a_momentum_changed_for_one_step():
    model = mlp()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: [1.0, 0.25, 0.25][int(epoch)])
    history = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), 3, model,
                      [schedule]).history.history
    np.testing.assert_allclose(history["lr"], [0.1, 0.025, 0.025], rtol=1e-6)
    by_hand, velocity = mlp(), None
    for step in range(9):
        rate, momentum = (0.1, 0.9) if step < 3 else (0.025, 0.9 / 4 if step == 3 else 0.9)
        part = slice(8 * (step % 3), 8 * (step % 3) + 8)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(by_hand(X[part]) - Y[part]))
        grads = tape.gradient(loss, by_hand.trainable_weights)
        velocity = velocity or [0.0] * len(grads)
        velocity = [momentum * v - rate * g for v, g in zip(velocity, grads)]
        for weight, v in zip(by_hand.trainable_weights, velocity):
            weight.assign_add(v)
    same(model, by_hand, 1e-5)


def test_schedules_by_constant_by_batch_and_within_their_epochs():
    rates = []
    model = mlp()
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate)))
    decay = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=1, end_epoch=3)
    smooth = hvd.callbacks.LearningRateScheduleCallback(0.2, lambda e: e, start_epoch=3, staircase=False)
    trained(hvd.DistributedOptimizer("sgd"), 4, model, [decay, smooth, note])
    wanted = [0.01] * 3 + [0.2] * 3 + [0.1] * 3 + [0.2 * (3 + b / 3) for b in range(3)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    fixed = hvd.DistributedOptimizer(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    with pytest.raises(UserError, match="not both"):
        trained(fixed, callbacks=[decay])


def test_best_model_checkpoint_keeps_the_best(tmp_path):
    for weights_only, name in ((False, "best.keras"), (True, "best.weights.h5")):
        path = tmp_path / name
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=weights_only)
        assert best.save_best_only and best.filepath is None
        with pytest.raises(UserError, match="filepath"):
            trained("sgd", callbacks=[best])
        best.filepath = str(path)
        trained("sgd", callbacks=[best])
        assert path.exists()
