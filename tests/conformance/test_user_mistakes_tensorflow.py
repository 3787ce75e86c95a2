"""Mistakes with a Keras model and their messages: loss by name, targets, and what a task returns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import SGD, X, Y, attached, mlp, run  # noqa: E402

from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402


def step_of(loss="auto", model=None, args=None, **parts):
    return attached(model or mlp(), replace(SGD, loss=Named(loss, args or {})), **parts)


def told(step, x, y):
    """Return the words of the `UserError` that training on (x, y) ends in; evaluation must end in the same."""
    words = []
    for go in (lambda: run(step, [(x, y)], 1 / len(x)), lambda: step.evaluate((x, y))):
        with pytest.raises(UserError) as error:
            go()
        words.append(str(error.value).replace("(None, ", f"({len(x)}, "))  # a graph may leave the samples open
    assert words[0] == words[1]
    return words[0]


class Called(keras.Model):
    """A model whose outputs are known only once it is called."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(5)

    def call(self, x):
        return self.layer(x)


@pytest.mark.parametrize("loss", ["auto", "sparse_categorical_crossentropy"])
@pytest.mark.parametrize("y", [np.arange(8) % 6 + 1, (np.arange(8) % 6 + 1)[:, None]])
def test_class_numbers_out_of_range(loss, y):
    words = told(step_of(loss), X[:8], y)
    assert f"loss {loss}" in words and "targets run from 1 to 6" in words
    assert "expected 0..4 for a model with 5 outputs" in words


def test_class_numbers_out_of_range_of_a_compiled_model():
    model = mlp()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=9))
    y = np.array([9, 0, 7, 9])
    assert "targets run from 0 to 7" in told(step_of(model=model), X[:4], y)
    run(step_of(model=model), [(X[:4], np.array([9, 0, 4, 9]))], 1 / 4)


def test_class_numbers_out_of_range_of_a_model_that_tells_no_shape():
    model = Called()
    model(X[:1])
    with pytest.raises(UserError, match=r"targets run from 1 to 6; expected 0\.\.4"):
        run(step_of(model=model), [(X[:8], np.arange(8) % 6 + 1)], 1 / 8)


def test_numbers_that_are_no_classes_are_left_alone():
    model = mlp()
    model.compile(loss="mse")
    run(step_of(model=model), [(X[:8], np.full((8, 5), 77))], 1 / 8)


@pytest.mark.parametrize("loss", ["auto", "mean_squared_error", "binary_crossentropy"])
def test_one_number_a_sample_for_several_outputs(loss):
    words = told(step_of(loss), X[:8], np.zeros(8, np.float32))
    assert f"loss {loss}: the model's output is float32[B, 5] and the targets are float32[B]" in words


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_one_number_a_sample_for_one_output_is_taken(shape):
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
    run(step_of(model=model), [(X[:8], np.zeros(shape, np.float32))], 1 / 8)


def test_a_loss_that_does_not_fit_its_inputs():
    words = told(step_of(), X[:8], np.zeros((8, 3), np.int64))
    assert "loss auto refused its inputs" in words and "int64[B, 3]" in words and "TensorFlow: " in words


def test_an_error_of_the_model_or_of_an_own_loss_keeps_its_traceback():
    def own(y, outputs):
        raise ValueError("mine")

    model = mlp()
    model.compile(loss=own)
    with pytest.raises(ValueError, match="mine"):
        run(step_of(model=model), [(X[:8], Y[:8])], 1 / 8)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        run(step_of(), [(X[:8, :7], Y[:8])], 1 / 8)


@pytest.mark.parametrize("made, words", [
    (lambda loss: None, "task returned a NoneType"), (lambda loss: tf.reduce_sum(loss), "task returned a "),
    (lambda loss: (loss, 8), "task returned a loss of type SymbolicTensor and shape (8, 5)"),
    (lambda loss: (tf.reduce_sum(loss), None), "a weight of type NoneType"),
])
def test_a_task_that_returns_no_pair_of_scalars(made, words):
    def task(model, batch):
        return made(model(batch[0]))
    assert words in told(step_of(task=task), X[:8], Y[:8])
