"""Keras' BatchNormalization over the samples of all ranks, in one process: a rank, its twin, and one without samples.

The twin holds the same samples, so the joined batch is known. Ranks that differ: tests/mpi/test_sync_batchnorm.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from sync_models import with_norms  # noqa: E402
from tensorflow_tools import X, Y, attached, close, mlp, run, weights  # noqa: E402

from hvdtrain.backends.tensorflow.transforms.sync_batchnorm import Across, local_statistics, release  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import Config, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

SYNC = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1, sync_batchnorm=True)


class Twins(NullCollectives):
    """Three ranks: this one, one with the same samples, and one with none. ``names``: every collective's."""

    def __init__(self):
        super().__init__(0, 3)
        self.names = []

    def allgather(self, x_K, name):
        self.names.append(name)
        if not name.startswith("bn."):
            return super().allgather(x_K, name)
        return ReadyHandle(tf.stack([x_K, x_K, tf.zeros_like(x_K)]))

    def allreduce(self, flat_N, name, op="sum"):
        self.names.append(name)
        return ReadyHandle(2 * flat_N)


def passed(layer, x, outer, mask=None, times=2, factor=1.0, across=None):
    """(output, gradients of x and of the parameters) of the last of ``times`` calls of one graph."""
    @tf.function(jit_compile=False)
    def graph(x, outer):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(y * outer) * factor
        return y, [g / factor for g in tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])]

    if across is not None:
        across.begin(factor, True)
    for _ in range(times):
        y, grads = graph(x, outer)
    return y.numpy(), [g.numpy() for g in grads]


def made(seed=1, **settings):
    keras.utils.set_random_seed(seed)
    layer = keras.layers.BatchNormalization(gamma_initializer="random_uniform", beta_initializer="ones", **settings)
    return layer


@pytest.mark.parametrize("shape, settings, masked, factor", [
    ((3,), {}, False, 1.0), ((4, 5, 3), {"synchronized": True, "momentum": 0.8}, False, 1024.0),
    ((3, 4), {"axis": 1, "scale": False}, False, 1.0), ((6, 3), {"center": False}, True, 1.0),
    ((3,), {"renorm": True, "renorm_clipping": {"rmax": 1.5}}, False, 1.0)],
    ids=["dense", "image", "channels first", "masked", "renorm"])
def test_twins_are_normalised_as_their_joined_batch(shape, settings, masked, factor):
    draw = np.random.default_rng(0)
    x, outer = (draw.standard_normal((7, *shape)).astype(np.float32) * s + m for s, m in ((3, 10), (1, 0)))
    mask = draw.random((7, *shape[:-1])) < 0.7 if masked else None
    layer, whole = made(**settings), made(**{**settings, "synchronized": False})
    for each in (layer, whole):
        each.build((None, *shape))
    wire = Twins()
    across = Across(wire)
    across.install(SimpleNamespace(_flatten_layers=lambda: [layer]))
    y, grads = passed(layer, tf.constant(x), tf.constant(outer), mask, factor=factor, across=across)
    twice = [np.concatenate([a, a]) for a in (x, outer)]
    want_y, want = passed(whole, *map(tf.constant, twice), None if mask is None else np.concatenate([mask, mask]))
    close([y, grads[0]], [want_y[:7], want[0][:7]], 1e-4)
    close([2 * g for g in grads[1:]], want[1:], 1e-4)  # a rank's own: the exchange sums them
    close([v.numpy() for v in layer.variables], [v.numpy() for v in whole.variables], 1e-5)
    assert wire.names == ["bn.0.0.forward", "bn.0.0.backward"]  # of one trace
    assert across.waited_s() > 0 and across.waited_s() == 0


