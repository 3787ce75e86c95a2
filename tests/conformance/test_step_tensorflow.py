"""The TensorFlow step: the cases of every backend, its graphs, losses and metrics, and its state."""

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from keras_kit import KerasKit  # noqa: E402
from one_step import TwoRanksInOne  # noqa: E402
from step_cases import *  # noqa: E402,F401,F403
from step_cases import goes_on  # noqa: E402
from tensorflow_tools import SGD, X, Y, attached, batch, close, cut, mlp, run, weights  # noqa: E402

from hvdtrain.backends.tensorflow import placement  # noqa: E402
from hvdtrain.config import Config, Named, ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402


@pytest.fixture(name="kit")
def keras_kit():
    return KerasKit()


def test_one_trace_per_kind():
    traced = []

    def task(model, b):
        traced.append(1)
        return tf.reduce_sum(tf.square(model(b[0]))), tf.shape(b[0])[0]

    step = attached(mlp(), task=task)
    for t in range(3):
        run(step, [batch(t)], 1 / 32)
    assert len(traced) == 1
    for t in range(3):
        run(step, cut(batch(t), 8, 8, 8, 8), 1 / 32, check=True)
    assert len(traced) == 4  # the first, those in between, the last of several


# --- loss, metrics -------------------------------------------------------------------------------------------------

def test_sample_weights_and_regularisers_count_once():
    model = mlp(kernel_regularizer=keras.regularizers.L2(0.1))
    kernel = model.layers[-1].kernel
    step = attached(model, replace(SGD, optimizer=Named("sgd"), lr=1.0))
    penalty = 0.1 * float(np.sum(np.square(kernel.numpy())))
    w = np.linspace(0, 2, 32).astype(np.float32)
    x, y = batch(0)
    logits = tf.constant(model(x).numpy())
    per_sample = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True).numpy()
    step.zero()
    loss, weight = step.forward_backward((x, y, w), 1 / 32, True)
    assert float(weight) == 32
    assert float(loss) == pytest.approx(float((per_sample * w).sum()) + 32 * penalty, rel=1e-5)


@pytest.mark.parametrize("name, args", [("auto", {}), ("mse", {}), ("Huber", {"delta": 0.5}), ("huber", {"delta": 0.5}),
                                        ("mean_absolute_error", {})])
def test_losses_by_name(name, args):
    model, y = mlp(), X[:, :5]
    step = attached(model, replace(SGD, loss=Named(name, args)))
    step.zero()
    loss, weight = step.forward_backward((X, y), 1.0, True)
    gap = np.abs(model(X).numpy() - y)
    want = {"auto": gap**2, "mse": gap**2, "mean_absolute_error": gap,
            "huber": np.where(gap < 0.5, gap**2 / 2, 0.5 * gap - 0.125)}[name.lower()].mean(1).sum()
    assert (float(loss), float(weight)) == (pytest.approx(float(want), rel=1e-5), 64)


def test_losses_that_cannot_be():
    for named, said in ((Named("hubr"), "did you mean 'Huber'"), (Named("huber", {"detla": 1}), "detla"),
                        (Named("ce"), "full name")):
        with pytest.raises(UserError, match=said):
            attached(mlp(), replace(SGD, loss=named))
    one = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
    with pytest.raises(UserError, match="BinaryCrossentropy"):
        attached(one).forward_backward((X, Y), 1.0, True)
    with pytest.raises(UserError, match="4 arrays"):
        attached(mlp()).forward_backward((X, Y, Y, Y), 1.0, True)


def test_a_compiled_model_keeps_its_loss_optimizer_and_metrics():
    def compiled():
        model = mlp()
        model.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")])
        return model

    step, plain = attached(compiled(), Config(metrics=[])), compiled()
    assert step.describe()["optimizer"] == "RMSprop, lr 0.001 (as compiled)"
    for t in range(3):
        run(step, [batch(t)], 1 / 32)
        plain.train_on_batch(*batch(t))
    close(weights(step), weights(plain), 1e-5)
    step.evaluate((X, Y))
    got, want = step.eval_results(step.eval_totals()), plain.evaluate(X, Y, verbose=0, return_dict=True)
    assert list(got) == ["loss", "accuracy", "top2"]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("y, last, names", [
    (np.eye(5, dtype=np.float32)[Y], {"activation": "softmax"}, ["accuracy", "AUC", "F1Score", "mse", "kl_divergence"]),
    (X[:, :5], {}, ["RootMeanSquaredError", "r2_score", "mean_absolute_error"])],
    ids=["onehot", "regression"])
def test_metrics_are_exact_over_uneven_shards(y, last, names):
    config = replace(SGD, metrics=names)
    ranks = [attached(mlp(**last), config, rank=r) for r in range(3)]
    for rank, pieces in enumerate(([slice(0, 3), slice(3, 50)], [slice(50, 64)], [])):
        for piece in pieces:
            ranks[rank].evaluate((X[piece], y[piece]))
    everyone = [step.eval_totals() for step in ranks]
    assert everyone[2] == {} and list(everyone[0])[0] == "loss"
    summed = {name: everyone[0][name] + everyone[1][name] for name in everyone[0]}
    whole = attached(mlp(**last), config)
    whole.evaluate((X, y))
    want = whole.eval_results(whole.eval_totals())
    assert set(want) == {"loss", *names}
    assert ranks[0].eval_results(summed) == pytest.approx(want, rel=1e-5)
    assert ranks[1].eval_totals() == {}
    assert ranks[2].eval_results(summed) == ranks[0].eval_results(summed)


