"""Variables that a Keras model writes to in its forward passes, over ranks: named, and one value for all ranks."""

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples, solo, weights

from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402


class Counter(keras.layers.Layer):
    """Counts samples and large values, of which its output depends; a flag; a queue with its position."""

    def __init__(self, **more):
        super().__init__(**more)
        self.count, self.at = (self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name=name)
                               for name in ("count", "at"))
        self.seen = self.add_weight(shape=(2,), initializer="ones", trainable=False, name="seen")
        self.late = self.add_weight(shape=(), initializer="zeros", trainable=False, name="late")
        self.flag = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="flag")
        self.queue = self.add_weight(shape=(16, FEATURES), initializer="zeros", trainable=False, name="queue")
        self.poisoned = False

    def call(self, x, training=None):
        if training:
            n = tf.shape(x)[0]
            self.count.assign_add(n)
            self.seen.assign_add(tf.stack([tf.reduce_sum(tf.cast(x > 1, "float32")),
                                           tf.reduce_sum(tf.cast(x < -1, "float32"))]))
            self.late.assign_add(tf.cond(tf.convert_to_tensor(self.count) > 12, lambda: tf.reduce_sum(x), lambda: 0.0))
            self.flag.assign(tf.logical_or(self.flag, tf.reduce_any(x > 2.5)))
            rows = (tf.convert_to_tensor(self.at) + tf.range(n)) % 16
            self.queue.assign(tf.tensor_scatter_nd_update(self.queue.value, rows[:, None], x))
            self.at.assign((self.at + n) % 16)
        return x * (1 + 0.01 * self.seen[0] / self.seen[1])


class Net(keras.Model):
    def __init__(self, reductions=None, poisoned=None):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.counter, self.linear = Counter(name="counter"), keras.layers.Dense(CLASSES, name="linear")
        self.reductions, self.poisoned = reductions, poisoned
        self(np.zeros((2, FEATURES), np.float32))

    def buffer_reduction(self):
        return {getattr(self.counter, name).path: how for name, how in (self.reductions or {}).items()}

    def call(self, x, training=None):
        out = self.linear(self.counter(x, training=training))
        if self.poisoned is not None and training:
            bad = tf.reduce_any(tf.reduce_all(x == self.poisoned, 1))
            out = out * tf.where(bad, np.nan, 1.0)
        return out


DATA = samples(24)
RIGHT = {"count": "sum", "seen": "sum", "flag": "any", "queue": "gather", "at": "gather"}


def values(run):
    return {v.path.rpartition("/")[2]: v.numpy() for v in run.spec.model.counter.weights}


def ranks(settings, reductions=None, **more):
    """Rank 0's run; all ranks' variables are equal."""
    runs = lockstep(2, settings, lambda rank: Net(reductions, **more), DATA, fitted)
    for a, b in zip(*(run.spec.model.weights for run in runs)):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), a.path)
    return runs[0]


def short(**changes):
    return config(**{"global_batch": 6, "max_steps": 4, "shares": [2, 1], **changes})


def test_declared_variables_are_those_of_one_process():
    alone, run = values(fitted(solo(short(), Net(RIGHT), DATA))), ranks(short(), RIGHT)
    got = values(run)
    for name in ("count", "seen", "flag", "at"):
        np.testing.assert_array_equal(got[name], alone[name], name)
    assert sorted(got["queue"].tolist()) == sorted(alone["queue"].tolist()) and alone["queue"].any(1).all()
    assert any("count: sum" in note and "not independent" in note for note in run.notes)


def test_by_default_ranks_take_rank_0s_and_the_note_names_them():
    run = ranks(short())
    assert int(values(run)["count"]) == 16, "4 steps of rank 0's share"
    note = next(note for note in run.notes if "write to" in note)
    assert all(name in note for name in ("at", "count", "queue", "seen")) and "late" not in note
    assert any("late" in note for note in run.notes), "first written in a later step"
    assert not any("dropout" in note for note in run.notes)


@pytest.mark.parametrize("reductions", [None, RIGHT], ids=["default", "declared"])
def test_saves_and_evaluations_change_no_bit(reductions, tmp_path):
    quiet = weights(ranks(short(), reductions))
    saving = short(eval_every=1, epochs=9, checkpoint=CheckpointConfig(every_steps=1), out=str(tmp_path / "run"))
    assert all(np.array_equal(a, b) for a, b in zip(quiet, weights(ranks(saving, reductions))))


