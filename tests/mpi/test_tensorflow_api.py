"""`hvdtrain.tensorflow` over 2, 3 or 4 ranks: collectives in closed form, by both transports."""

import argparse
import os

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

import hvdtrain.tensorflow as hvd  # noqa: E402
from benchmarks import eager  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.commands.bench.session import Session  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.tensorflow import basics  # noqa: E402
from hvdtrain.tensorflow.transports import PlainMpi  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


SETS = {}


@pytest.fixture(scope="module", autouse=True)
def job(control):
    """Initialize a job with a process set of the first ranks and one of the others."""
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)
    hvd.shutdown()
    first = list(range((control.size + 1) // 2))
    rest = [r for r in range(control.size) if r not in first]
    SETS.update(first=hvd.ProcessSet(first), rest=hvd.ProcessSet(rest))
    hvd.init(process_sets=[SETS["first"], SETS["rest"]])
    assert hvd.is_initialized()


@pytest.fixture(params=["horovod", "plain MPI"])
def carried(request, comm, monkeypatch):
    """Run over the job's transport and that of jobs without Horovod, without memory that ranks share."""
    monkeypatch.setattr(world(), "shared", [None])
    if request.param == "plain MPI":
        mpi = PlainMpi(MpiCollectives(comm, timeout_s=30), list(range(hvd.size())))
        monkeypatch.setattr(world(), "wires", {0: mpi})
    return request.param


FEW = pytest.mark.usefixtures("few_ranks")


def both(fn, *args):
    """Return what ``fn`` gives outside of a graph and, called twice, in one."""
    graph = tf.function(fn)
    graph(*args)
    return fn(*args), graph(*args)


def ranks(fn=float):
    return np.array([fn(r) for r in range(hvd.size())])


def test_horovod_waits_no_longer_than_the_control_plane():
    assert os.environ[horovod.STALL] == "600"


def test_facts_are_horovods(control):
    theirs = world().hvd
    assert (hvd.rank(), hvd.size()) == (control.rank, control.size) == (theirs.rank(), theirs.size())
    for name in ("local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "mpi_built", "mpi_enabled",
                 "mpi_threads_supported", "gloo_built", "nccl_built", "cuda_built"):
        assert getattr(hvd, name)() == getattr(theirs, name)(), name
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [
        theirs.Average, theirs.Sum, theirs.Adasum, theirs.Min, theirs.Max, theirs.Product]


@pytest.mark.parametrize("carried, op, fold", [
    ("horovod", "Average", np.mean), ("horovod", "Sum", np.sum), ("horovod", "Min", np.min), ("horovod", "Max", np.max),
    ("horovod", "Product", np.prod), ("plain MPI", "Average", np.mean), ("plain MPI", "Max", np.max)],
    indirect=["carried"])
def test_allreduce(carried, op, fold):
    expected = fold(ranks(lambda r: r + 1.0))
    for out in both(lambda x: hvd.allreduce(x, op=getattr(hvd, op)), tf.fill([2, 3], hvd.rank() + 1.0)):
        np.testing.assert_allclose(out, np.full((2, 3), expected), rtol=1e-6)


@pytest.mark.parametrize("carried, dtype", [("horovod", "float16"), ("horovod", "bfloat16"), ("horovod", "float64"),
                                            ("horovod", "int32"), ("plain MPI", "float16")], indirect=["carried"])
def test_types_and_factors_of_ones_own(carried, dtype):
    own = tf.cast(tf.fill([3], hvd.rank() + 1), dtype)
    out = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0 * (1 + hvd.rank()), postscale_factor=0.5)
    assert out.dtype == dtype
    np.testing.assert_array_equal(tf.cast(out, tf.float64), np.full(3, sum((r + 1) ** 2 for r in range(hvd.size()))))


@FEW
@pytest.mark.parametrize("dtype, value, before, after", [
    ("float16", 0.25, 1e5, 1.0), ("float16", 2047.0, 1 / 3, 1.0), ("float16", 1.0, 1e-9, 1e9),
    ("float16", 60000.0, 2.0, 0.25), ("bfloat16", 255.0, 1 / 3, 1.0), ("bfloat16", 0.25, 1.0, 2.003),
    ("float64", 1.0, 0.1, 1.0)])
def test_factors_have_the_digits_of_the_sum(carried, dtype, value, before, after):
    x, size = tf.cast(tf.fill([4], value), dtype), hvd.size()
    found = {"sum": hvd.allreduce(x, op=hvd.Sum, prescale_factor=before, postscale_factor=after / size),
             "mean": hvd.allreduce(x, prescale_factor=before, postscale_factor=after),
             "group": hvd.grouped_allreduce([x], prescale_factor=before, postscale_factor=after)[0],
             "rows": hvd.reducescatter(x, prescale_factor=before, postscale_factor=after)}
    wide = "float32" if x.dtype.size == 2 else dtype
    expected = tf.cast(tf.constant(value * before * after, wide), dtype)
    for name, out in found.items():
        assert out.dtype == x.dtype
        np.testing.assert_allclose(tf.cast(out, tf.float64), np.full(out.shape, float(expected)), err_msg=name,
                                   rtol=1e-15 if dtype == "float64" else 0)


def test_a_sum_is_rounded_once():
    x, size = tf.constant([0.25, 2047.0], tf.float16), hvd.size()
    total = hvd.allreduce(x, op=hvd.Sum, prescale_factor=1e5, postscale_factor=1 / (2.5e4 * size))
    assert float(total[0]) == 1.0  # 2.5e4 is no float16
    thirds = hvd.allreduce(x, op=hvd.Sum, prescale_factor=1 / 3)
    assert float(thirds[1]) == {2: 1365.0, 3: 2047.0, 4: 2730.0}[size]
    uneven = hvd.allreduce(tf.constant([1 if hvd.rank() == 0 else 2]), postscale_factor=size)
    assert int(uneven[0]) == 2 * size - 1  # divided and multiplied at once, as Horovod does


def test_a_mean_of_halves_does_not_overflow():
    out = hvd.allreduce(tf.constant([60000.0], tf.float16))
    assert out.numpy()[0] == np.float16(60000)
    near = hvd.allreduce(tf.constant([0.1 * (hvd.rank() + 1)]), compression=hvd.Compression.fp16)
    np.testing.assert_allclose(near, [np.mean(ranks(lambda r: 0.1 * (r + 1)))], rtol=2e-3)


def test_grouped_allreduce_mixes_types():
    rank = hvd.rank()
    xs = [tf.fill([2], float(rank)), tf.fill([3, 1], tf.cast(rank, tf.int32)), tf.constant(rank * 2.0)]
    for out in both(lambda: hvd.grouped_allreduce(xs, op=hvd.Sum)):
        total = int(ranks().sum())
        np.testing.assert_array_equal(out[0], [total] * 2)
        np.testing.assert_array_equal(out[1], [[total]] * 3)
        assert float(out[2]) == 2 * total and out[1].dtype == tf.int32


@pytest.mark.parametrize("more", [{}, {"op": hvd.Max}, {"prescale_factor": 0.5, "postscale_factor": 3.0},
                                  {"compression": hvd.Compression.fp16}], ids=["mean", "max", "factors", "fp16"])
def test_a_group_is_what_its_members_are(carried, more):
    rank = hvd.rank()
    xs = [tf.reshape(tf.range(6.0) + rank, [2, 3]), tf.constant([rank, 7]), tf.constant(0.25 * rank, tf.float64)]
    for one, x in zip(hvd.grouped_allreduce(xs, **more), xs):
        np.testing.assert_array_equal(one, hvd.allreduce(x, **more))
    rows = [tf.fill([hvd.size() + 1, 2], float(rank)), tf.fill([hvd.size()], rank)]
    for one, x in zip(hvd.grouped_allgather(rows), rows):
        np.testing.assert_array_equal(one, hvd.allgather(x))
    for one, x in zip(hvd.grouped_reducescatter(rows), rows):
        np.testing.assert_array_equal(one, hvd.reducescatter(x))


def test_gradients_flow_through_a_group():
    x, y = tf.constant([1.0, 2.0]), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        a, b = hvd.grouped_allreduce([x, y])
        total = tf.reduce_sum(a) + 2 * b
    np.testing.assert_allclose(tape.gradient(total, x), [1.0, 1.0], rtol=1e-6)
    with tf.GradientTape() as tape:
        tape.watch(y)
        b = 2 * hvd.grouped_allreduce([x, y])[1]
    np.testing.assert_allclose(tape.gradient(b, y), 2.0, rtol=1e-6)


def test_a_rank_that_brings_fewer_tensors_is_told_at_once():
    """Then it meets by hand the tensor that the first rank has more, so that this test can continue."""
    count = 3 if hvd.rank() == 0 else 2
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched ALLREDUCE tensor shapes"):
        try:
            hvd.grouped_allreduce([tf.ones([2])] * count, op=hvd.Sum, name="unlike")
        finally:
            if count == 2:
                hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="unlike.2")


