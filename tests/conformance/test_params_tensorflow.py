"""Keras' variables as flat buckets, their update by flat vectors, and the memory that gradients are summed in."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import SGD, attached, batch, close, mlp, run, weights  # noqa: E402

from hvdtrain.backends.tensorflow.ops import ALIGNMENT, HostVector, Ops, readable, view  # noqa: E402  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import Config, Named  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402

BY_ELEMENT = [("sgd", {"momentum": 0.9}),
              ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}), ("sgd", {}),
              ("adam", {}), ("adamw", {"weight_decay": 0.1, "clipvalue": 0.05})]
OTHERS = ["rmsprop", "adagrad", "adadelta", "adamax", "nadam", "ftrl", "lion"]
ROUNDS = ("rmsprop", "adadelta", "adagrad")
"""Their kernels take the reciprocal root of the last few elements of a tensor otherwise than of those before; Adagrad's
on some processors."""
CUT = 131
"""Where a vector is cut, within a tensor and off every multiple of a processor's vectors."""
BY_TENSOR = [("adafactor", {}), ("sgd", {"clipnorm": 1.0}), ("adam", {"global_clipnorm": 1.0})]
BY_TENSOR += [("lamb", {})] if hasattr(keras.optimizers, "Lamb") else []


def gradients(shapes, t):
    draw = np.random.default_rng(t)
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("name, args", BY_ELEMENT, ids=str)
def test_flat_vectors_are_updated_to_the_bits_of_whole_variables(name, args):
    """And both to those of the plain Keras optimizer, whatever kernel does it."""
    parts = attached(mlp(), Config(optimizer=Named(name, args), lr=0.03)).parts
    plain_model = mlp()
    plain = type(parts.optimizer.own).from_config(parts.optimizer.own.get_config())
    assert parts.optimizer.elementwise
    buckets = plan_buckets(parts.params.specs, 0.0005)
    vectors = [tf.Variable(parts.params.flat(bucket)) for bucket in buckets]
    flat = parts.params.optimizer(vectors)
    shapes = [spec.shape for spec in parts.params.specs]
    for t in range(4):
        grads = gradients(shapes, t)
        packed = [tf.constant(np.concatenate([grads[i].ravel() for i in b.params])) for b in buckets]
        assert parts.optimizer.step([tf.constant(g) for g in grads], (), 0.0, False)[0]
        assert flat.step(packed, (), 0.0, True)[0]
        plain.apply([tf.constant(g) for g in grads], plain_model.trainable_variables)
    for bucket, vector in zip(buckets, vectors):
        np.testing.assert_array_equal(parts.params.flat(bucket).numpy(), vector.numpy())
    close(weights(parts), weights(plain_model), 0)
    slots = {(slot, i): x.numpy() for slot, i, x in parts.optimizer.slots()}
    for slot, i, x in flat.slots():
        np.testing.assert_array_equal(x.numpy(), np.concatenate([slots[slot, j].ravel() for j in buckets[i].params]))
    assert len({slot for slot, _ in slots}) == {"sgd": int("momentum" in args)}.get(name, 2)


@pytest.mark.parametrize("name, args", [*BY_ELEMENT, *((name, {}) for name in OTHERS)], ids=str)
def test_vectors_may_be_cut_anywhere(name, args):
    parts = attached(mlp(), Config(optimizer=Named(name, args), lr=0.03)).parts
    (bucket,) = plan_buckets(parts.params.specs, 16)
    before_N = parts.params.flat(bucket).numpy()
    vectors = [tf.Variable(before_N[:CUT]), tf.Variable(before_N[CUT:])]
    cut = parts.params.optimizer(vectors)
    assert cut.elementwise and parts.optimizer.elementwise
    for t in range(4):
        grad_N = tf.constant(np.random.default_rng(t).standard_normal(bucket.n).astype(np.float32))
        assert parts.optimizer.step([grad_N], [bucket], 0.0, False)[0]
        assert cut.step([grad_N[:CUT], grad_N[CUT:]], (), 0.0, False)[0]
    after_N = parts.params.flat(bucket).numpy()
    rounds = 1e-6 if name in ROUNDS else 0
    np.testing.assert_allclose(np.concatenate([v.numpy() for v in vectors]), after_N, rtol=rounds, atol=rounds)
    assert not np.array_equal(after_N, before_N)


@pytest.mark.parametrize("name, args", BY_TENSOR, ids=str)
def test_what_looks_at_whole_tensors_says_so(name, args):
    assert not attached(mlp(), Config(optimizer=Named(name, args), lr=0.03)).optimizer.elementwise


def test_buckets_are_written_as_they_were_read():
    one, other = attached(mlp(1)), attached(mlp(2))
    for bucket in plan_buckets(one.params(), 0.0005):
        other.parts.params.write(bucket, one.parts.params.flat(bucket))
    close(weights(other), weights(one), 0)


def test_blocks_are_those_that_the_model_file_names():
    model = mlp()
    named = attached(model, blocks=lambda m: [("one", m.layers[0]), ("two", m.layers[1])])
    assert [spec.block for spec in named.params()] == [0, 0, 1, 1]
    assert [spec.block for spec in attached(mlp()).params()] == [0] * 4


def test_memory_that_tensorflow_reads_in_place():
    own = Ops().buffer(1000, "float32")
    assert isinstance(own, HostVector) and own.ctypes.data % ALIGNMENT == 0
    assert Ops().to_host(own) is own and Ops().from_host(own) is own
    seen = view(own[16:32])
    own[16:32] = 7
    assert seen.numpy().tolist() == [7.0] * 16
    assert not readable(own[1:]) and not readable(own[:0])