@pytest.mark.parametrize("reductions", [None, RIGHT], ids=["default", "declared"])
def test_a_step_without_an_update_writes_nothing(reductions):
    run = ranks(short(nan_guard="skip", data=DataConfig(prefetch=0, shuffle=False)), reductions, poisoned=DATA[0][6])
    assert int(values(run)["count"]) == (18 if reductions else 12)


def test_an_rnn_without_dropout_is_not_said_to_draw():
    keras.utils.set_random_seed(3)
    models = [keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Reshape((3, 4)), keras.layers.LSTM(4),
                                keras.layers.Dense(CLASSES)]) for _ in range(2)]
    run, _ = lockstep(2, short(), models.__getitem__, DATA, lambda run: run)
    assert not any("not independent" in note for note in run.notes)


class Renormalised(keras.layers.BatchNormalization):
    """Reads its moving mean in training."""

    def call(self, x, training=None, mask=None):
        out = x - self.moving_mean
        if training:
            self.moving_mean.assign(0.7 * self.moving_mean + 0.3 * tf.reduce_mean(x, 0))
        return out


def test_statistics_that_enter_training_are_written_state():
    def model(rank):
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.layers.Input((FEATURES,)), Renormalised(name="renormalised"),
                                 keras.layers.Dense(CLASSES), keras.layers.BatchNormalization(name="plain")])

    run, other = lockstep(2, short(), model, DATA, fitted)
    note = next(note for note in run.notes if "write to" in note)
    assert "renormalised/moving_mean" in note and "plain" not in note
    np.testing.assert_array_equal(*(each.spec.model.layers[0].moving_mean.numpy() for each in (run, other)))


def stateful(n):
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.layers.Input(batch_shape=(n, FEATURES)), keras.layers.Reshape((3, 4)),
                             keras.layers.LSTM(4, stateful=True), keras.layers.Dense(CLASSES)])


def test_a_stateful_layer_on_equal_ranks_is_that_of_one_process():
    settings = config(global_batch=6, max_steps=4, data=DataConfig(prefetch=0, shuffle=False))
    alone = fitted(solo(settings, stateful(6), DATA))
    run, other = lockstep(2, settings, lambda rank: stateful(3), DATA, fitted)
    assert apart(weights(run), weights(alone)) < 1e-5
    for one, a, b in zip(*(each.spec.model.layers[1].states for each in (alone, run, other))):
        np.testing.assert_allclose(np.concatenate([a.numpy(), b.numpy()]), one.numpy(), atol=1e-6)


@pytest.mark.parametrize("change", [{"shares": [2, 1]}, {"accumulate": 2}, {"resume": "auto"}], ids=str)
def test_a_stateful_layer_is_refused_where_its_rows_change(change):
    with pytest.raises(UserError, match="stateful layer 'lstm"):
        lockstep(2, config(global_batch=6, **change), lambda rank: stateful(3), DATA, fitted)


@pytest.mark.parametrize("ranks, n, test, change, words", [
    (1, 24, None, {"global_batch": 6}, r"of 6 samples in training \(rank 0, each step\) .* for 3 at a time.*batch: 3 "),
    (2, 27, None, {"global_batch": 6}, r"of 2 samples in training \(rank 0, the last step of an epoch\).*batch: 6 "),
    (1, 24, 7, {"global_batch": 3}, r"of 1 samples in evaluation \(rank 0, the last step of an epoch\)")])
def test_other_samples_than_a_fixed_batch_are_named(ranks, n, test, change, words):
    data = samples(n) if test is None else (samples(n), samples(test))
    with pytest.raises(UserError, match=words):
        lockstep(ranks, config(epochs=1, **change), lambda rank: stateful(3), data, lambda run: None)


def test_a_fault_of_the_data_is_not_blamed_on_a_fixed_batch():
    x, y = samples(24)
    with pytest.raises(UserError, match="targets run from"):
        lockstep(1, config(epochs=1, global_batch=6), lambda rank: stateful(3), (x, y + CLASSES), lambda run: None)


def test_a_wrong_declaration_is_refused():
    with pytest.raises(UserError, match="int32"):
        lockstep(2, short(), lambda rank: Net({"count": "mean"}), DATA, loop.fit)
