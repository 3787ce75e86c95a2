"""Recomputed blocks of Keras models on TensorFlow: the bits of training with and without, for each kind of layer."""

from __future__ import annotations

import random

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import attached, batch, cut  # noqa: E402

L = keras.layers


def outcome(make, chosen, steps=2, sizes=(16, 16), **more):
    """Weights, statistics, losses and random states after some steps; the operations that graphs make once more."""
    keras.utils.set_random_seed(5)
    step = attached(make(), **more)
    random.seed(5)
    np.random.seed(5)
    step.parts.remat.choose(step.parts.remat.names if chosen is None else chosen)
    pairs = [step.run(cut(batch(t), *sizes), 1 / 32) for t in range(steps)]
    graphs = [g.graph for g in step.stage._calls._graphs.values()]
    names = [[op.name for op in graph.get_operations()] for graph in graphs]
    random_states = [a.tobytes() for n, a in step.rank_state().items()]
    found = [a.tobytes() for a in step.weights()], pairs, random_states
    step.leave()
    assert not any("call" in vars(layer) for layer in step.model._flatten_layers())
    return found, {n.split("/")[1] for ops in names for n in ops if n.startswith("remat/")}


def seq(*layers):
    return lambda: keras.Sequential([keras.Input((12,)), *(make() for make in layers), L.Dense(5, name="out")])


@pytest.mark.parametrize("make, blocks", [
    (seq(lambda: L.Dense(16, activation="gelu", name="a")), {"a"}),
    (seq(lambda: keras.Sequential([L.Dense(16), L.BatchNormalization(), L.ReLU(), L.Dropout(0.3)], name="a"),
         lambda: keras.Sequential([L.LayerNormalization(), L.Dense(16, activation="tanh")], name="b")), {"a", "b"}),
], ids=["gelu", "batchnorm and dropout"])
def test_recomputed_blocks_train_to_the_same_bits(make, blocks):
    without, copied = outcome(make, ())
    assert not copied
    got, copied = outcome(make, None)
    assert got == without and copied >= blocks


def test_costs_tell_what_is_kept_and_leave_all_as_it_was():
    """The results of normalisation, dropout and gelu, (32, 64) each; the last layer keeps nothing but its input."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((12,)), keras.Sequential([L.Dense(64), L.BatchNormalization(), L.Dropout(0.5),
                              L.Activation("gelu")], name="wide"), L.Dense(5, name="out")])
    step = attached(model, sample=lambda n: batch(0, n))
    before = step.weights(), list(step.rank_state().values())
    wide, out = step.parts.remat.costs(batch(0))
    for old, new in zip(before, (step.weights(), list(step.rank_state().values()))):
        np.testing.assert_equal(old, new)
    one = 32 * 64 * 4
    assert wide.name == "wide" and 3 * one <= wide.saved_bytes <= wide.inner_bytes <= 12 * one
    assert wide.forward_s > 0 and out.saved_bytes == 0
