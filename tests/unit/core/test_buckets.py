"""The fusion plan: every parameter once, in backward's order, within the size, one dtype a bucket."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.core.units import MIB
from hvdtrain.parallel.data_parallel.attach import buckets_of

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
params = st.lists(st.tuples(shapes, dtypes), max_size=30).map(
    lambda rows: [ParamSpec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)])


@given(params, st.floats(1e-6, 1e-2))
def test_every_plan(params, bucket_mb):
    plan = plan_buckets(params, bucket_mb)
    assert sorted(i for b in plan for i in b.params) == list(range(len(params)))
    assert [b.index for b in plan] == list(range(len(plan)))
    for bucket in plan:
        assert bucket.params and list(bucket.params) == sorted(bucket.params, reverse=True)
        assert {params[i].dtype for i in bucket.params} == {bucket.dtype}
        assert bucket.shapes == tuple(params[i].shape for i in bucket.params)
        sizes = [params[i].n for i in bucket.params]
        assert list(bucket.offsets) == [sum(sizes[:k]) for k in range(len(sizes))] and bucket.n == sum(sizes)
        assert bucket.nbytes == bucket.n * itemsize(bucket.dtype)
        filled = [i for i in bucket.params if params[i].n]
        assert bucket.nbytes <= bucket_mb * MIB or len(filled) == 1


@given(params, st.floats(1e-6, 1e-2))
def test_a_bucket_is_closed_only_when_it_is_full(params, bucket_mb):
    """Two neighbours of one dtype would not fit into one, or the plan would waste a collective."""
    last: dict[str, Bucket] = {}
    for bucket in plan_buckets(params, bucket_mb):
        before = last.get(bucket.dtype)
        if before is not None:
            first = params[bucket.params[0]]
            assert before.nbytes + first.n * itemsize(first.dtype) > bucket_mb * MIB
        last[bucket.dtype] = bucket


@given(params)
def test_one_large_bucket_a_dtype(params):
    assert len(plan_buckets(params, 1e9)) == len({p.dtype for p in params})


def test_by_hand():
    """Three layers of 4, 8 and 2 kB; 10 kB a bucket, the last layer first."""
    layers = [
        ParamSpec("a", (1000,), "float32"),
        ParamSpec("b", (2, 1000), "float32"),
        ParamSpec("c", (500,), "float32"),
    ]
    first, second = plan_buckets(layers, 10_000 / MIB)
    assert first == Bucket(0, (2, 1), ((500,), (2, 1000)), (0, 500), 2500, "float32") and first.nbytes == 10_000
    assert second == Bucket(1, (0,), ((1000,),), (0,), 1000, "float32")


def test_a_parameter_larger_than_the_limit_stands_alone():
    plan = plan_buckets([ParamSpec(n, (k,), "float32") for n, k in (("a", 1), ("big", 10_000), ("c", 1))], 1000 / MIB)
    assert [b.params for b in plan] == [(2,), (1,), (0,)]


def test_of_nothing_nothing():
    assert plan_buckets([], 16.0) == []


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8), ("int8", 1)])
def test_itemsize(dtype, size):
    assert itemsize(dtype) == size


def test_a_scalar_has_one_element():
    assert plan_buckets([ParamSpec("s", (), "float32")], 1.0)[0].n == 1 == np.prod(())


@pytest.mark.parametrize("asked, compression, drives, mb, noted", [
    ("auto", "none", True, 2, False), ("auto", "int8", True, 16, False), ("auto", "none", False, 16, False),
    (16.0, "none", True, 16, True), (16.0, "int8", True, 16, False), (16.0, "none", False, 16, False),
    (3.0, "none", True, 3, False)])
def test_the_size_that_bucket_mb_means(asked, compression, drives, mb, noted):
    """16 was the default, and meant 2 where auto means it; whoever has it in a file hears of it."""
    collectives = SimpleNamespace(drives=drives, overlaps=drives, in_graph=True, host=False)
    setup = SimpleNamespace(
        config=Config(compression=compression, exchange=ExchangeConfig(bucket_mb=asked)), collectives=collectives,
        parts=SimpleNamespace(params=SimpleNamespace(specs=[ParamSpec("p", (MIB // 8,), "float32")] * 40), replicas=()),
        group=SimpleNamespace(name=lambda kind: kind), notes=[])
    assert max(bucket.nbytes for bucket in buckets_of(setup)) == mb * MIB
    assert bool(setup.notes) is noted
