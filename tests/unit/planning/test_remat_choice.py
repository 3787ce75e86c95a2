"""The cheapest set of blocks whose recomputing makes a pass fit: against every set there is, and at the edges."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.memory import fit
from hvdtrain.planning.memory.fit import RematChoice, cheapest, peak, scaled


def blocks(*rows):
    return [BlockCost(f"b{i}", *row) for i, row in enumerate(rows)]


def by_trying_all(costs, whole, budget):
    """(seconds of the cheapest set that fits, None without any; least peak of all)."""
    sets = [s for k in range(len(costs) + 1) for s in combinations(costs, k)]
    found = [(peak(costs, [c.name for c in s], whole), sum(c.forward_s for c in s)) for s in sets]
    return min((seconds for held, seconds in found if held <= budget), default=None), min(held for held, _ in found)


ROW = st.tuples(st.integers(-20, 60), st.integers(0, 9).map(float), st.integers(0, 80))


@given(st.lists(ROW, max_size=7), st.integers(0, 150), st.integers(0, 300))
def test_no_set_that_fits_is_cheaper(rows, beside, budget):
    costs = blocks(*rows)
    whole = beside + sum(max(0, c.saved_bytes) for c in costs)
    got, (seconds, least) = cheapest(costs, whole, budget), by_trying_all(costs, whole, budget)
    assert got.peak == peak(costs, got.names, whole)
    assert not any(c.name in got.names for c in costs if c.saved_bytes <= 0), "what saves nothing is never chosen"
    if seconds is None:
        assert not got.fits and got.peak <= least + max(1, int(fit.NEAR * whole))
    else:
        assert got.fits and got.peak <= budget and got.seconds == seconds
        assert got.names == () or whole > budget


def test_the_last_block_alone_is_of_no_use():
    costs = blocks((100, 1.0), (100, 1.0), (100, 1.0))
    assert peak(costs, ["b2"], 300) == 300 and peak(costs, ["b0"], 300) == 200
    assert cheapest(costs, 300, 200) == RematChoice(("b0",), 200, 1.0, True)
    assert cheapest(costs, 300, 100) == RematChoice(("b0", "b1"), 100, 2.0, True)
    assert not cheapest(costs, 300, 99).fits


def test_a_block_that_needs_more_in_its_own_backward_counts_with_it():
    costs = blocks((100, 1.0, 250), (100, 5.0), (100, 5.0))
    assert peak(costs, ["b0"], 300) == 250
    assert cheapest(costs, 300, 240).names == ("b1",), "the first one would hold 250 in its backward"


def test_cheap_blocks_go_first_and_room_recomputes_nothing():
    costs = blocks((100, 9.0), (100, 1.0), (100, 4.0), (100, 2.0), (0, 0.0))
    assert cheapest(costs, 400, 400).names == () == cheapest([], 5, 5).names
    assert cheapest(costs, 400, 300).names == ("b1",)
    assert cheapest(costs, 400, 200).names == ("b1", "b2")
    assert cheapest([], 9, 5) == RematChoice((), 9, 0.0, False)


def test_very_many_unlike_blocks_are_chosen_nearly_as_well(monkeypatch):
    costs = blocks(*((1000 + 37 * i % 101, 1.0 + (i * 7919 % 1000) / 1e3) for i in range(60)))
    whole = sum(c.saved_bytes for c in costs)
    rough = cheapest(costs, whole, whole // 2)
    monkeypatch.setattr(fit, "MOST_SETS", 20_000)
    fine = cheapest(costs, whole, whole // 2)
    assert rough.fits and fine.fits and rough.seconds <= 1.02 * fine.seconds


def test_costs_grow_with_the_samples():
    (cost,) = scaled(blocks((100, 2.0, 50)), 4.0, 0.1)
    assert (cost.saved_bytes, cost.forward_s, cost.inner_bytes) == (440, pytest.approx(8.0), 220)
