"""Keras callbacks over a resume, and the weights that they see and write, against an undisturbed run."""

from __future__ import annotations

import collections
import json
import os
import random
import signal

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras_runs import STEPS, V, W, X, Y, best, made, trained
from small_runs import config, make_model, samples  # noqa: E402

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.config import CheckpointConfig, EarlyStopConfig  # noqa: E402
from hvdtrain.engine.callbacks.base import Callback  # noqa: E402
from hvdtrain.engine.keras_callback_state import decode, encode  # noqa: E402

UNEVEN = (X[:22], Y[:22]), (np.concatenate([V, X[22:23]]), np.concatenate([W, Y[22:23]]))  # a graph more for each


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def same(a, b):
    for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def halves(callbacks, at, **more):
    """(model, result, callbacks, notes) of a run that ``max_steps`` ends ``at`` a step and of the one resumed there."""
    found = []
    for changes in ({"max_steps": at}, {"resume": "auto"}):
        model, own = made(), callbacks()
        trainer, result = trained(model, *own, out=f"at {at}", **more, **changes)
        found.append((model, result, own, trainer.run.notes))
    return found


# --- events --------------------------------------------------------------------------------------------------------

class Counts(keras.callbacks.Callback):
    """Keeps the epochs whose events it has seen, and evaluations."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.tests = [], [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append((epoch, sorted(logs)))

    def on_test_begin(self, logs=None):
        self.tests += 1


class Requeues(Callback):
    """Asks for a requeue inside the second epoch."""

    def step_start(self, run):
        if run.state.cursor.step == 3:
            os.kill(os.getpid(), signal.SIGUSR2)


class Everything(keras.callbacks.Callback):
    """Changes rate, weights and momentum at the begin of training and of epochs, the rate at their ends."""

    def on_train_begin(self, logs=None):
        self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)
        self.model.optimizer.learning_rate = 0.3

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].kernel.assign(self.model.layers[0].kernel + 0.1)
        self.model.optimizer.momentums[0].assign(self.model.optimizer.momentums[0] * 0.0)
        np.random.random()

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * (0.5 + logs["loss"] % 0.4)


def acting():
    return [Counts(), keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7), Everything(),
            keras.callbacks.ReduceLROnPlateau("auc", patience=0, min_delta=10.0, mode="max")]


@pytest.mark.slow
def test_events_of_a_resumed_run_act_once():
    """Also those by loss and metrics of a whole epoch, of which a checkpoint holds the first part."""
    whole = made()
    _, want = trained(whole, *acting(), data=UNEVEN)
    for at in (4, 6):  # inside an epoch, and at its end
        (_, cut, half, _), (rest, got, own, _) = halves(acting, at, data=UNEVEN)
        same(whole, rest)
        for name, values in want.history.items():
            assert got.history[name] == values[-len(got.history[name]):], name
        half, own = half[0], own[0]
        assert [e for e, _ in half.ended] == ([0, 1] if at == 6 else [0]) and half.tests == len(half.ended)
        assert len(cut.history["loss"]) == 2 and cut.steps == at  # the history of a process has what it trained
        assert own.begun == [e for e, _ in own.ended] == [0, 1, 2] and own.tests == 3
    model = made()
    trainer, cut = trained(model, *acting(), Requeues(), data=UNEVEN, out="requeue")
    assert cut.requeue and cut.steps < 9 and trainer.fit().history == want.history
    same(whole, model)


def test_an_evaluation_of_a_cut_epoch_takes_no_patience_of_early_stop():
    """Of three steps an epoch; no epoch is better than the first."""
    def steps(**changes):
        base = config(epochs=6, global_batch=20, eval_every=1, checkpoint=CheckpointConfig(at_end=True),
                      early_stop=EarlyStopConfig(metric="loss", min_delta=10.0, patience=2), **changes)
        return Trainer(base).fit(make_model("numpy"), (samples(60), samples(21, 1))).steps

    assert steps(out="half", max_steps=4) == 4
    assert steps(out="half", resume="auto") == steps(out="whole") == 3 * STEPS


# --- state ---------------------------------------------------------------------------------------------------------

def test_values_come_back_exactly():
    values = [None, True, 3, -0.1, float("inf"), "text", b"bytes", [1, [2.5, "x"]], (1, (2,)), {1, 2},
              {"a": 1, 2: (3,)}, collections.OrderedDict(a=1), collections.deque([1, 2], 3), np.float32(0.1),
              np.bool_(True), np.arange(300.0).reshape(3, 100), np.zeros((0, 3)), np.array("text"),
              np.ones(200, "complex64"), [np.ones(500, np.float32), np.float16(0.1)]]
    generators = [np.random.default_rng(5), np.random.Generator(np.random.Philox(5)), np.random.RandomState(5),
                  random.Random(5)]
    arrays: dict = {}
    text = json.dumps(encode(values, arrays, "x"), allow_nan=False)
    found = decode(json.loads(text), arrays)
    for value, got in zip(values, found, strict=True):
        assert type(got) is type(value)
        np.testing.assert_equal(got, value)
    assert found[13].dtype == np.float32 and found[12].maxlen == 3 and len(arrays) == 3
    for generator in generators:
        got = decode(json.loads(json.dumps(encode(generator, arrays, "g"))), arrays)
        assert type(got) is type(generator) and got.random() == generator.random()
    tensor = decode(encode(keras.ops.ones(3, "bfloat16"), arrays, "t"), arrays)
    assert keras.ops.is_tensor(tensor) and keras.backend.standardize_dtype(tensor.dtype) == "bfloat16"


class Holds(keras.callbacks.Callback):
    """State of many kinds, private too; of one that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.seen, self._sums, self._by_epoch = [], np.zeros(400), {}
        self.variable, self.tracker, self.function = keras.Variable(0.0), object(), len

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])
        self._sums += logs["loss"]
        self.variable.assign_add(1.0)

    def on_epoch_end(self, epoch, logs=None):
        self._by_epoch[epoch] = (np.float32(logs["loss"]), list(self.seen))