@pytest.mark.world_size(2)
def test_the_bench_of_single_calls(control, monkeypatch, capsys):
    """Every call gives what the same call of Horovod gives."""
    monkeypatch.setattr(eager, "CALLS", 1)
    session = Session(control, basics.wire(), None, "tensorflow", "here")
    assert eager.bench(session, argparse.Namespace(repeats=2, jsonl="", markdown=False)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " - " in line]
    assert len(rows) == (10 if control.rank == 0 else 0)


def test_a_constant_is_summed_in_every_call(carried):
    """Rank 0's graph holds a constant there, which nothing may take for the result of the first call."""
    @tf.function
    def step(x):
        return hvd.allreduce(tf.constant([1.0]) if hvd.rank() == 0 else x, op=hvd.Sum, name="mixed")

    for value in (1.0, 5.0, 7.0):
        assert float(step(tf.constant([value]))[0]) == 1.0 + value * (hvd.size() - 1)


def test_rows_of_unequal_number(carried):
    own = tf.fill([hvd.rank(), 2], float(hvd.rank()))
    expected = np.repeat(np.arange(hvd.size()), np.arange(hvd.size()))
    for out in both(hvd.allgather, own):
        np.testing.assert_array_equal(out[:, 1], expected)
    flags = hvd.allgather(tf.constant([hvd.rank() == 0, True]))
    assert flags.numpy().sum() == hvd.size() + 1 and flags.dtype == tf.bool
    halves = hvd.allgather(tf.cast([hvd.rank()], tf.bfloat16))
    np.testing.assert_array_equal(tf.cast(halves, tf.float32), ranks())


