"""`model.compile` in training: loss and gradient in shares equal Keras' own of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from small_runs import config, fitted, lockstep, solo, weights  # noqa: E402

from hvdtrain.backends.keras import compiled  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.data import layout  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402

DRAW = np.random.default_rng(5)
N = 11
X = DRAW.standard_normal((N, 6)).astype(np.float32)
Z = DRAW.standard_normal((N, 3)).astype(np.float32)
CLASSES = DRAW.integers(0, 4, N)
ONE_HOT = np.eye(4, dtype=np.float32)[CLASSES]
NUMBERS = DRAW.standard_normal((N, 1)).astype(np.float32)
WEIGHTS = DRAW.uniform(0.1, 3, N).astype(np.float32)
OTHER_WEIGHTS = DRAW.uniform(0.1, 3, N).astype(np.float32)
SEQUENCE = DRAW.standard_normal((N, 5, 6)).astype(np.float32)
TAGS = DRAW.integers(0, 4, (N, 5))
losses, layers = keras.losses, keras.layers


@pytest.fixture(autouse=True)
def plain_seed():
    keras.utils.set_random_seed(3)


def one(*extra, inputs=6, **last):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(7, activation="tanh"), *extra,
                             layers.Dense(4, **last)])


def two(outputs=list):
    """Two inputs a and b; outputs "kind" (4 classes) and "size" (one number) as a list or a dict."""
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    hidden = layers.Dense(7, activation="tanh")(layers.Concatenate()([a, b]))
    kind, size = layers.Dense(4, name="kind", activation="softmax")(hidden), layers.Dense(1, name="size")(hidden)
    out = [kind, size] if outputs is list else {"kind": kind, "size": size}
    return keras.Model({"a": a, "b": b}, out)


def token_model():
    return keras.Sequential([keras.Input((5, 6)), layers.Dense(7, activation="tanh"), layers.Dense(4)])


def keras_own(model, x, y, weight):
    """Loss and gradients of `model.compute_loss` on the whole batch."""
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True), sample_weight=weight)
    return float(loss), gradients(tape, loss, model)


def gradients(tape, loss, model):
    values = [v.value for v in model.trainable_weights]
    found = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g).numpy() for g in found]


def in_parts(model, x, y, weight, cuts=(0, 1, 5, 5, 11), class_weight=None):
    """Return the same as sums over parts of the batch, divided once by the sum of the weights."""
    setup = compiled.setup_of(model)
    parts = (x, y) if weight is None else (x, y, weight)
    columns = layout.Columns(parts)
    setup.data, setup.class_weight = columns, class_weight
    arrays, task = columns.fetch(np.arange(N)), compiled.CompiledTask(model)
    total = count = 0.0
    grads = None
    for start, stop in zip(cuts, cuts[1:]):
        if start == stop:
            continue
        batch = tuple(tf.convert_to_tensor(a[start:stop]) for a in arrays)
        with tf.GradientTape() as tape:
            loss, w = task(model, batch, True)
        part = gradients(tape, loss, model)
        grads = part if grads is None else [a + b for a, b in zip(grads, part)]
        total, count = total + float(loss), count + float(w)
    whole = compiled.batch_weight(model)
    assert count == pytest.approx(N if whole is None else whole(arrays), rel=1e-6)
    return total / count, [g / count for g in grads]


def assert_same(got, want):
    assert got[0] == pytest.approx(want[0], rel=2e-6)
    for a, b in zip(got[1], want[1]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def scaled_square(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1) * 3.0


class OwnLoss(losses.Loss):
    """A user's subclass."""

    def call(self, y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)


SINGLE = {
    "name": (dict(activation="softmax"), "sparse_categorical_crossentropy", CLASSES),
    "short name": ({}, "mse", ONE_HOT),
    "crossentropy": (dict(activation="softmax"), "crossentropy", CLASSES),
    "object": ({}, losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES[:, None]),
    "smoothed": ({}, losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT),
    "huber mean": ({}, losses.Huber(reduction="mean"), ONE_HOT),
    "function": ({}, scaled_square, ONE_HOT),
    "own class": ({}, OwnLoss(), ONE_HOT),
    "weighted mean": ({}, losses.MeanSquaredError(reduction="mean_with_sample_weight"), ONE_HOT),
    "ignored class": ({}, losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2), CLASSES),
    "ignored, weighted mean": ({}, losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=2, reduction="mean_with_sample_weight"), CLASSES),
    "regularised": (dict(kernel_regularizer="l2", activity_regularizer="l1"), "mae", ONE_HOT),
}