def test_metrics_that_cannot_be():
    for name, said in (("PearsonCorrelation", "sum over samples"), ("acuracy", "did you mean 'accuracy'"),
                       ("MeanIoU", "without required")):
        with pytest.raises(UserError, match=said):
            attached(mlp(), replace(SGD, metrics=[name])).evaluate((X, Y))


def test_a_task_reaches_layers_with_training_and_brings_its_metrics():
    """Also where the task does not hand `training` on."""
    def task(model, b):
        return tf.reduce_sum(model(b[0])), tf.shape(b[0])[0]

    def task_told(model, b, training):
        return tf.reduce_sum(model(b[0], training=training)), tf.shape(b[0])[0]

    for one in (task, task_told):
        model = mlp(extra=[keras.layers.BatchNormalization()])
        step = attached(model, task=one, metrics=lambda m, b: {"rows": (tf.shape(b[0])[0], 1)})
        before = model.layers[1].moving_mean.numpy()
        step.evaluate((X, Y))
        np.testing.assert_array_equal(model.layers[1].moving_mean.numpy(), before)
        run(step, [(X, Y)], 1 / 64)
        assert not np.array_equal(model.layers[1].moving_mean.numpy(), before)
        totals = step.eval_totals()
        np.testing.assert_array_equal(totals["rows"], [64, 1])
        assert step.eval_results(totals)["loss"] == pytest.approx(totals["loss"][0] / 64)
        assert "BatchNorm" in step.caveats()[0]


# --- optimizer, schedule -------------------------------------------------------------------------------------------

def test_optimizers_that_cannot_be():
    compiled = mlp()
    compiled.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    for model, config, said in (
            (mlp(), Config(optimizer=Named("adm")), "did you mean 'Adam'"),
            (mlp(), Config(optimizer=Named("sgd", {"momentun": 1})), "momentun"),
            (mlp(), Config(schedule=ScheduleConfig("cosinedecay")), "decay_steps"),
            (mlp(), Config(schedule=ScheduleConfig("cosine")), "CosineDecay"),
            (compiled, Config(), "accumulate")):
        with pytest.raises(UserError, match=said):
            attached(model, config)


# --- state ---------------------------------------------------------------------------------------------------------

def test_layers_that_keras_numbered_otherwise_go_on_to_the_bit():
    goes_on(*(attached(mlp(seed, extra=[keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]))
              for seed in (1, 2)))


def test_ranks_draw_their_own_dropout():
    def state_of(rank):
        own = attached(mlp(extra=[keras.layers.Dropout(0.5)]), rank=rank).rank_state()
        return next(a for name, a in own.items() if name.startswith("seed."))
    assert not np.array_equal(state_of(0), state_of(1))
    np.testing.assert_array_equal(state_of(1), state_of(1))
    assert "dropout" in attached(mlp(extra=[keras.layers.Dropout(0.5)])).caveats()[0]
    assert attached(mlp()).caveats() == []


def test_frozen_weights_stay_and_are_no_statistics():
    model = mlp(extra=[keras.layers.BatchNormalization()])
    model.layers[0].trainable = False
    frozen = model.layers[0].kernel.numpy()
    step = attached(model, wire=TwoRanksInOne())
    run(step, [batch(0)], 1 / 32)
    step.sync_buffers()
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), frozen)
    assert len(step.params()) == 4


class Opaque(keras.Model):
    """A model that Keras cannot describe: its constructor wants a function."""

    def __init__(self, make):
        super().__init__()
        self.inner = make()
        self.built = True

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("build, native", [(mlp, "model.keras"), (lambda: Opaque(mlp), "model.weights.h5")],
                         ids=["keras", "weights"])
def test_export(tmp_path, build, native):
    from safetensors.numpy import load_file

    step = attached(build(), example=lambda B: (X[:B], Y[:B]))
    assert step.export(tmp_path) == ["model.safetensors", native]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["model.safetensors", native])
    saved = load_file(tmp_path / "model.safetensors")
    close([saved[v.path] for v in step.model.weights], weights(step), 0)
    if native == "model.keras":
        close(weights(keras.models.load_model(tmp_path / native)), weights(step), 0)
    else:
        other = build()
        other.load_weights(tmp_path / native)
        close(weights(other), weights(step), 0)


def test_a_model_without_variables_is_built_from_its_example_or_refused():
    def lazy():
        return keras.Sequential([keras.layers.Dense(5)])
    assert len(attached(lazy(), example=lambda B: (X[:B], Y[:B])).params()) == 2
    with pytest.raises(UserError, match="keras.Input"):
        attached(lazy())


def test_the_keras_backend_is_asked(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match="KERAS_BACKEND"):
        placement.setup(1, False)
    with pytest.raises(UserError, match="KERAS_BACKEND"):
        attached(mlp())


def test_threads_are_set_before_tensorflow_starts_only():
    tf.zeros([1])
    assert placement.setup(0, False) is True
    assert placement.setup(tf.config.threading.get_intra_op_parallelism_threads() + 1, False) is False


def test_ranks_draw_their_own_numbers():
    def draw(rank):
        placement.seed(7, rank)
        return float(tf.random.uniform([]))
    assert draw(0) == draw(0) != draw(1)
