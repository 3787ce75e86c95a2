"""The fit of a rank's line: exact points, its bounds under noise, one size only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.planning.linear import LEAST_SLOPE, LinearTime, fit


@given(st.floats(0, 1), st.floats(1e-6, 1), st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True))
def test_exact_points_give_their_line(a_s, c_s, sizes):
    got = fit(sizes, [a_s + c_s * b for b in sizes])
    if c_s >= LEAST_SLOPE * min(a_s / b + c_s for b in sizes):
        assert got.a_s == pytest.approx(a_s, rel=1e-5, abs=1e-6 * c_s)
        assert got.c_s == pytest.approx(c_s, rel=1e-5, abs=1e-9 * a_s)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 10)), min_size=1, max_size=8))
def test_whatever_is_measured_the_line_can_be_planned_with(points):
    got = fit([b for b, _ in points], [t for _, t in points])
    assert got.a_s >= 0 and got.c_s > 0


def squares(line, points):
    return sum((line.seconds(b, 1) / t - 1) ** 2 for b, t in points)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10)), min_size=2, max_size=6), st.floats(-0.01, 0.01),
       st.floats(-0.01, 0.01))
def test_no_line_nearby_within_the_bounds_is_nearer(points, da, dc):
    got = fit([b for b, _ in points], [t for _, t in points])
    least_s = LEAST_SLOPE * min(t / b for b, t in points)
    other = LinearTime(max(0.0, got.a_s + da), max(least_s, got.c_s * (1 + dc)))
    if len({b for b, _ in points}) > 1:
        assert squares(got, points) <= squares(other, points) * (1 + 1e-9) + 1e-12


def test_relative_errors_count_not_seconds():
    # Absolute least squares would follow the large time, whose error is the larger one in seconds.
    got = fit([1, 10, 100], [0.011, 0.02, 0.121])
    assert got.seconds(1, 1) == pytest.approx(0.011, rel=0.02)


def test_a_negative_fixed_cost_becomes_none():
    assert fit([1, 10], [0.01, 0.2]) == LinearTime(0.0, pytest.approx(0.012))


def test_a_device_that_is_idle_at_these_sizes_has_a_small_slope():
    got = fit([1, 2, 4], [0.01, 0.01, 0.01])
    assert got.c_s == pytest.approx(LEAST_SLOPE * 0.01 / 4) and got.seconds(2, 1) == pytest.approx(0.01, rel=0.01)


def test_one_size_says_nothing_of_a_fixed_cost():
    assert fit([8], [0.4]) == LinearTime(0.0, pytest.approx(0.05))
    assert fit([8, 8], [0.4, 0.4]) == LinearTime(0.0, pytest.approx(0.05))


def test_a_clock_that_shows_nothing():
    assert 0 < fit([1, 2], [0.0, 0.0]).c_s < 1e-6


def test_seconds_and_scale():
    line = LinearTime(0.5, 0.25)
    assert [line.seconds(0, 0), line.seconds(0, 2), line.seconds(6, 2)] == [0.0, 1.0, 2.5]
    assert line.scaled(2.0) == LinearTime(1.0, 0.5) and line.describe() == "500 ms + 250 ms a sample"


@pytest.mark.parametrize("sizes, seconds", [([], []), ([1], [1.0, 2.0]), ([0, 1], [1.0, 2.0])])
def test_our_own_mistakes(sizes, seconds):
    with pytest.raises(AssertionError):
        fit(sizes, seconds)