@pytest.mark.parametrize("weight", [None, WEIGHTS, WEIGHTS[:, None]], ids=["plain", "weighted", "column"])
@pytest.mark.parametrize("case", SINGLE)
def test_one_output(case, weight):
    last, loss, y = SINGLE[case]
    model = one(**last)
    model.compile("sgd", loss=loss)
    assert_same(in_parts(model, X, y, weight), keras_own(model, X, y, weight))


@pytest.mark.parametrize("class_weight", [{0: 2.0, 3: 0.25}, {0: 0.0, 1: 1.0, 2: 5.0, 3: 1.5}])
@pytest.mark.parametrize("y, loss", [(CLASSES, "sparse_categorical_crossentropy"),
                                     (CLASSES[:, None], "sparse_categorical_crossentropy"),
                                     (ONE_HOT, losses.CategoricalCrossentropy(reduction="mean_with_sample_weight"))])
def test_class_weights(y, loss, class_weight):
    model = one(activation="softmax")
    model.compile("sgd", loss=loss)
    factor = np.array([class_weight.get(c, 1.0) for c in CLASSES], np.float32)
    assert_same(in_parts(model, X, y, None, class_weight=class_weight), keras_own(model, X, y, factor))
    assert_same(in_parts(model, X, y, WEIGHTS, class_weight=class_weight), keras_own(model, X, y, factor * WEIGHTS))


@pytest.mark.parametrize("weight", [None, "token"])
@pytest.mark.parametrize("settings", [{}, {"reduction": "mean_with_sample_weight"}, {"ignore_class": 1}], ids=str)
def test_one_value_per_token(settings, weight):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, **settings)
    given = None if weight is None else DRAW.uniform(0, 2, (N, 5)).astype(np.float32)
    model = token_model()
    model.compile("sgd", loss=loss)
    assert_same(in_parts(model, SEQUENCE, TAGS, given), keras_own(model, SEQUENCE, TAGS, given))


@pytest.mark.parametrize("settings", [{}, {"ignore_class": 1},
                                      {"ignore_class": 1, "reduction": "mean_with_sample_weight"}], ids=str)