class Refers(keras.callbacks.Callback):
    """Has variables of its own and of the model, in containers too, and values that ``on_train_begin`` computes."""

    def __init__(self):
        super().__init__()
        self.plain, self.several = tf.Variable(0.1), [keras.Variable(1.0), {"one": tf.Variable(2.0)}]
        self.first, self.aliases = self.several[0], (self.several[1]["one"],)

    def on_train_begin(self, logs=None):
        model = self.model
        self.base, self.start = float(model.optimizer.learning_rate), model.get_weights()
        self.kernels, self.read = [layer.kernel for layer in model.layers if hasattr(layer, "kernel")], {
            "bias": model.layers[0].bias.value}
        self.layer, self.slots = model.layers[-1], []

    def on_epoch_end(self, epoch, logs=None):
        for variable in (self.plain, self.first, *self.aliases):
            variable.assign(variable * 0.5 + 0.2)
        self.slots = self.model.optimizer.momentums[:1]
        share = float(self.plain + self.several[0] + self.several[1]["one"]) * 0.1
        for kernel in self.kernels:
            kernel.assign(kernel * (1 - share))
        self.slots[0].assign(self.slots[0] * 0.5)
        self.layer.bias.assign_add(tf.reduce_sum(self.read["bias"])[None] + float(np.sum(self.start[0])))
        self.model.optimizer.learning_rate = self.base * 0.8 ** epoch


class Begins(keras.callbacks.Callback):
    """Has an attribute that returns to its first value."""

    def __init__(self):
        super().__init__()
        self.value, self.seen = "constructor", []

    def on_train_begin(self, logs=None):
        self.value = "begin"

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(self.value)

    def on_epoch_end(self, epoch, logs=None):
        self.value = "constructor"


class Objects(keras.callbacks.Callback):
    """Holds models and callable objects."""

    def __init__(self):
        super().__init__()
        self.teacher, self.block, self.function, self.kind = made(), keras.layers.Dense(2), np.mean, dict

    def on_train_begin(self, logs=None):
        self.same, self.method = self.model, self.model.get_weights


class Draws(keras.callbacks.Callback):
    """Appends random numbers to what it shares with another callback, and begins to share a list of its own."""

    def __init__(self, shared, *generators):
        super().__init__()
        self.shared, self.sums, self.generators, self.log = shared, shared["sums"], generators, []

    def on_epoch_end(self, epoch, logs=None):
        self.shared["log"] += [float(generator.random()) for generator in self.generators]
        self.sums += len(self.shared["log"])
        self.shared["last"] = self.log
        self.log.append(epoch)


def holding():
    shared, generator = {"log": [], "sums": np.zeros(2)}, np.random.default_rng(3)
    return [Refers(), Holds(), Begins(), Objects(), Draws(shared, generator, random.Random(3)),
            Draws(shared, generator, np.random.RandomState(3), np.random.Generator(np.random.MT19937(3)))]


@pytest.mark.slow
def test_all_state_of_callbacks_comes_back_and_the_rest_is_named_once():
    """Variables, objects that callbacks share and generators keep their identity; begin values are of the first."""
    whole, (_, wanted, _, _, numbers, _) = made(), (every := holding())
    trained(whole, *every)
    for at in (4, 6):
        _, (rest, _, (refers, held, begins, _, first, second), notes) = halves(holding, at)
        same(whole, rest)
        assert held.seen == wanted.seen and held._by_epoch == wanted._by_epoch and float(held.variable) == 3 * STEPS
        np.testing.assert_array_equal(held._sums, wanted._sums)
        assert refers.base == 0.5 and isinstance(refers.plain, tf.Variable) and refers.first is refers.several[0]
        assert refers.kernels[0] is rest.layers[0].kernel and refers.layer is rest.layers[-1]
        assert refers.slots[0] is rest.optimizer.momentums[0]
        assert begins.seen == ["begin", "constructor", "constructor"]
        assert first.shared is second.shared and first.sums is second.sums is first.shared["sums"]
        assert first.shared["log"] == numbers.shared["log"] and first.generators[0] is second.generators[0]
        assert first.shared["last"] is second.log and first.log == second.log == [0, 1, 2]
        np.testing.assert_array_equal(first.sums, numbers.sums)
        named, objects = [note for note in notes if "checkpoints do not hold" in note]
        assert "tracker (a object)" in named and "function" not in named
        assert "Objects: teacher (a Sequential), block (a Dense). A" in objects


@pytest.mark.slow
def test_best_weights_are_restored_after_a_resume():
    whole = made()
    _, want = trained(whole, best(patience=9))
    _, (rest, got, (own,), _) = halves(lambda: [best(patience=9)], 4)
    same(whole, rest)
    assert own.best_epoch == 0 and got.metrics == want.metrics and got.metrics_at == want.metrics_at == STEPS
    assert got.metrics["loss"] == pytest.approx(want.history["val_loss"][0], rel=1e-6)


@pytest.mark.slow
def test_a_run_that_a_callback_has_stopped_stays_stopped():
    model, again = made(), made()
    _, first = trained(model, best(patience=1), epochs=6)
    _, second = trained(again, best(patience=1), epochs=6, resume="auto")
    assert second.steps == first.steps == 2 * STEPS and second.metrics == first.metrics
    same(model, again)