def test_broadcast_from_the_last(carried):
    last = hvd.size() - 1
    for out in both(lambda x: hvd.broadcast(x, last), tf.constant([hvd.rank(), 7], tf.uint32)):
        np.testing.assert_array_equal(out, [last, 7])
    with pytest.raises(UserError, match=f"root_rank {hvd.size()}"):
        hvd.broadcast(tf.constant(1.0), hvd.size())


def test_alltoall(carried):
    size, rank = hvd.size(), hvd.rank()
    out = hvd.alltoall(tf.range(size * 2) + 100 * rank)
    np.testing.assert_array_equal(out, [100 * p + 2 * rank + i for p in range(size) for i in range(2)])
    splits = [p + 1 for p in range(size)]  # p + 1 rows to rank p
    rows = tf.constant([[float(rank), float(p)] for p in range(size) for _ in range(p + 1)])
    for got, received in both(hvd.alltoall, rows, tf.constant(splits)):
        np.testing.assert_array_equal(received, [rank + 1] * size)
        np.testing.assert_array_equal(got, [[p, rank] for p in range(size) for _ in range(rank + 1)])


def test_reducescatter(carried):
    size, rank = hvd.size(), hvd.rank()
    rows = size + 1  # the first rank gets one more
    x = tf.reshape(tf.range(rows * 2, dtype=tf.float32), [rows, 2]) * (rank + 1)
    whole = np.arange(rows * 2).reshape(rows, 2) * (size + 1) / 2
    for out in both(hvd.reducescatter, x):
        np.testing.assert_allclose(out, np.array_split(whole, size)[rank], rtol=1e-6)
    both_parts = hvd.grouped_reducescatter([x, x[:size]], op=hvd.Sum)
    np.testing.assert_allclose(both_parts[0], np.array_split(whole, size)[rank] * size, rtol=1e-6)


def test_objects_and_join():
    assert hvd.broadcast_object({"from": hvd.rank()}, 1) == {"from": 1}
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]
    if hvd.rank() == 0:  # has one batch more than the others
        hvd.allreduce(tf.constant([1.0]), op=hvd.Sum, name="uneven")
    assert 0 <= int(hvd.join()) < hvd.size()


