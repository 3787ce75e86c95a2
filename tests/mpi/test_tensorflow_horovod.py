"""The TensorFlow step over Horovod's graph nodes: the collectives' cases, and one curve for every cut of the batch."""

import gc
import threading
from contextlib import nullcontext

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from collectives_cases import CASES, name_of  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402
from tensorflow_tools import SGD, X, Y, attached, batch, close, cut, mlp, run, weights  # noqa: E402

from hvdtrain.backends.tensorflow import collectives, nodes  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.config import ExchangeConfig  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)
FEW = pytest.mark.usefixtures("few_ranks")


@pytest.fixture(scope="module")
def wire(control):
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)

    def start(name, exchange):
        return horovod.start_horovod(name, exchange, control)

    return collectives("horovod", control, ExchangeConfig(), start)


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_collectives(wire, check):
    check(wire, tf.constant, lambda t: t.numpy())


def test_calls_outside_graphs_pair_by_name_and_not_by_order(wire, control):
    """Each rank begins another call first, and the second one while that waits."""
    found, names = {}, ["first", "second"] if control.rank else ["second", "first"]

    def call(name):
        x = tf.fill([3], {"first": 1.0, "second": 10.0}[name] * (control.rank + 1))
        found[name] = wire.allreduce(x, f"crosswise.{name}").wait().numpy().tolist()

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for one in threads:
        one.start()
        one.join(0.05)
    for one in threads:
        one.join()
    total = sum(range(1, control.size + 1))
    assert found == {"first": [total] * 3, "second": [10 * total] * 3}


@FEW
@pytest.mark.parametrize("tape", [None, tf.GradientTape], ids=["plain", "taped"])
def test_ever_new_names_take_no_ever_more_memory(wire, monkeypatch, tape):
    monkeypatch.setattr(nodes, "MOST_NAMES", 4)
    for n in range(24):
        if n == 8:
            gc.collect()
            before = len(context.context().list_function_names())
        with tape() if tape else nullcontext():
            assert wire.allreduce(tf.ones([2]), f"new.{n}").wait().numpy().tolist() == [wire.size] * 2
    gc.collect()
    assert len(context.context().list_function_names()) <= before


def test_other_kinds_are_the_cores():
    assert collectives("mpi", None, ExchangeConfig(), None) is None


def parts_of(turn, size):
    """Micro-batch sizes of every rank: ranks with nothing, and with 1, 2 or 3 micro-batches, in turn."""
    kinds = [(0,), (8,), (5, 3), (2, 3, 4)]
    sizes = [kinds[(turn + rank) % len(kinds)] for rank in range(size)]
    left = 32
    out = []
    for own in sizes:
        own = tuple(min(n, max(0, left - sum(own[:i]))) for i, n in enumerate(own))
        left -= sum(own)
        out.append(own)
    last = max((i for i, own in enumerate(out) if sum(own)), default=0)
    out[last] = (*out[last], left) if left else out[last]
    return out


@pytest.mark.world_size(3)
def test_unequal_parts_follow_one_process(wire):
    single = attached(mlp())
    step = attached(mlp(seed=3 + wire.rank), wire=wire, rank=wire.rank)
    counts = set()
    for t in range(20):
        run(single, [batch(t)], 1 / 32)
        parts = parts_of(t, wire.size)
        assert sum(map(sum, parts)) == 32
        mine = tuple(a[sum(map(sum, parts[:wire.rank])):] for a in batch(t))
        micros = cut(mine, *parts[wire.rank])
        counts.add(len(micros))
        run(step, micros, 1 / 32, clip=100.0)
    assert 0 in counts and len(counts) > 2  # this rank had nothing, one and several micro-batches
    close(weights(step), weights(single), 1e-5)
    bits = np.concatenate([w.reshape(-1).view(np.uint8) for w in weights(step)]).astype(np.float32)
    root = wire.broadcast(tf.constant(bits), "test.bits").wait().numpy()
    np.testing.assert_array_equal(bits, root)


