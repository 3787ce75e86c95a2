"""Recomputed blocks of Keras models on TensorFlow: the bits of training with and without, for each kind of layer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import SGD, attached, batch, cut  # noqa: E402

from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle  # noqa: E402
from hvdtrain.parallel.precision import Precision  # noqa: E402

L = keras.layers


def outcome(make, chosen, steps=2, sizes=(16, 16), **more):
    """Weights, statistics, losses and random states after some steps; the operations that graphs make again."""
    keras.utils.set_random_seed(5)
    step = attached(make(), **more)
    random.seed(5)
    tf.random.set_seed(7)
    np.random.seed(5)
    step.parts.remat.choose(step.parts.remat.names if chosen is None else chosen)
    pairs = [step.run(cut(batch(t), *sizes), 1 / 32) for t in range(steps)]
    graphs = [g.graph for g in step.stage.calls._graphs.values()]
    names = [[op.name for op in graph.get_operations()] for graph in graphs]
    random_states = [a.tobytes() for n, a in step.rank_state().items()]
    found = [a.tobytes() for a in step.weights()], pairs, random_states
    step.leave()
    assert not any("call" in vars(layer) for layer in step.model._flatten_layers())
    return found, {n.split("/")[1] for ops in names for n in ops if n.startswith("remat/")}


def seq(*layers):
    return lambda: keras.Sequential([keras.Input((12,)), *(make() for make in layers), L.Dense(5, name="out")])


class Stateful(L.Layer):
    """Draws from TensorFlow's own generator, counts its calls, and reads a statistic that it has written."""

    def __init__(self, **more):
        super().__init__(**more)
        self.count = tf.Variable(0.0, trainable=False)
        self.mean = self.add_weight(shape=(16,), initializer="zeros", trainable=False)
        self.inner = L.Dense(16)

    def call(self, x):
        self.count.assign_add(1.0)
        h = self.inner(x) + 0.1 * tf.random.normal((16,))
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(h, 0))
        return tf.tanh(h - self.mean) * tf.exp(-tf.square(h)) * (1 + 0.01 * self.count)


class Twice(L.Layer):
    """Calls its layers twice, and adds to the loss."""

    def __init__(self, **more):
        super().__init__(**more)
        self.inner, self.drop = L.Dense(16, activation="tanh", activity_regularizer="l2"), L.Dropout(0.2)

    def call(self, x):
        a = self.drop(self.inner(x))
        self.add_loss(1e-3 * keras.ops.sum(keras.ops.square(a)))
        return self.drop(self.inner(a)) + x


class Nested(L.Layer):
    """Takes and returns a dict with integers in it; asks whether it trains."""

    def __init__(self, **more):
        super().__init__(**more)
        self.one, self.other = L.Dense(16, activation="gelu"), L.Dense(16, activation="silu")

    def call(self, x, training=None):
        a, b = x["a"], x["b"] * (2.0 if training else 1.0)
        return {"a": self.one(b) * keras.ops.tanh(a), "b": [self.other(a) + b, keras.ops.argmax(a, -1)]}


class Attention(L.Layer):
    """A block of a transformer, (B, T, 8)."""

    def __init__(self, **more):
        super().__init__(**more)
        self.norm, self.mix = L.LayerNormalization(), L.MultiHeadAttention(2, 4, dropout=0.2)
        self.feed = L.Dense(8, activation="gelu")

    def call(self, x):
        x = x + self.mix(self.norm(x), x)
        return x + self.feed(x)


