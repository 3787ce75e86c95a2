"""Collectives of a wire of host memory as nodes of TensorFlow's graphs: their order, their memory, their errors."""

from __future__ import annotations

import time

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
from hvdtrain.backends.tensorflow import graphs, nodes  # noqa: E402
from hvdtrain.backends.tensorflow.collectives import peer_failures  # noqa: E402
from hvdtrain.backends.tensorflow.ops import Ops  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout  # noqa: E402


class Wire(NullCollectives):
    """A transport of two ranks outside of graphs that keeps the order of its calls; ``flown``: its vector in flight."""

    name, in_graph, host, overlaps = "host", False, True, False

    def __init__(self, error=None, slow_s=0.0):
        super().__init__(1, 2)
        self.calls, self.flown, self.error, self.slow_s = [], np.zeros(8, np.float32), error, slow_s

    def flight(self, n, dtype):
        return self.flown[:n]

    def reducescatterv(self, flat_N, sizes_P, name):
        assert np.shares_memory(flat_N, self.flown)
        self.calls.append(name)
        time.sleep(self.slow_s)
        if self.error:
            raise self.error
        flat_N *= 2
        return ReadyHandle(flat_N[sizes_P[0]:])


def traced(wire, n=3):
    own = Ops().during_backward(wire)

    @tf.function(jit_compile=False, autograph=False)
    def graph(x):
        ready_s = tf.timestamp()
        parts = [own.reducescatterv(x + i, [3, 5], f"b{i}").wait() for i in range(n)]
        return parts, nodes.blocked_s(ready_s + 60, parts)

    return graph


def test_nodes_run_in_the_order_in_which_they_are_traced():
    wire = Wire()
    x = np.arange(8, dtype=np.float32)
    for _ in range(2):
        parts, _ = traced(wire, 9)(x)
    assert wire.calls == [f"b{i}" for i in range(9)] * 2
    for i, part in enumerate(parts):  # each its own memory, and the argument is as it was
        assert part.shape == (5,)
        np.testing.assert_array_equal(part, 2 * (x[3:] + i))
    np.testing.assert_array_equal(x, np.arange(8))


@pytest.mark.parametrize("error", [PeerFailed("rank 0 has ended"), WaitTimeout("late"), UserError("got", "other")],
                         ids=lambda e: type(e).__name__)
def test_what_happens_in_a_node_comes_out_as_itself(error):
    wire = Wire(error)
    with pytest.raises(type(error)) as found, peer_failures():
        traced(wire)(np.zeros(8, np.float32))
    assert found.value is error and wire.calls == ["b0"]


def test_an_error_of_tensorflow_s_own_stays_one():
    with pytest.raises(tf.errors.InvalidArgumentError), peer_failures():
        tf.function(lambda x: tf.debugging.check_numerics(x, "bad"))(tf.constant(np.nan))


@pytest.mark.parametrize("threads", (1, 4))
def test_nodes_that_hold_the_only_thread_make_backward_wait(threads, monkeypatch):
    monkeypatch.setattr(nodes, "_threads", lambda: threads)
    seconds = float(traced(Wire(slow_s=0.05))(np.zeros(8, np.float32))[1])
    assert (0.15 <= seconds < 30) if threads == 1 else seconds == 0


def test_all_collectives_of_ranks_as_threads():
    x = np.arange(6, dtype=np.float32)

    def rank(control, wire):
        own = Ops().during_backward(wire)

        @tf.function(jit_compile=False, autograph=False)
        def graph(x):
            x = x * (wire.rank + 1)
            return [own.allreduce(x, "a").wait(), own.allgather(x, "b").wait(), own.broadcast(x, "c", 1).wait(),
                    own.alltoall(tf.reshape(x, [2, 3]), "d").wait(), own.reducescatter(x, "e").wait(),
                    own.allgatherv(x[:4] if wire.rank else x[:2], [2, 4], "f").wait()]

        assert own.in_graph and not own.host and (own.buffer(3, "float32"), own.flight(3, "float32")) == (None, None)
        return [y.numpy() for y in graph(x)]

    first, second = LockstepWorld(2).run(rank)
    for own, r in ((first, 0), (second, 1)):
        np.testing.assert_array_equal(own[0], 3 * x)
        np.testing.assert_array_equal(own[1], [x, 2 * x])
        np.testing.assert_array_equal(own[2], 2 * x)
        np.testing.assert_array_equal(own[3], [x[3 * r:3 * r + 3], 2 * x[3 * r:3 * r + 3]])
        np.testing.assert_array_equal(own[4], 3 * x[3 * r:3 * r + 3])
        np.testing.assert_array_equal(own[5], [*x[:2], *2 * x[:4]])


def test_a_call_takes_the_graph_of_its_arrays():
    calls = graphs.Calls()

    def call(x, kind="twice", factor=2.0):
        return calls.call(kind, lambda scale, x: x * tf.cast(scale, x.dtype), [x], factor)

    for x in (np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.ones((2, 3), np.float64),
              np.ones((2, 3), np.float32), tf.ones([2, 3])):
        got = call(x)
        assert got.dtype == x.dtype and tuple(got.shape) == tuple(x.shape) and np.all(got.numpy() == 2)
    assert np.all(call(np.ones((2, 3), np.float32), factor=3.0).numpy() == 3)
    before = calls.latest
    calls.drop()
    call(np.ones((2, 3), np.float32))
    assert calls.latest is not before


def test_direct_calls_see_variables_and_deferred_captures():
    variable, factor = tf.Variable(1.0), [2.0]

    def captured():
        return tf.constant(factor[0])

    def graph(x, y):
        deferred = tf.compat.v1.get_default_graph().capture_call_time_value(captured, tf.TensorSpec([], tf.float32))
        return (x - y) * variable, [x * deferred, None]

    specs = [tf.TensorSpec([], tf.float32)] * 2
    plain = graphs.direct(tf.function(lambda x, y: ((x - y) * variable, [x, None]), input_signature=specs)
                          .get_concrete_function())
    deferred = graphs.direct(tf.function(graph, input_signature=specs, autograph=False).get_concrete_function())
    three, one = tf.constant(3.0), tf.constant(1.0)
    assert float(plain(three, one)[0]) == 2 and plain(three, one)[1][1] is None
    assert float(deferred(three, one)[1][0]) == 6
    variable.assign(5.0)
    factor[0] = 4.0
    assert float(plain(three, one)[0]) == 10 and float(deferred(three, one)[1][0]) == 12