class Shared(keras.Model):
    """A subclassed model that calls one normalisation twice."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.first, self.out = keras.layers.Dense(12), keras.layers.Dense(5)

    def call(self, x, training=False):
        return self.out(self.norm(self.first(self.norm(x, training=training)), training=training))


def test_a_layer_called_twice_has_two_names_and_the_same_in_every_graph():
    model, wire = Shared(), Twins()
    model(X[:2])
    step = attached(model, SYNC, wire)
    wire.names.clear()
    run(step, [(X[:4], Y[:4])], 1 / 8)
    once = [n for n in wire.names if n.startswith("bn.")]
    assert sorted(once) == ["bn.0.0.forward", "bn.0.1.backward", "bn.0.1.forward"]  # x itself needs no gradient
    wire.names.clear()
    run(step, [(X[:2], Y[:2]), (X[:0], Y[:0])], 1 / 8)
    assert [n for n in wire.names if n.startswith("bn.")] == once * 2


def test_a_step_of_twins_is_a_step_on_both(tmp_path):
    model, alone = (mlp(extra=[keras.layers.BatchNormalization()]) for _ in range(2))
    step, single = attached(model, SYNC, Twins()), attached(alone, SYNC)
    for t in range(3):
        x, y = X[8 * t:8 * t + 8], Y[8 * t:8 * t + 8]
        run(step, [(x, y)], 1 / 16)
        run(single, [(np.concatenate([x, x]), np.concatenate([y, y]))], 1 / 16)
    close(weights(step), weights(single), 1e-4)
    before = weights(step)
    step.trial((X[:4], Y[:4]))
    close(weights(step), before, 0)
    step.export(tmp_path)
    read = keras.models.load_model(tmp_path / "model.keras")
    assert type(read.layers[1]) is keras.layers.BatchNormalization and "_moments" not in vars(read.layers[1])
    close(weights(read), before, 0)
    attached(model)  # a run without sync_batchnorm
    assert "_moments" not in vars(model.layers[1])


def test_one_rank_keeps_keras_own():
    model = mlp(extra=[keras.layers.BatchNormalization()])
    step = attached(model, SYNC)
    assert "_moments" not in vars(model.layers[1]) and step.caveats() == []


def test_local_statistics_use_no_wire():
    layer, wire = made(), Twins()
    layer.build((None, 3))
    across = Across(wire)
    across.install(SimpleNamespace(_flatten_layers=lambda: [layer]))
    x = tf.constant(X[:5, :3])
    with local_statistics(across):
        y, _ = passed(layer, x, x, times=1)
    release(SimpleNamespace(_flatten_layers=lambda: [layer]))
    close([y], [passed(layer, x, x, times=1)[0]], 1e-6)
    assert wire.names == []


class Own(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return keras.ops.relu(super().call(inputs, training=training, mask=mask))


def test_what_cannot_be_synchronised_is_named():
    model = mlp(extra=[keras.layers.BatchNormalization(), Own(name="own")])
    with pytest.raises(UserError, match="Own 'own.*', which overrides call"):
        attached(model, SYNC, Twins())
    assert "_moments" not in vars(model.layers[1])  # all or none
    with pytest.raises(UserError, match="sync_batchnorm with Keras over lockstep.*Set collectives: horovod"):
        LockstepWorld(2).run(lambda control, wire: Across(wire).install(mlp(extra=[Own()])))
    Across(Outside()).install(mlp())  # nothing to synchronise


def dense(inside=None):
    """(B, 12) -> (B, 12), normalised; ``inside(norm, x)``: how a subclassed layer calls the normalisation."""
    layers = [keras.layers.Dense(12), Calls(inside) if inside else keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((12,)), *layers])


class Calls(keras.layers.Layer):
    """Calls its normalisation as ``how(norm, x)`` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.norm = how, keras.layers.BatchNormalization(name="within")

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.how(lambda x: self.norm(x, training=training), x) if training else self.norm(x, training=False)


def loop(norm, x):
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.ensure_shape(norm(h), x.shape)), [0, x])[1]


@pytest.mark.parametrize("how", [
    loop, lambda norm, x: tf.cond(tf.reduce_sum(x) > 0, lambda: norm(x), lambda: x),
    lambda norm, x: tf.function(norm)(x)], ids=["loop", "condition", "function"])
def test_a_layer_that_ranks_may_call_unequally_often_is_refused(how):
    step = attached(dense(how), SYNC, Twins())
    with pytest.raises(UserError) as told:
        run(step, [(X[:4], Y[:4])], 1 / 8)
    assert told.value.got == "sync_batchnorm with 'within' in a loop, a condition or a separate tf.function"
    assert told.value.do.startswith("call the layer outside")


def with_parts():
    """Return a functional model of a functional and a sequential one, which are layers of it."""
    inputs = keras.Input((12,))
    within = keras.Model(inputs, keras.layers.BatchNormalization()(keras.layers.Dense(12)(inputs)))
    return keras.Model(inputs, keras.layers.Dense(5)(keras.Sequential([within, dense()])(inputs)))


