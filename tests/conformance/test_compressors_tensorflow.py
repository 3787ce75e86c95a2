"""Compressors with TensorFlow's ops, eagerly as the numpy reference, and inside a graph as eagerly."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
from compressor_cases import (  # noqa: E402
    MAKE,
    SHAPES,
    SIZES,
    buckets,
    check_like_numpy,
    check_not_finite_among_many,
    check_not_finite_is_seen,
    check_shards_are_those_of_the_sum,
    check_state_survives,
    check_zeros,
    gradient,
)

from hvdtrain.backends.tensorflow.ops import Ops  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.reducer.reducer import Reducer  # noqa: E402


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", MAKE)
def test_as_numpy(name, shapes, size):
    check_like_numpy(name, Ops, size, SHAPES[shapes])


@pytest.mark.parametrize("name", MAKE)
def test_what_is_not_finite_is_seen(name):
    check_not_finite_is_seen(name, Ops)


def test_what_is_not_finite_is_seen_among_many():
    check_not_finite_among_many(Ops)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", ["fp16", "int8", "topk-momentum"])
def test_shards_are_those_of_the_sum(name, in_graph):
    """Of two ranks in a graph: each holds one of TensorFlow's threads while it waits."""
    def graph(ops, wire, step):
        return ops.during_backward(wire), tf.function(step, autograph=False)

    more = {"graph": graph} if in_graph else {}
    check_shards_are_those_of_the_sum(name, Ops, 2 if in_graph else 3, SHAPES["model"], **more)


@pytest.mark.parametrize("name", MAKE)
def test_zeros(name):
    check_zeros(name, Ops)


@pytest.mark.parametrize("name", MAKE)
def test_state_survives(name):
    check_state_survives(name, Ops)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shapes", ["model", "three"])
@pytest.mark.parametrize("name", MAKE)
def test_in_a_graph_as_eagerly(name, shapes, size):
    """Each stage is traced once; each of two ranks hears only itself."""
    plan, compressor = buckets(SHAPES[shapes]), MAKE[name]()
    eager, traced = (Reducer(plan, compressor, NullCollectives(0, size), Ops()) for _ in range(2))
    traces = []

    def trace(flat_N):
        traces.append(traced.stage)
        traced.start(0, flat_N)
        return traced.finish()[0]

    graphs = {}
    for step in range(6):
        own = tf.constant(gradient(0, step, plan[0].n))
        for reducer in (eager, traced):
            reducer.begin()
        eager.start(0, own)
        want = eager.finish()[0]
        graph = graphs.setdefault(traced.stage, tf.function(trace, autograph=False))
        got = graph(own)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * (np.abs(want).max() + 1e-30))
    assert traces == sorted({compressor.stage(step) for step in range(6)})
    for key, got in traced.state.of(0).items():
        np.testing.assert_allclose(got, eager.state.of(0)[key], rtol=0, atol=1e-4 * (np.abs(got).max() + 1e-30))


def test_equals_among_the_largest_in_a_graph():
    """Both branches of the search for candidates, in one traced function."""
    ops = Ops()
    graph = tf.function(lambda x: ops.topk(x, 1500), autograph=False)
    draw = np.random.default_rng(0)
    for x in (draw.standard_normal(200_000), np.round(draw.standard_normal(200_000)), np.full(200_000, np.nan)):
        _, index = graph(tf.constant(x, tf.float32))
        assert index.shape == (1500,)
        want = np.argsort(-np.abs(x), kind="stable")[:1500]
        assert np.isnan(x).all() or sorted(index.numpy().tolist()) == sorted(want.tolist())