def test_gradients_flow_through_collectives():
    x = tf.constant([1.0, 2.0])
    weight = float(hvd.rank() + 1)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        summed = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * weight)
        gathered = tf.reduce_sum(hvd.allgather(x) * weight)
    total = sum(ranks(lambda r: r + 1.0))
    np.testing.assert_allclose(tape.gradient(summed, x), [total] * 2)
    np.testing.assert_allclose(tape.gradient(gathered, x), [total / hvd.size()] * 2, rtol=1e-6)  # as Horovod defines


@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_gradients_of_every_type(dtype):
    """Eager, where a gradient may come in another type than the forward's, as Horovod takes it; and in a function."""
    size, rank = hvd.size(), hvd.rank()
    x, total = tf.cast(tf.ones([size, 2]), dtype), size * (size + 1) / 2
    calls = {"allgather": (lambda x: hvd.allgather(x), total / size),
             "broadcast": (lambda x: hvd.broadcast(x, 1), total / size if rank == 1 else 0),
             "alltoall": (lambda x: hvd.alltoall(x), None)}
    if dtype != "complex64":
        calls |= {"allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), total),
                  "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), None)}
    for name, (call, expected) in calls.items():
        def grad(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
            dy = tf.cast(tf.fill(tf.shape(y), rank + 1), "complex64" if dtype == "complex64" else "float32")
            return tape.gradient(y, x, dy)

        for found in (grad(x), tf.function(grad)(x)):
            assert found is not None and found.dtype == x.dtype, name
            rows = ([p + 1 for p in range(size)] if expected is None else [expected] * size)
            rows = [row * size for row in rows] if name == "reducescatter" else rows  # as Horovod defines
            np.testing.assert_allclose(tf.cast(found, tf.complex64), np.repeat(rows, 2).reshape(size, 2), rtol=1e-2)


def test_process_sets():
    name = "first" if hvd.rank() in SETS["first"].ranks else "rest"
    mine, other = SETS[name], SETS["rest" if name == "first" else "first"]
    assert mine.included() and not other.included() and mine.size() == len(mine.ranks)
    assert mine.ranks[mine.rank()] == hvd.rank() and sorted(hvd.get_process_set_ids_and_ranks()) == [0, 1, 2]
    out = hvd.allreduce(tf.constant([float(hvd.rank())]), process_set=mine)
    np.testing.assert_allclose(out, [np.mean(mine.ranks)], rtol=1e-6)
    root = mine.ranks[-1]
    assert float(hvd.broadcast(tf.constant(float(hvd.rank())), root, process_set=mine)) == root
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
    exchange = hvd.GradientExchange(process_set=mine)
    v = tf.Variable([0.0])
    np.testing.assert_allclose(exchange([tf.constant([float(hvd.rank())])], [v])[0], [np.mean(mine.ranks)], rtol=1e-6)
    outside = hvd.GradientExchange(process_set=other)([tf.constant([3.0])], [v])
    np.testing.assert_array_equal(outside[0], [3.0])  # its own
    with pytest.raises(ValueError, match="dynamic"):
        hvd.add_process_set([0])


def test_broadcast_variables(carried):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dropout(0.5),
                              keras.layers.BatchNormalization(), keras.layers.Dense(2, dtype="bfloat16")])
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=hvd.size() - 1)
    hvd.broadcast_variables(optimizer.variables, root_rank=1)
    everyone = hvd.allgather_object([np.array(tf.cast(v, tf.float32)) for v in model.variables])
    for other in everyone:
        for a, b in zip(other, everyone[0]):
            np.testing.assert_array_equal(a, b)
    assert {str(v.dtype) for v in model.variables} >= {"int64", "bfloat16"}  # of the dropout's generator, of a layer
    assert float(optimizer.learning_rate) == pytest.approx(0.2)


def test_other_variables_are_an_error_on_every_rank():
    shape = [2, 3] if hvd.rank() == 1 else [3, 2]
    with pytest.raises(UserError, match=r"at place 1 rank 1 has .*float32 \[2, 3\].*rank 0 has .*\[3, 2\]"):
        hvd.broadcast_variables([tf.Variable([1.0]), tf.Variable(tf.zeros(shape))], 0)
