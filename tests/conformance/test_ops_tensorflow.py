"""TensorFlow's ops pass the cases that every backend's ops must pass, eagerly and inside a graph."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
from ops_cases import CASES, name_of  # noqa: E402

from hvdtrain.backends.tensorflow.ops import Ops  # noqa: E402


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_ops(check):
    check(Ops())


def test_ops_in_a_graph():
    ops = Ops()

    @tf.function(input_signature=[tf.TensorSpec([6], tf.float32)])
    def graph(flat_N):
        parts = ops.unpack(flat_N, [(2, 2), (2,)])
        values, index = ops.topk(ops.pack(parts), 2)
        return ops.scatter_add(6, index, values), ops.from_bits16(ops.bits16(flat_N)), ops.orthogonalize(parts[0])

    x = np.array([3, -1, 4, 1, -5, 9], np.float32)
    sparse, rounded, q = graph(tf.constant(x))
    np.testing.assert_array_equal(sparse, [0, 0, 0, 0, -5, 9])
    np.testing.assert_array_equal(rounded, x)
    np.testing.assert_allclose(np.transpose(q) @ q, np.eye(2), atol=1e-5)


def test_a_cell_in_a_graph():
    """A cell made while a graph is traced belongs to no graph; reads and writes keep the program's order."""
    ops, made = Ops(), []

    @tf.function(autograph=False)
    def graph(x):
        if not made:
            made.append(ops.cell(np.zeros(2, np.float32)))
        cell, = made
        before = cell.read()
        cell.write(before + x)
        middle = cell.read()
        cell.write(middle * 2)
        return before, middle

    for want in ((0, 1), (2, 3), (6, 7)):
        np.testing.assert_array_equal([x[0] for x in graph(tf.ones(2))], want)
    kept = made[0].read()
    graph(tf.ones(2))
    np.testing.assert_array_equal(kept, [14, 14])
    np.testing.assert_array_equal(made[0].read(), [30, 30])


def test_a_host_copy_may_be_written_to():
    ops = Ops()
    x = tf.constant([1.0, 2.0])
    ops.to_host(x)[:] = 7
    np.testing.assert_array_equal(x, [1, 2])