class Blocks(keras.Model):
    """Of several kinds; one of them is called twice, and its input is used beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.nested, self.twice = L.Dense(16), Nested(name="nested"), Twice(name="twice")
        self.last = L.Dense(5)
        self(np.zeros((2, 12), np.float32))

    def call(self, x, training=None):
        h = self.first(x)
        y = self.nested({"a": h, "b": keras.ops.sin(h)}, training=training)
        z = self.twice(self.twice(y["a"] + y["b"][0])) + h
        return self.last(z) + keras.ops.cast(y["b"][1][:, None], "float32")


def dense():
    return seq(lambda: L.Dense(16, activation="gelu", activity_regularizer="l2", kernel_regularizer="l2", name="a"),
               lambda: keras.Sequential([L.Dense(16), L.BatchNormalization(), L.ReLU(), L.Dropout(0.3)], name="b"),
               lambda: Stateful(name="c"),
               lambda: keras.Sequential([L.GaussianNoise(0.1), L.PReLU(), L.Dense(16, activation="tanh")], name="d"))()


def images():
    return seq(lambda: L.Reshape((3, 2, 2)), lambda: keras.Sequential(
        [L.Conv2D(8, 2, padding="same"), L.BatchNormalization(), L.ReLU(), L.Conv2D(8, 2, padding="same",
         activation="relu"), L.MaxPooling2D((2, 1)), L.SpatialDropout2D(0.2), L.GroupNormalization(2)], name="a"),
        L.Flatten)()


def tokens():
    """With a mask from the embedding, sparse gradients and recurrent layers, whose loops are kept as they were."""
    return seq(lambda: L.Lambda(lambda x: keras.ops.cast(keras.ops.minimum(keras.ops.abs(x) * 3, 8.0), "int32")),
               lambda: L.Embedding(9, 8, mask_zero=True, name="a"), lambda: Attention(name="b"),
               lambda: keras.Sequential([L.LSTM(5), L.Dropout(0.3)], name="c"))()


@pytest.mark.parametrize("make, blocks, more", [
    (dense, "abcd", {"sizes": (16, 16)}),
    (images, "a", {}),
    (tokens, "abc", {}),
    (Blocks, ["nested", "twice", "twice_1"], {"blocks": lambda m: [("nested", m.nested), ("twice", m.twice)]}),
    (images, "a", {"precision": Precision(("fp16",))}),
], ids=["dense, in two parts", "images", "tokens", "blocks", "fp16"])
def test_recomputed_blocks_train_to_the_same_bits(make, blocks, more):
    """Weights, statistics, losses and random states; each block is among the copied ones."""
    more = {"sizes": (32,), **more}
    without, copied = outcome(make, (), **more)
    assert not copied
    got, copied = outcome(make, None, **more)
    assert got == without and copied >= set(blocks)


class Compiled(L.Layer):
    """Calls a function of TensorFlow's."""

    def __init__(self, **more):
        super().__init__(**more)
        self.inner = L.Dense(12)
        self.function = tf.function(lambda x: tf.nn.gelu(self.inner(x)) * tf.sin(x), autograph=False)

    def call(self, x):
        return tf.tanh(self.function(x))


def test_a_block_that_calls_a_function_of_tensorflows_is_refused_by_name():
    """TensorFlow opens it after the graph is made, and merges what is in it with what reads it: the last bits differ.
    """
    step = attached(seq(lambda: Compiled(name="a"), lambda: L.Dense(12, "gelu", name="b"))(),
                    sample=lambda n: batch(0, n))
    remat = step.parts.remat
    assert "tf.function" in remat.refusal("a") and [remat.refusal(name) for name in ("b", "out")] == ["", ""]
    step.leave()


class Asked(NullCollectives):
    """Two ranks with the same samples; counts what a graph asks of them when it runs."""

    def __init__(self):
        super().__init__(0, 2)
        self.asked = []

    def _node(self, name, x, twin):
        def run(x):
            self.asked.append(name)
            return twin(x)

        return ReadyHandle(tf.numpy_function(run, [x], x.dtype))

    def allgather(self, x_K, name):
        if not name.startswith("bn."):
            return super().allgather(x_K, name)
        return self._node(name, x_K, lambda x: np.stack([x, x]))

    def allreduce(self, flat_N, name, op="sum"):
        return self._node(name, flat_N, lambda x: 2 * x) if name.startswith("bn.") else ReadyHandle(2 * flat_N)


def test_batchnorm_over_ranks_is_recomputed_from_the_statistics_that_ranks_agreed_on():
    def trained(chosen):
        wire = Asked()
        got = outcome(dense, chosen, config=replace(SGD, sync_batchnorm=True), wire=wire)
        return got, sorted(wire.asked)

    (without, _), asked = trained(())
    (got, copied), again = trained(None)
    assert got == without and again == asked and "b" in copied
    assert {name.rpartition(".")[2] for name in asked} == {"forward", "backward"}


def test_the_peak_of_memory_falls():
    """Of a process of its own: what a step holds at most, by the kernel's account, with and without."""
    code = """
import ctypes, sys
import numpy as np, tensorflow as tf, keras
tf.config.threading.set_intra_op_parallelism_threads(1); tf.config.threading.set_inter_op_parallelism_threads(1)
from one_step import OneStep
keras.utils.set_random_seed(0)
L = keras.layers
block = lambda: keras.Sequential([L.LayerNormalization(), L.Dense(512, activation="gelu"),
                                  L.Dense(64)])
step = OneStep("tensorflow", keras.Sequential([keras.Input((64,)), *(block() for _ in range(6)), L.Dense(5)]))
batch = np.zeros((1024, 64), np.float32), np.zeros(1024, np.int64)
status = lambda: {k: int(v.split()[0]) for k, v in (l.split(":") for l in open("/proc/self/status")) if k[:2] == "Vm"}
for chosen in ((), step.parts.remat.names):
    step.parts.remat.choose(chosen)
    step.run([batch], 1.0)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = status()["VmRSS"]
    step.run([batch], 1.0)
    print((status()["VmHWM"] - before) // 1024)
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel's account of a process's peak cannot be reset here")
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0",
           "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    without, recomputed = map(int, done.stdout.split()[-2:])
    assert recomputed < 0.6 * without, (without, recomputed)


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