class Plain(keras.Model):
    """A subclassed model with a model of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = dense(), keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.norm(self.first(x, training=training), training=training)


def gradient_of_its_own(norm, x):
    @tf.custom_gradient
    def twice(x):
        return 2 * x, lambda dy: 2 * dy

    return twice(norm(twice(x)))


@pytest.mark.parametrize("make, layers", [
    (with_parts, 2), (Plain, 2), (lambda: dense(gradient_of_its_own), 1),
    (lambda: dense(lambda norm, x: tf.function(lambda x: 2 * x)(norm(x))), 1),
    (lambda: keras.Sequential([keras.Input((12,)), keras.layers.Reshape((4, 3)), keras.layers.TimeDistributed(
        keras.layers.BatchNormalization()), keras.layers.Flatten(), keras.layers.Dense(5)]), 1)],
    ids=["models in a model", "subclassed", "custom gradient", "beside a function", "over time"])
def test_models_that_call_it_plainly_are_not_refused(make, layers):
    model, wire = make(), Twins()
    model(X[:2])
    step = attached(model, SYNC, wire)
    got = run(step, [(X[:4], Y[:4])], 1 / 8)
    assert got[0][0] and len({n for n in wire.names if n.endswith(".forward")}) >= layers


def test_what_is_masked_may_be_no_number():
    """Moments and their gradient are those of the same with zeros there, as in Keras' own."""
    mask = tf.constant([[True, True, False], [True, True, False]])
    clean = tf.constant(X[:2, :9].reshape(2, 3, 3)) * tf.cast(mask[..., None], tf.float32)
    dirty = tf.where(mask[..., None], clean, [np.inf, -np.inf, np.nan])
    layer = made()
    layer.build((None, 3, 3))
    Across(Twins()).install(SimpleNamespace(_flatten_layers=lambda: [layer]))
    found = []
    for moments, x in ((layer._moments, dirty), (type(layer)._moments.__get__(layer), clean)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, var = moments(x, mask)
            loss = tf.reduce_sum(mean * [1.0, 2, 3] + var * [4.0, 5, 6])
        found.append([mean.numpy(), var.numpy(), tape.gradient(loss, x).numpy()])
    close(found[0], found[1], 1e-5)


def test_a_stand_in_is_a_sample():
    """A model that masks zeros has no number for a sample of nothing else; see `Stage.spare`."""
    inputs = keras.Input((4, 3))
    hidden = keras.layers.BatchNormalization()(keras.layers.Masking()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling1D()(hidden)))
    x = X[:4].reshape(4, 4, 3)
    step = attached(model, SYNC, Twins())
    step.spare((x, Y[:4]))
    for micros in ([(x[:0], Y[:0])], [(x, Y[:4]), (x[:0], Y[:0])]):
        (finite, _), pairs = run(step, micros, 1 / 8, check=True)
        assert finite and pairs[-1] == (0.0, 0.0)
        assert all(np.isfinite(w).all() for w in weights(step))


def test_a_model_that_was_given_back_is_keras_own_and_synchronised_when_taken_again():
    model, alone, wire = *(mlp(extra=[keras.layers.BatchNormalization()]) for _ in range(2)), Twins()
    step, single = attached(model, SYNC, wire), attached(alone, SYNC)
    for n in (8, 8, 7):  # the last is another graph
        step.join()
        assert "_moments" in vars(model.layers[1])
        run(step, [(X[:n], Y[:n])], 1 / 16)
        run(single, [(np.concatenate([X[:n]] * 2), np.concatenate([Y[:n]] * 2))], 1 / 16)
        step.leave()
        assert "_moments" not in vars(model.layers[1])
        wire.names.clear()
        kept = model.get_weights()
        model.compile("sgd", "mse")
        model.fit(X[:8], X[:8, :5], verbose=0)
        assert wire.names == []
        model.set_weights(kept)
    close(weights(step), weights(single), 1e-4)


class Outside(NullCollectives):
    in_graph = False

    def __init__(self):
        super().__init__(0, 2)


def test_a_rank_without_samples_adds_nothing():
    """It runs a placeholder through a convolution, which neither gradients nor statistics notice."""
    def task(model, batch):
        return tf.reduce_sum(model(batch[0], training=True)) + 3.0, tf.shape(batch[0])[0]

    step = attached(with_norms("tensorflow"), SYNC, Twins(), task=task)
    for sizes in [(0,), (4, 0), (0, 0)]:
        before = weights(step)
        micros = [(X[:n], Y[:n]) for n in sizes]
        got = run(step, micros, 1.0, check=True)
        assert got[1][-1] == (0.0, 0.0) and got[0][0]
        if not any(sizes):  # momentum continues; statistics of no sample at all are 0 and 0
            assert got[0][1] == 0.0
        assert all(np.isfinite(w).all() for w in weights(step))
        assert any((a != b).any() for a, b in zip(weights(step), before))


def test_caveats():
    def words(norm, **changes):
        config = replace(SYNC, **changes)
        return " ".join(attached(mlp(extra=[norm]), config, Twins()).caveats())

    assert words(keras.layers.BatchNormalization()) == ""
    assert "each micro-batch" in words(keras.layers.BatchNormalization(), micro_batch=4)
    assert "own samples, without sync_batchnorm: true" in words(keras.layers.BatchNormalization(), sync_batchnorm=False)
    assert words(keras.layers.LayerNormalization(), accumulate=2) == ""
