"""The reducer's driving: order, names, several rounds a bucket, state, and what it refuses (numpy over lockstep)."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors.base import Uncompressed
from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import AllGather, AllReduce, AllToAll, ParamSpec
from hvdtrain.core.units import MIB

SIZES = (5, 3, 4)


def buckets(sizes=SIZES, dtype="float32"):
    """Return a bucket for each size, bucket i of sizes[i] elements."""
    params = [ParamSpec(f"p{i}", (n,), dtype) for i, n in enumerate(reversed(sizes))]
    plan = plan_buckets(params, 1 / MIB)
    assert [b.n for b in plan] == list(sizes)
    return plan


class Scaled(Uncompressed):
    """Two rounds: agree on the largest magnitude, then sum multiples of a 2^16th of it; counts its exchanges."""

    name = "scaled"

    def init(self, ops, bucket):
        return {"count": np.zeros(1), "residual": np.zeros(bucket.n)}

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        all_P1 = yield AllGather(ops.reshape(ops.abs_max(flat_N), (1,)))
        assert all_P1.shape == (size, 1)
        unit = float(all_P1.max()) / 2**16 or 1.0
        whole_N = ops.round(flat_N / unit)
        total_N = yield AllReduce(whole_N)
        return total_N * unit, {"count": state["count"] + 1, "residual": flat_N - whole_N * unit}


class Rounds(Uncompressed):
    """Each bucket takes as many rounds as it has elements, of every kind; the sum is right all the same."""

    name = "rounds"

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        parts = []
        for i in range(len(flat_N)):
            if i % 3 == 0:
                parts.append((yield AllReduce(flat_N[i:i + 1].copy())))
            elif i % 3 == 1:
                parts.append((yield AllGather(flat_N[i:i + 1])).sum(axis=0))
            else:
                parts.append((yield AllToAll(np.repeat(flat_N[i:i + 1][None], size, axis=0))).sum(axis=0))
        return np.concatenate(parts), state


class Recorder:
    """Passes calls on and notes their kinds and names; `open` counts handles that were not waited for."""

    def __init__(self, wire):
        self._wire, self.calls, self.open, self.most_open, self.drives = wire, [], 0, 0, False
        self.rank, self.size, self.host, self.dtypes, self.name, self.reductions = (
            wire.rank,
            wire.size,
            wire.host,
            wire.dtypes,
            wire.name,
            wire.reductions,
        )

    def __getattr__(self, kind):
        def call(x, name, *op):
            self.calls.append((kind, name))
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            handle, outer = getattr(self._wire, kind)(x, name, *op), self

            class Handle:
                def wait(self):
                    outer.open -= 1
                    return handle.wait()
            return Handle()
        return call


def vectors(rank, step=0, sizes=SIZES):
    draw = np.random.default_rng([rank, step])
    return [draw.integers(-100, 100, n).astype(np.float32) for n in sizes]


def one_step(reducer, flats, order):
    for i in order:
        reducer.start(i, flats[i])
    return reducer.finish()


@pytest.mark.parametrize("make", [NoCompression, Scaled, Rounds])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_whatever_the_order_of_handing_over(make, size):
    """Every rank fills its buckets in another order at every step; the transport sees one order (law 5)."""
    orders = list(itertools.permutations(range(3)))

    def work(control, wire):
        seen = Recorder(wire)
        reducer = Reducer(buckets(), make(), seen, Ops())
        out = []
        for step in range(6):
            sums = one_step(reducer, vectors(control.rank, step), orders[(step + control.rank) % 6])
            out.append([np.array(s) for s in sums])
        return out, seen.calls, seen.open

    results = LockstepWorld(size).run(work)
    for step in range(6):
        for bucket in range(3):
            want = sum(vectors(r, step)[bucket] for r in range(size))
            for out, _, _ in results:
                np.testing.assert_allclose(out[step][bucket], want, atol=0.02 if make is Scaled else 0)
    assert all(calls == results[0][1] and left == 0 for _, calls, left in results)


def test_names_and_order_on_the_wire():
    seen = Recorder(NullCollectives(0, 2))
    reducer = Reducer([replace(b, group="g0-1.grad") for b in buckets()], Scaled(), seen, Ops())
    reducer.start(1, np.ones(3, np.float32))
    reducer.start(2, np.ones(4, np.float32))
    assert seen.calls == []  # bucket 0 goes first
    reducer.start(0, np.ones(5, np.float32))
    first = [("allgather", f"g0-1.grad.b{i}.r0") for i in range(3)]
    assert seen.calls == first and seen.open == 3  # all under way before anything is waited for
    reducer.finish()
    assert seen.calls == first + [("allreduce", f"g0-1.grad.b{i}.r1") for i in range(3)]
    assert seen.open == 0 and seen.most_open == 3
    one_step(reducer, [np.ones(n, np.float32) for n in SIZES], (0, 1, 2))
    assert seen.calls[6:] == seen.calls[:6]  # the same names at every step, so that Horovod's cache holds
    for i, n in enumerate(SIZES):
        reducer.start(i, np.ones(n, np.float32), "graph.2")
    reducer.finish()
    assert {name for _, name in seen.calls[12:]} == {f"graph.2.b{i}.r{r}" for i in range(3) for r in range(2)}


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_any_numbers_of_rounds(sizes, random):
    order = random.sample(range(len(sizes)), len(sizes))
    seen = Recorder(NullCollectives())
    sums = one_step(Reducer(buckets(sizes), Rounds(), seen, Ops()), vectors(0, 0, sizes), order)
    for got, want in zip(sums, vectors(0, 0, sizes)):
        np.testing.assert_array_equal(got, want)
    names = [name for _, name in seen.calls]
    assert sorted(names) == sorted(f"world.b{i}.r{k}" for i, n in enumerate(sizes) for k in range(n))
    rounds = [int(name.rpartition("r")[2]) for name in names]
    assert rounds == sorted(rounds)  # a round of all buckets before the next of any


def test_state_is_kept_per_bucket_and_step():
    reducer = Reducer(buckets(), Scaled(), NullCollectives(), Ops())
    for step in range(3):
        one_step(reducer, vectors(0, step), (0, 1, 2))
    assert [s["count"][0] for s in reducer.state.all()] == [3, 3, 3]
    assert [len(s["residual"]) for s in reducer.state.all()] == list(SIZES)


def test_a_bucket_handed_over_twice_or_missing_is_our_bug():
    reducer = Reducer(buckets(), NoCompression(), NullCollectives(), Ops())
    reducer.start(0, np.ones(5, np.float32))
    with pytest.raises(AssertionError, match="bucket 0 was passed twice"):
        reducer.start(0, np.ones(5, np.float32))
    with pytest.raises(AssertionError, match="1 of 3 buckets"):
        reducer.finish()


def test_a_failed_exchange_leaves_nothing_behind():
    class Failing(NullCollectives):
        broken = True

        def allreduce(self, flat_N, name, op="sum"):
            if self.broken and name.endswith("b1.r1"):
                raise RuntimeError("the wire broke")
            return super().allreduce(flat_N, name, op)

    wire = Failing()
    reducer = Reducer(buckets(), Scaled(), wire, Ops())
    with pytest.raises(RuntimeError, match="the wire broke"):
        one_step(reducer, vectors(0), (0, 1, 2))
    wire.broken = False
    for got, want in zip(one_step(reducer, vectors(0, 1), (0, 1, 2)), vectors(0, 1)):
        np.testing.assert_allclose(got, want, atol=0.01)


def test_arrays_become_numpy_only_where_the_wire_lives_on_the_host():
    class Counting(Ops):
        def __init__(self):
            self.out = self.back = 0

        def to_host(self, x):
            self.out += 1
            return x

        def from_host(self, x):
            self.back += 1
            return x

    class OnHost(NullCollectives):
        host = True

    for wire, want in ((NullCollectives(), 0), (OnHost(), 6)):
        ops = Counting()
        one_step(Reducer(buckets(), Scaled(), wire, ops), vectors(0), (0, 1, 2))
        assert ops.out == ops.back == want


def test_a_type_that_the_wire_cannot_sum_is_refused():
    class Narrow(NullCollectives):
        dtypes = frozenset({"float32", "float64"})

    with pytest.raises(UserError, match="type bfloat16; expected types that null can sum: float32, float64"):
        Reducer(buckets(dtype="bfloat16"), NoCompression(), Narrow(0, 2), Ops())


# --- steps and state -----------------------------------------------------------------------------------------------

class Counting(Uncompressed):
    """Adds how often it was asked to the sum; warms up for two steps."""

    name = "counting"

    def __init__(self, setting=1):
        self.setting = setting

    def describe(self):
        return f"counting {self.setting}"

    def stage(self, step):
        return int(step >= 2)

    def init(self, ops, bucket):
        return {"count": ops.zeros(1, "float32")}

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        total_N = yield AllReduce(flat_N + state["count"] + 100 * stage)
        return total_N, {"count": state["count"] + 1}


def counts(reducer, steps=1):
    """Return the first element of bucket 0 after each of ``steps`` steps that begin from zeros."""
    out = []
    for _ in range(steps):
        reducer.begin()
        out.append(float(one_step(reducer, [np.zeros(n, np.float32) for n in SIZES], (2, 0, 1))[0][0]))
    return out


def counting(setting=1, plan=SIZES):
    return Reducer(buckets(plan), Counting(setting), NullCollectives(), Ops())


def test_a_step_knows_its_stage():
    assert counts(counting(), 4) == [0, 1, 102, 103]


def test_a_step_that_is_discarded_leaves_no_state():
    reducer = counting()
    counts(reducer, 3)
    reducer.begin()
    one_step(reducer, vectors(0), (0, 1, 2))
    assert [s["count"][0] for s in reducer.state.all()] == [4, 4, 4]
    reducer.state.discard()
    assert [s["count"][0] for s in reducer.state.all()] == [3, 3, 3]
    assert counts(reducer) == [103]


def test_a_step_that_is_never_discarded_keeps_no_state_before_it():
    reducer = counting()
    reducer.state.undoable = False
    counts(reducer, 3)
    reducer.state.discard()
    assert [s["count"][0] for s in reducer.state.all()] == [3, 3, 3] and reducer.state.steps == 2


def test_state_stays_where_a_sum_is_not_finite():
    reducer = counting()
    for index, flat_N in enumerate([np.zeros(5, np.float32), np.array([1, np.nan, 0], np.float32), np.zeros(4)]):
        reducer.start(index, flat_N)
    reducer.finish(finite_only=True)
    assert [s["count"][0] for s in reducer.state.all()] == [1, 0, 1]


def test_state_is_saved_and_restored_with_the_count_of_steps():
    reducer, other = counting(), counting()
    counts(reducer, 3)
    saved = reducer.state.saved()
    assert sorted(saved) == ["compressor.0.count", "compressor.1.count", "compressor.2.count", "compressor.mark",
                             "compressor.steps"]
    assert other.state.restore(saved) == "" and other.state.steps == 3
    assert counts(other, 2) == counts(reducer, 2) == [103, 104]
    assert saved["compressor.0.count"][0] == 3  # a copy


def test_state_of_another_plan_starts_anew_in_words():
    reducer = counting()
    counts(reducer, 3)
    saved = reducer.state.saved()
    for other in (counting(setting=2), counting(plan=(5, 3, 5))):
        assert "starts from scratch: compression, buckets or parameters differ" in other.state.restore(saved)
        assert [s["count"][0] for s in other.state.all()] == [0, 0, 0] and other.state.steps == 0
    assert "starts from scratch: the checkpoint has none" in counting().state.restore({})


def test_without_state_there_is_nothing_to_save_or_to_miss():
    reducer = Reducer(buckets(), NoCompression(), NullCollectives(), Ops())
    assert reducer.state.saved() == {} and reducer.state.restore({}) == ""


def test_a_reduction_that_the_wire_does_not_offer_is_refused():
    class Odd(Uncompressed):
        name = "odd"
        reductions = frozenset({"adasum"})

    class Plain(NullCollectives):
        reductions = frozenset()

    with pytest.raises(UserError, match="adasum over null, which does not offer it"):
        Reducer(buckets(), Odd(), Plain(0, 2), Ops())
    Reducer(buckets(), Odd(), NullCollectives(0, 2), Ops())