def test_sums_of_a_host_are_read_where_they_lie_and_give_what_one_rank_gives():
    """Odd sizes are copied; the update of one step never shows what the next one writes."""
    single = attached(mlp())
    for t in range(4):
        run(single, [batch(t)], 1 / 32)
    models = [mlp(), mlp()]

    def one_rank(control, wire):
        step = attached(models[control.rank], SGD, wire, control.rank)
        assert all(isinstance(x, HostVector) for x in step.stage._memory)
        for t in range(4):
            x, y = batch(t)
            half = slice(16 * control.rank, 16 * control.rank + 16)
            run(step, [(x[half], y[half])], 1 / 32)
        return weights(step)

    one, other = LockstepWorld(2).run(one_rank)
    close(one, other, 0)
    close(one, weights(single), 1e-5)


def test_a_poisoned_rank_hands_over_no_number():
    models = [mlp(), mlp()]

    def one_rank(control, wire):
        step = attached(models[control.rank], SGD, wire, control.rank)
        before = weights(step)
        step.zero()
        if control.rank:
            step.stage.nothing(step.dp, poison=True)
        else:
            step.forward_backward(batch(0), 1 / 32, True)
        step._handed_over = True
        step.exchange()
        assert not np.isfinite(step.squares()) and not step.apply(0.0, True)[0]
        close(weights(step), before, 0)

    LockstepWorld(2).run(one_rank)


def test_the_first_sizes_get_graphs_of_their_own_and_all_others_share_one():
    traced = []

    def task(model, b):
        traced.append(b[0].shape[0])
        return tf.reduce_sum(tf.square(model(b[0]))), tf.shape(b[0])[0]

    step = attached(mlp(), task=task)
    for n in (32, 17, 32, 1, 2, 3, 4, 5, 6, 7, 8, 17, 9, 32):
        run(step, [batch(0, n)], 1 / 32)
    assert traced == [32, 17, 1, 2, 3, 4, 5, 6, None]
    assert {n for n, _ in step.stage.calls.exact()} == {32, 17, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("micros", [1, 2])
def test_statistics_of_a_step_without_an_update_are_undone(micros):
    model = mlp(extra=[keras.layers.BatchNormalization()])
    step = attached(model)
    run(step, [batch(0)], 1 / 32)
    before = weights(step)
    x, y = batch(1)
    bad = [(x * np.float32("nan"), y), *[batch(2)] * (micros - 1)]
    (finite, _), _ = run(step, bad, 1 / 32, check=True)
    assert not finite
    step.discard()
    close(weights(step), before, 0)
    assert int(step.optimizer.own.iterations) == 1


class Remembers(keras.optimizers.SGD):
    """Keeps the gradient itself, as a variable."""

    def build(self, variables):
        super().build(variables)
        self.last = self.add_optimizer_variables(variables, "last")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self.assign(self.last[self._get_variable_index(variable)], gradient)


def test_what_an_optimizer_keeps_of_a_gradient_stays():
    models = [mlp(), mlp()]
    for model in models:
        model.compile(Remembers(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def one_rank(control, wire):
        step = attached(models[control.rank], Config(), wire, control.rank)
        run(step, [batch(0)], 1 / 64)
        kept = [v.numpy().copy() for v in step.optimizer.own.last]
        assert any(k.any() for k in kept)
        for memory in step.stage._memory:
            memory[...] = 7
        close([v.numpy() for v in step.optimizer.own.last], kept, 0)

    LockstepWorld(2).run(one_rank)


def test_memory_that_is_written_from_is_not_kept_and_what_others_hold_stays():
    """As the transport's own memory, which its next call overwrites."""
    params = attached(mlp()).parts.params
    buckets = plan_buckets(params.specs, 0.0005)
    held = [(v.value.read_value(), v.numpy()) for v in params.variables]
    written = []
    for bucket in buckets:
        memory = Ops().buffer(bucket.n, bucket.dtype)
        memory[:] = np.random.default_rng(bucket.index).standard_normal(bucket.n)
        written.append(memory.copy())
        params.write(bucket, memory)
        memory[:] = -1.0
    for bucket, want in zip(buckets, written):
        np.testing.assert_array_equal(params.flat(bucket).numpy(), want)
    for tensor, before in held:
        np.testing.assert_array_equal(tensor.numpy(), before)
    for v in params.variables:  # as before a write, a read makes no copy
        first, second = (np.asarray(memoryview(v.value.read_value())) for _ in range(2))
        assert first.ctypes.data == second.ctypes.data, v.path


def test_values_reach_variables_whose_memory_numpy_cannot_see(monkeypatch):
    """As on a GPU: what Python reads there is a copy."""
    from hvdtrain.backends.tensorflow import params as module

    seen = module._writable
    monkeypatch.setattr(module, "_writable", lambda tensor: seen(tensor).copy())
    monkeypatch.setattr(module, "in_host", lambda variable: False)
    params = attached(mlp()).parts.params
    for bucket in plan_buckets(params.specs, 0.0005):
        want = np.random.default_rng(bucket.index).standard_normal(bucket.n).astype(np.float32)
        params.write(bucket, Ops().buffer(bucket.n, bucket.dtype, want.copy()), (3, 10))
        np.testing.assert_array_equal(params.flat(bucket).numpy(), want)
