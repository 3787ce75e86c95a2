"""The node that sums gradients in shared memory, in one process, over a transport that hears itself twice."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdtrain.backends.tensorflow.nodes import host_node, node_errors  # noqa: E402
from hvdtrain.backends.tensorflow.ops import zeros  # noqa: E402
from hvdtrain.comm.collectives import shared  # noqa: E402
from hvdtrain.comm.collectives.shared import SharedUnavailable  # noqa: E402
from hvdtrain.core.errors import PeerFailed  # noqa: E402
from hvdtrain.tensorflow import transports  # noqa: E402
from hvdtrain.tensorflow.transports import SharedSum  # noqa: E402

SHAPES = ((transports.SMALL,), (3, 2), (), (130, 257), (0, 4))
DTYPES = ("float32", "float64", "float32", "float32", "float32")


class Twice:
    """The transport, with the calls and the vectors that were handed to it."""

    def __init__(self):
        self.calls, self.begins, self.error = [], [], None

    def buffers(self, n, dtype, slots):
        return [zeros(n, dtype) for _ in range(slots)] if n else []

    def allreduce(self, flat_N, name, op):
        if self.error:
            raise self.error
        self.calls.append((name, op))
        self.begins.append(flat_N.ctypes.data)
        flat_N *= {"sum": 2, "mean": 1}[op]
        return SimpleNamespace(wait=lambda: flat_N)

    def looked(self):
        return 0, 0.0


def node(wire, mean=False, shapes=SHAPES, dtypes=DTYPES):
    back = lambda dys: [dy * (1 if mean else 2) for dy in dys]  # noqa: E731
    return SharedSum(wire, "tape", shapes, dtypes, mean, back)


def values(turn=0):
    rng = np.random.default_rng(turn)
    return [tf.constant(rng.standard_normal(shape), dtype) for shape, dtype in zip(SHAPES, DTYPES)]


@pytest.mark.parametrize("mean", [False, True])
def test_each_gradient_comes_back_summed(mean):
    wire = Twice()
    graph = tf.function(node(wire, mean), autograph=False)
    for turn in range(3):
        for got, x in zip(graph(values(turn)), values(turn)):
            assert got.dtype == x.dtype and got.shape == x.shape
            np.testing.assert_array_equal(got, x * (1 if mean else 2))
    op = "mean" if mean else "sum"
    assert wire.calls == 3 * [("tape.0", op), ("tape.1", op)]


def test_memory_is_used_again_in_every_step():
    """Nobody holds the sums after a step, so two vectors are enough for any number."""
    wire = Twice()
    sums, variable = node(wire, shapes=[(200, 200)], dtypes=["float32"]), tf.Variable(tf.zeros([200, 200]))
    train = tf.function(lambda x: variable.assign_sub(0.1 * sums([x])[0]), autograph=False)
    for _ in range(10):
        train(tf.ones([200, 200]))
    assert len(set(wire.begins)) <= 2
    np.testing.assert_allclose(variable, -2.0, rtol=1e-6)


def test_a_sum_that_somebody_keeps_stays():
    wire = Twice()
    sums, variable = node(wire, shapes=[(200, 200)], dtypes=["float32"]), tf.Variable(tf.zeros([200, 200]))

    @tf.function(autograph=False)
    def step(x, keep):
        total, = sums([x])
        tf.cond(keep, lambda: tf.identity(variable.assign(total)), lambda: total)
        return total

    kept = [step(tf.fill([200, 200], float(i)), tf.constant(i == 1)) for i in range(8)]
    for i, total in enumerate(kept):
        np.testing.assert_array_equal(total, np.full((200, 200), 2.0 * i))
    np.testing.assert_array_equal(variable, np.full((200, 200), 2.0))


def test_gradients_flow_through_the_sum():
    sums = node(Twice(), shapes=[(3,), (transports.SMALL,)], dtypes=["float32", "float32"])

    @tf.function(autograph=False)
    def graph(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            small, large = sums([x, y])
            value = tf.reduce_sum(small ** 2) + 3 * tf.reduce_sum(large)
        return tape.gradient(value, [x, y])

    dx, dy = graph(tf.constant([1.0, 2.0, 3.0]), tf.zeros([transports.SMALL]))
    np.testing.assert_array_equal(dx, [8, 16, 24])
    np.testing.assert_array_equal(dy, np.full(transports.SMALL, 6.0))


def test_what_ends_the_node_comes_out_as_itself():
    wire = Twice()
    graph = tf.function(node(wire, shapes=[(3,)], dtypes=["float32"]), autograph=False)
    wire.error = PeerFailed("rank 1 left")
    with pytest.raises(PeerFailed, match="rank 1 left"), node_errors():
        graph([tf.zeros([3])])
    with pytest.raises(tf.errors.OpError, match="rank 1 left"):
        graph([tf.zeros([3])])
    with pytest.raises(tf.errors.OpError, match="nobody's"), node_errors():
        raise tf.errors.UnknownError(None, None, "nobody's")


def test_what_ends_a_call_outside_of_graphs_comes_out_as_itself():
    def leave(_):
        raise PeerFailed("rank 1 left")

    with pytest.raises(PeerFailed, match="rank 1 left"):
        host_node(leave, [tf.zeros([3])], tf.float32, "a test", stateful=True)


@pytest.mark.parametrize("lacks", ["", "ranks", "MPI", "threads", "a host", "consent", "a CPU", "memory"])
def test_where_memory_is_shared(monkeypatch, lacks):
    """On every rank alike, so what one rank lacks leaves all to Horovod."""
    def wire(comm, timeout_s):
        if lacks == "memory":
            raise SharedUnavailable("separate")
        return "the wire"

    others = [("a", lacks not in ("a CPU", "threads", "consent"))]
    control = SimpleNamespace(size=1 if lacks == "ranks" else 2, rank=0, node="b" if lacks == "a host" else "a",
                              gather=lambda row: [row, *others])
    boot = SimpleNamespace(has_mpi=lambda: lacks != "MPI", mpi_threads=lambda: lacks != "threads",
                           mpi_comm=lambda: None, stall_bound=lambda env: 60.0)
    monkeypatch.setattr(shared, "boot", boot)
    monkeypatch.setattr(shared, "SharedCollectives", wire)
    monkeypatch.setenv(shared.KEY, "horovod" if lacks == "consent" else "auto")
    with pytest.warns(UserWarning, match="Horovod: separate") if lacks == "memory" else nullcontext():
        assert shared.open_shared(control, able=lacks != "a CPU") == (None if lacks else "the wire")
