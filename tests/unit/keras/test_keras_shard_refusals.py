"""Losses, masks, layers and train steps whose results hvdtrain.keras.shard cannot make those of one process."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from sharded_keras import WEIGHTS, N, X, Y, dense  # noqa: E402

from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.keras.data import shard  # noqa: E402

# --- what shard cannot put right -----------------------------------------------------------------------------------

def over_shard(model, y, *, y_weight=None, x=X["a"], shares=(1, 1), batch=7, loss="mse", fits=True):
    """Return a fit of rank 0 of two whose optimizer is distributed, for what is refused before the first exchange."""
    import hvdtrain.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    data = shard(x, y, y_weight, global_batch=batch, shares=shares, rank=0, size=len(shares))
    return model.fit(data, verbose=0, epochs=int(fits))


@pytest.mark.parametrize("loss, words", [
    (keras.losses.MeanSquaredError(reduction="sum"), "reduction 'sum'"),
    (keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), "reduction 'mean_with_sample_weight'"),
    (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), "ignore_class=0"),
])
def test_losses_that_are_no_mean_are_refused_without_any_callback(loss, words):
    with pytest.raises(UserError, match=words):
        over_shard(dense(), Y["size"], loss=loss)


def test_a_function_that_masks_its_values_is_refused():
    def loss(y, outputs):
        return keras.losses.sparse_categorical_crossentropy(y, outputs, ignore_class=0)
    with pytest.raises(UserError, match="values that a loss masks itself"):
        over_shard(dense(), Y["kind"], loss=loss)


@pytest.mark.parametrize("weight", [None, np.ones((N, 2), np.float32)], ids=["plain", "per token"])
def test_masks_are_refused_before_keras_fails(weight):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.Dense(1)])
    with pytest.raises(UserError, match="mask that reaches the loss"):
        over_shard(model, Y["kind"].repeat(2, 1), x=Y["kind"].repeat(2, 1), y_weight=weight)


def test_masks_that_end_before_the_loss_are_none():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.LSTM(2),
                              keras.layers.Dense(1)])
    assert over_shard(model, Y["size"], x=Y["kind"].repeat(2, 1)).history["loss"]


def test_losses_that_layers_add_want_parts_of_one_length():
    with pytest.raises(UserError, match="activity_regularizer"):
        over_shard(dense(activity_regularizer="l2"), Y["size"])  # 7 samples over two ranks
    with pytest.raises(UserError, match="Leave shares out"):
        over_shard(dense(activity_regularizer="l2"), Y["size"], shares=(3, 1), batch=4)
    one = over_shard(dense(activity_regularizer="l2"), Y["size"], shares=(1,))
    assert one.history["loss"] and over_shard(dense(kernel_regularizer="l2"), Y["size"]).history["loss"]


def stepped(text):
    """Return a model whose ``train_step`` takes its batch and its loss by the two lines of ``text``."""
    import linecache

    source = ("class Stepped(keras.Sequential):\n    def train_step(self, data):\n        {}\n"
              "        with tf.GradientTape() as tape:\n            loss = {}\n"
              "        weights = self.trainable_variables\n"
              "        self.optimizer.apply(tape.gradient(loss, weights), weights)\n"
              "        return {{'loss': loss}}\n").format(*text)
    linecache.cache["<stepped>"] = (len(source), None, source.splitlines(True), "<stepped>")
    space = {"keras": keras, "tf": tf, "__name__": __name__}
    exec(compile(source, "<stepped>", "exec"), space)
    return space["Stepped"]([keras.Input((5,)), keras.layers.Dense(1)])


UNPACK = "x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)"
LOSS = "self.compute_loss(x, y, self(x), {})"


@pytest.mark.slow
@pytest.mark.parametrize("take, loss, uneven, even", [
    ("x, y = data", LOSS.format(None), "unpacks only two elements", "unpacks only two elements"),
    ("x, y, _ = data", LOSS.format(None), "drops the sample weights", None),
    ("x, y = data[0], data[1]", "keras.ops.mean((y - self(x)) ** 2)", "drops the sample weights", None),
    ("x, y, *_ = data", "keras.ops.mean((y - self(x)) ** 2)", "drops the sample weights", None),
    (UNPACK, "self.compute_loss(x, y, self(x)) + 0 * keras.ops.sum(sample_weight)", "without sample_weight", None),
    (UNPACK, LOSS.format("sample_weight"), None, None)], ids=["pair", "unread", "indices", "rest", "left out", "given"])
def test_a_train_step_of_the_users_own_has_to_take_the_weights(take, loss, uneven, even):
    for words, samples in ((uneven, N), (even, 14)):  # batches of 8 over two ranks end with 5, or with 6
        model, x, y = stepped((take, loss)), X["a"][:samples], Y["size"][:samples]
        if words is None:
            over_shard(model, y, x=x, batch=8)
        else:
            with pytest.raises(UserError, match=words):
                over_shard(model, y, x=x, batch=8)


def test_a_short_branch_of_a_step_is_no_pair():
    from hvdtrain.keras.hooks import taken

    both = ("def train_step(self, data):\n  if len(data) == 3:\n    x, y, w = data\n"
            "  else:\n    x, y = data\n  f(x, y{})")
    assert (taken(both.format(", w")), taken(both.format(""))) == ("weighted", "unweighted")
    assert taken("def train_step(self, data):\n    return super().train_step(data)") == "unknown"
    assert taken("def train_step(self, data):\n    data = data[0], data[1:]\n    x, y = data\n    f(x, y)") == "unknown"
    assert taken("train_step = lambda self, data: f(self, data)") == "unknown"


def test_an_evaluation_within_a_fit_needs_no_weights_for_other_data():
    import hvdtrain.keras as hvd

    hvd.init()
    model, evaluated = stepped((UNPACK, LOSS.format("sample_weight"))), []
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: evaluated.append(
        (model.evaluate(X["a"], Y["size"], verbose=0), model.test_on_batch(X["a"], Y["size"]))))
    data = shard(X["a"], Y["size"], global_batch=7, rank=0, size=2)
    model.fit(data, callbacks=[callback], validation_data=(X["a"], Y["size"]), verbose=0)
    model.fit(data, callbacks=[callback], verbose=0)
    assert len(evaluated) == 2


def ratio(y, p):
    """Return a ratio of sums over the batch, given for each sample."""
    return keras.ops.sum(y * p) / keras.ops.sum(y * y + p * p) + 0 * keras.ops.mean(p, -1)


class AddsSum(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.sum(x))
        return x


class AddsSumAndNoise(AddsSum):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        return keras.ops.clip(super().call(x) + keras.random.normal(keras.ops.shape(x), seed=self.seed), 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("loss, added, words", [
    ("mse", [AddsSumAndNoise()], "add_loss.* not means over the batch"),
    (keras.losses.Dice(), [], "weighted mean over samples"), (keras.losses.Tversky(), [], "weighted mean over samples"),
    (ratio, [], "weighted mean over samples"), ("mse", [AddsSum()], "add_loss.* not means over the batch")],
    ids=["noise", "dice", "tversky", "own", "add_loss"])
def test_losses_over_the_whole_batch_are_refused_and_named_on_one_rank(loss, added, words):
    x = X["a"][:16]  # equal parts, for which what layers add is let through
    y = np.abs(np.repeat(x, 2, 1))
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(10, "sigmoid"), *added])
    before = model.get_weights()
    with pytest.raises(UserError, match=words):
        over_shard(model, y, x=x, loss=loss, batch=8)
    with pytest.warns(UserWarning, match=words):
        over_shard(model, y, x=x, loss=loss, batch=8, shares=(1,), fits=False)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


def test_a_loss_of_each_sample_is_not_refused():
    y = np.abs(np.repeat(X["a"], 2, 1))
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(10, "sigmoid"), keras.layers.Dropout(0.5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        over_shard(model, y, loss=keras.losses.Dice(axis=(1,)), batch=8, fits=False)


def test_a_look_is_taken_also_where_the_step_is_traced_already():
    model = dense(activity_regularizer="l2")
    for data in ({"x": shard(X["a"], Y["size"], global_batch=7, rank=0, size=1)},
                 {"x": X["a"], "y": Y["size"], "sample_weight": WEIGHTS, "batch_size": 4}):
        over_shard(model, Y["size"], fits=False, shares=(1,))
        model.fit(**data, verbose=0)
        with pytest.raises(UserError, match="activity_regularizer"):
            model.fit(shard(X["a"], Y["size"], global_batch=7, rank=0, size=2), verbose=0)


def test_weights_of_outputs_that_are_left_out_are_ones():
    given = {"kind": WEIGHTS}
    one = shard(X, Y, given, global_batch=N, shuffle=False, rank=0, size=1)
    np.testing.assert_array_equal(one[0][2]["kind"], WEIGHTS)
    np.testing.assert_array_equal(one[0][2]["size"], np.ones(N))
    assert set(given) == {"kind"}
    with pytest.raises(UserError, match="sample weights for 'kinds'"):
        shard(X, Y, {"kinds": WEIGHTS}, global_batch=N, rank=0, size=1)
    with pytest.raises(UserError, match="structure differs from y"):
        shard(X, Y, [WEIGHTS, WEIGHTS], global_batch=N, rank=0, size=1)
