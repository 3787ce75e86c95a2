"""Shards of the flat buckets by rank: every element once, in proportion, by free memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.planning import shards

PARTS = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 0.1)


@given(st.integers(0, 5000), PARTS)
def test_parts_cover_a_bucket_once(n, parts):
    found = shards.sizes(n, parts)
    assert sum(found) == n and min(found) >= 0
    assert all(size == 0 for size, part in zip(found, parts) if part == 0)


@given(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=7), PARTS)
def test_spans_of_all_ranks_cover_each_parameter_once(shapes, parts):
    specs = [ParamSpec(str(i), tuple(shape), "float32") for i, shape in enumerate(shapes)]
    buckets = plan_buckets(specs, 0.0002)
    sizes = [shards.sizes(b.n, parts) for b in buckets]
    seen = [np.zeros(spec.n, int) for spec in specs]
    for rank in range(len(parts)):
        for count, (begin, end) in zip(seen, shards.spans(buckets, sizes, rank, len(specs))):
            count[begin:end] += 1
    assert all((count == 1).all() for count in seen)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6), st.floats(0, 1))
def test_no_rank_gets_more_than_it_has_room_for(rooms, filled):
    parts = shards.by_room(rooms)
    assert sum(parts) == pytest.approx(1)
    state = filled * sum(rooms)
    worst = max((part * state - room for part, room in zip(parts, rooms)), default=0)
    assert worst <= shards.ALIKE * max(rooms) + 1  # equal parts of rooms that are nearly alike
