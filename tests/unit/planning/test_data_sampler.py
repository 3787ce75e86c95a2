"""The order of an epoch and its cuts: closed forms, and properties over any sizes."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.planning.batch.sampler import (
    BUCKETS,
    bucketed,
    cut,
    epoch_order,
    micro_batches,
    stable_order,
    steps_per_epoch,
)

WEIGHTS = st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e6)), min_size=1, max_size=9).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(-5, 2**63), st.integers(0, 1000))
def test_order_is_a_permutation_of_the_epoch(n, seed, epoch):
    order = epoch_order(n, seed, epoch, shuffle=True)
    assert order.dtype == np.int64 and sorted(order) == list(range(n))
    assert np.array_equal(order, epoch_order(n, seed, epoch, shuffle=True))
    assert np.array_equal(epoch_order(n, seed, epoch, shuffle=False), np.arange(n))


def test_order_is_pinned_so_that_a_new_numpy_cannot_change_it():
    assert epoch_order(10, 0, 0, True).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, 7, 3, True).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 300), seed=st.integers(0, 9), kept=st.sampled_from([0, 3, 9, 40, 64]), upper=st.booleans())
def test_a_fast_sort_keeps_the_order_of_a_stable_one(n, seed, kept, upper):
    """Also of keys that are the same in their upper bits, or in all."""
    keys = np.random.default_rng(seed).integers(0, 2**64, n, np.uint64)
    keys = keys & np.uint64((2**64 - 2**(64 - kept)) if upper else 2**kept - 1)
    assert np.array_equal(stable_order(keys.copy()), np.argsort(keys, kind="stable"))


def test_order_depends_on_seed_and_on_epoch():
    orders = {tuple(epoch_order(50, seed, epoch, True)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), WEIGHTS)
def test_cut_is_exact_and_within_one_sample_of_the_quota(n, weights):
    offsets = cut(n, weights)
    counts = np.diff(offsets)
    total = sum(Fraction(w) for w in weights)
    assert offsets[0] == 0 and offsets[-1] == n and (counts >= 0).all()
    for count, weight in zip(counts, weights):
        assert abs(int(count) - n * Fraction(weight) / total) < 1
        assert weight or not count


@pytest.mark.parametrize("n, weights, expected", [
    (7, [1, 1, 1], [0, 3, 5, 7]),
    (1, [1, 1], [0, 1, 1]),
    (0, [1, 2], [0, 0, 0]),
    (10, [3, 1], [0, 8, 10]),
    (3, [0.1, 0.1, 0.1], [0, 1, 2, 3]),
    (5, [0, 1, 0], [0, 0, 5, 5]),
    (2, [1, 1, 1, 1], [0, 1, 2, 2, 2]),
])
def test_cut_closed_forms_ties_go_to_the_lower_rank(n, weights, expected):
    assert cut(n, weights).tolist() == expected


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("nan")], [float("inf")]])
def test_cut_refuses_shares_that_cannot_be_shared(weights):
    with pytest.raises(UserError, match="shares"):
        cut(4, weights)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 500), st.integers(1, 20), st.integers(0, 40))
def test_micro_batches_tile_without_empty_or_oversized_parts(n, accumulate, micro_batch):
    parts = micro_batches(n, accumulate, micro_batch)
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(n))
    sizes = [stop - start for start, stop in parts]
    assert all(sizes) and (not sizes or max(sizes) - min(sizes) <= 1)
    if micro_batch:
        assert max(sizes, default=0) <= micro_batch
    if not micro_batch or n <= accumulate * micro_batch:
        assert len(parts) == min(accumulate, n)


def test_micro_batches_closed_forms():
    assert micro_batches(0, 3, 0) == []
    assert micro_batches(7, 2, 0) == [(0, 4), (4, 7)]
    assert micro_batches(7, 2, 3) == [(0, 3), (3, 5), (5, 7)]
    assert micro_batches(2, 5, 0) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("call", [
    lambda: steps_per_epoch(10, 0), lambda: micro_batches(4, 0, 0), lambda: micro_batches(4, 1, -1),
    lambda: steps_per_epoch(10, 2.5), lambda: steps_per_epoch(10, True),
])
def test_counts_below_their_least_are_refused(call):
    with pytest.raises(UserError, match="at least"):
        call()


def test_steps_keep_the_short_last_batch():
    assert [steps_per_epoch(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_cursor_walks_and_comes_back_from_a_dict():
    cursor = Cursor().advance(8).advance(3)
    assert cursor == Cursor(epoch=0, step=2, epoch_step=2, samples=11)
    assert cursor.next_epoch() == Cursor(epoch=1, step=2)
    assert Cursor.from_dict(cursor.to_dict()) == cursor


@pytest.mark.parametrize("damage", [
    {"step": -1}, {"step": 1.0}, {"step": True}, {"step": "2"}, {"epoch_step": 5}, {"extra": 1},
    {"samples": None},
])
def test_cursor_refuses_a_damaged_dict(damage):
    with pytest.raises(UserError, match="data position"):
        Cursor.from_dict({**Cursor(step=2).to_dict(), **damage})


@pytest.mark.parametrize("values", [None, [], {}, {"step": 1}])
def test_cursor_refuses_what_is_not_a_position(values):
    with pytest.raises(UserError, match="data position"):
        Cursor.from_dict(values)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 300), bucket=st.integers(1, 9), seed=st.integers(0, 3), epoch=st.integers(0, 2))
def test_buckets_hold_each_sample_once_and_similar_lengths(n, bucket, seed, epoch):
    lengths_N = np.random.default_rng(n).integers(1, 1000, n)
    order_N = epoch_order(n, seed, epoch, shuffle=True)
    found_N = bucketed(order_N, lengths_N, bucket, seed, epoch)
    assert sorted(found_N.tolist()) == list(range(n)) and found_N.dtype == np.int64
    window = BUCKETS * bucket
    for at in range(0, n, window):  # each window has its samples, in buckets that do not overlap in length
        inside = found_N[at:at + window]
        assert set(inside) == set(order_N[at:at + window])
        ranges = sorted((lengths_N[part].min(), lengths_N[part].max()) for part in np.split(
            inside, range(bucket, len(inside), bucket)) if len(part))
        assert all(left[1] <= right[0] for left, right in zip(ranges, ranges[1:]))
    if n > 100 and bucket > 1:
        assert found_N.tolist() != bucketed(epoch_order(n, seed, epoch + 1, True), lengths_N, bucket, seed,
                                            epoch + 1).tolist()


def test_buckets_pad_little():
    lengths_N = np.random.default_rng(0).integers(1, 513, 5000)

    def padding(order_N):
        batches = [lengths_N[order_N[at:at + 32]] for at in range(0, 5000, 32)]
        return 1 - lengths_N.sum() / sum(len(batch) * int(batch.max()) for batch in batches)

    order_N = epoch_order(5000, 0, 0, True)
    assert padding(order_N) > 0.45 and padding(bucketed(order_N, lengths_N, 32, 0, 0)) < 0.05