@pytest.mark.world_size(3)
def test_horovod_and_plain_mpi_agree(wire, comm):
    """The graph's exchange and the one outside it."""
    inside = attached(mlp(), wire=wire, rank=wire.rank)
    outside = attached(mlp(), wire=MpiCollectives(comm, timeout_s=60), rank=wire.rank)
    for t in range(8):
        parts = parts_of(t, wire.size)
        mine = cut(tuple(a[sum(map(sum, parts[:wire.rank])):] for a in batch(t)), *parts[wire.rank])
        run(inside, mine, 1 / 32)
        run(outside, mine, 1 / 32)
    close(weights(outside), weights(inside), 1e-6)


@pytest.mark.world_size(2)
def test_names_hold_when_ranks_trace_anew_at_other_times(wire):
    """Ranks whose samples change their length at different steps, so that graphs of other ages meet."""
    def model():
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((None, 12)), keras.layers.Dense(8, activation="tanh"),
                                 keras.layers.Dense(12)])

    step, single = attached(model(), wire=wire, rank=wire.rank), attached(model())
    for t in range(6):
        data = []
        for rank in range(wire.size):
            length = 1 + (t if rank == 0 else t // 2 if rank == 1 else 0)
            x = np.stack([X[(t + i):(t + i) + length] for i in range(4 + rank)])
            data.append((x, x[..., ::-1].copy()))
        n = sum(len(x) for x, _ in data)
        run(step, [data[wire.rank]], 1 / n)
        run(single, data, 1 / n)
    close(weights(step), weights(single), 1e-5)


@pytest.mark.world_size(3)
def test_a_rank_without_any_sample_ever(wire):
    step, single = attached(mlp(), wire=wire, rank=wire.rank), attached(mlp())
    for t in range(4):
        run(single, [batch(t)], 1 / 32)
        run(step, [batch(t)] if wire.rank == 1 else [], 1 / 32)
    close(weights(step), weights(single), 1e-5)


@FEW
def test_a_parameter_without_gradient_is_summed_as_zero(wire):
    """On rank 0 the loss leaves the first layer out, so that its buckets hold nothing."""
    def task(model, b):
        hidden = tf.zeros([tf.shape(b[0])[0], 16]) if wire.rank == 0 else model.layers[0](b[0])
        return tf.reduce_sum(model.layers[1](hidden)), tf.shape(b[0])[0]

    step = attached(mlp(), SGD, wire=wire, rank=wire.rank, task=task, bucket_mb=1e-6)
    for t in range(3):
        run(step, [batch(t)], 1 / 64)
    bits = np.concatenate([w.reshape(-1) for w in weights(step)])
    np.testing.assert_array_equal(bits, wire.broadcast(tf.constant(bits), "test.nograd").wait().numpy())
    assert not np.array_equal(weights(step)[0], weights(mlp())[0])


@FEW
def test_not_a_number_on_one_rank_stops_every_update(wire):
    step = attached(mlp(), wire=wire, rank=wire.rank)
    before = weights(step)
    x, y = batch(0)
    (finite, _), _ = run(step, [(x * np.float32("nan") if wire.rank == 1 else x, y)], 1 / 64, check=True)
    assert not finite
    close(weights(step), before, 0)


def test_waiting_is_measured(wire, control):
    """The last rank is late; the others wait for it, it does not wait for them."""
    import time

    step = attached(mlp(), wire=wire, rank=wire.rank)
    run(step, [(X, Y)], 1 / 64)
    late = wire.rank == wire.size - 1
    wire.allreduce(tf.zeros([1]), "test.meet").wait()
    if late:
        time.sleep(0.6)
    step.zero()
    step.forward_backward((X, Y), 1 / 64, True)
    waited_s = step.exchange()
    waited_P = control.gather(waited_s)
    assert min(waited_P) == waited_P[-1] >= 0 and max(waited_P) > waited_P[-1] + 0.05, waited_P