def test_one_weight_per_sample_weighs_all_its_tokens(settings):
    model = token_model()
    model.compile("sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True, **settings))
    spread = np.repeat(WEIGHTS[:, None], 5, axis=1)
    assert_same(in_parts(model, SEQUENCE, TAGS, WEIGHTS), keras_own(model, SEQUENCE, TAGS, spread))


TWO = {
    "list": (list, ["sparse_categorical_crossentropy", "mse"], None, [CLASSES, NUMBERS]),
    "list weighted": (list, ["sparse_categorical_crossentropy", "mse"], [0.3, 2.0], (CLASSES, NUMBERS)),
    "dict of losses": (list, {"size": "mse", "kind": "sparse_categorical_crossentropy"}, {"kind": 0.5, "size": 3.0},
                       [CLASSES, NUMBERS]),
    "dict of targets": (list, ["sparse_categorical_crossentropy", "mae"], None, {"size": NUMBERS, "kind": CLASSES}),
    "all dicts": (dict, {"size": losses.Huber(), "kind": "sparse_categorical_crossentropy"},
                  {"kind": 0.5, "size": 3.0}, {"kind": CLASSES, "size": NUMBERS}),
    "one left out": (list, [None, "mse"], None, [CLASSES, NUMBERS]),
}


@pytest.mark.parametrize("weight", ["none", "shared", "per output"])
@pytest.mark.parametrize("case", TWO)
def test_two_outputs_and_two_inputs(case, weight):
    outputs, loss, factors, y = TWO[case]
    model = two(outputs)
    model.compile("sgd", loss=loss, loss_weights=factors)
    x = {"a": X, "b": Z}
    given = {"none": None, "shared": WEIGHTS, "per output": [WEIGHTS, OTHER_WEIGHTS]}[weight]
    mine = given
    if weight == "per output" and isinstance(y, dict):
        mine = {"kind": WEIGHTS, "size": OTHER_WEIGHTS}
        given = mine if outputs is dict else given
    assert_same(in_parts(model, x, y, mine), keras_own(model, x, y, given))


def test_each_outputs_loss_is_measured_as_keras_does():
    model = two(dict)
    y = {"kind": CLASSES, "size": NUMBERS}
    model.compile("sgd", loss={"kind": "sparse_categorical_crossentropy", "size": "mse"}, loss_weights=None)
    whole = model.evaluate({"a": X, "b": Z}, y, batch_size=N, verbose=0, return_dict=True)
    in_parts(model, {"a": X, "b": Z}, y, None)
    task = compiled.CompiledTask(model)
    batch = tuple(tf.convert_to_tensor(a) for a in compiled.setup_of(model).data.fetch(np.arange(N)))
    pairs = task.pairs(model, model({"a": X, "b": Z}), batch)
    assert {name: pytest.approx(float(a) / float(w), rel=1e-5) for name, (a, w) in pairs.items()} == whole


@pytest.mark.parametrize("make, words", [
    (lambda m: m.compile("sgd", loss=losses.MeanSquaredError(reduction="sum")), "reduction 'sum'"),
    (lambda m: m.compile("sgd", loss=losses.MeanSquaredError(reduction=None)), "reduction None"),
])
def test_what_is_no_mean_over_samples_is_refused(make, words):
    model = one()
    make(model)
    with pytest.raises(UserError, match=words):
        in_parts(model, X, ONE_HOT, None)


def test_losses_over_different_weights_are_refused():
    model = two()
    model.compile("sgd", loss=[losses.SparseCategoricalCrossentropy(ignore_class=1), "mse"])
    with pytest.raises(UserError, match="means over different weights: samples, valid elements"):
        in_parts(model, {"a": X, "b": Z}, [CLASSES, NUMBERS], None)


def test_a_mask_of_the_model_is_refused():
    model = keras.Sequential([keras.Input((5, 6)), layers.Masking(), layers.Dense(4)])
    model.compile("sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UserError, match="carries a mask"):
        in_parts(model, SEQUENCE, TAGS, None)


def test_a_model_with_a_train_step_of_its_own_is_told_the_way():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(UserError, match="plain model.fit with .import hvdtrain.keras as hvd"):
        compiled.CompiledTask(Own())


# --- ranks ---------------------------------------------------------------------------------------------------------

def two_compiled():
    model = two(dict)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9),
                  loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
                  loss_weights={"kind": 0.5, "size": 2.0},
                  metrics={"kind": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")]},
                  weighted_metrics={"size": [keras.metrics.MeanAbsoluteError(), "mse"]})
    return model


@pytest.mark.parametrize("shares", [[3, 0, 1]], ids=str)
def test_ranks_train_and_evaluate_as_one_keras_process(shares):
    """Two outputs, dict inputs, sample weights per output, unequal shares, a short last batch."""
    n = 22
    data = {"x": {"a": np.tile(X, (2, 1)), "b": np.tile(Z, (2, 1))},
            "y": {"kind": np.tile(CLASSES, 2), "size": np.tile(NUMBERS, (2, 1))},
            "sample_weight": {"kind": np.tile(WEIGHTS, 2), "size": np.tile(OTHER_WEIGHTS, 2)}}
    models = []
    for _ in shares:
        keras.utils.set_random_seed(3)
        models.append(two_compiled())
    keras.utils.set_random_seed(3)
    single = two_compiled()
    settings = config(epochs=3, optimizer=Named("auto"), metrics=[], global_batch=8, shares=shares, eval_every=1)
    settings = replace(settings, data=replace(settings.data, shuffle=False))
    columns = layout.named(data)

    def work(run):
        compiled.setup_of(run.spec.model).data = columns
        fitted(run)
        loop.evaluate(run)
        return weights(run), run.state.metrics

    results = lockstep(len(shares), settings, models.__getitem__, (columns, columns), work)
    single.fit(data["x"], data["y"], sample_weight=data["sample_weight"], batch_size=8, epochs=3, shuffle=False,
               verbose=0)
    for got, want in zip(results[0][0], sorted_weights(single)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    whole = single.evaluate(data["x"], data["y"], sample_weight=data["sample_weight"], batch_size=n, verbose=0,
                            return_dict=True)
    for _, metrics in results:
        assert metrics == {k: pytest.approx(v, rel=1e-4) for k, v in whole.items()}


def sorted_weights(model):
    from hvdtrain.backends.tensorflow import state

    return [array for _, array in sorted(state.arrays(state.named(model.weights)).items())]


def test_keys_that_a_compiled_optimizer_overrules_are_named():
    def said(settings):
        return [note for note in solo(settings, one_compiled(), (X, CLASSES)).notes if "has no effect" in note]

    def one_compiled():
        model = one()
        model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    overruled = config(optimizer=Named(args={"amsgrad": True}))
    assert said(overruled) == [f"{key} has no effect: the model keeps the optimizer that it was compiled with"
                               for key in ("lr", "optimizer.args")]
    assert said(config(optimizer=Named("SGD"))) == []
