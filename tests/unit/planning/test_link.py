"""The fit of a link: exact points, noise, borders; and what traffic costs over links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.planning.linear import LinearTime, Link, Traffic, fit_link, wire_seconds, with_adding

SIZES = [4096 * 4**i for i in range(6)]


@settings(deadline=None)
@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-6), st.integers(2, 6))
def test_points_on_a_line_give_that_line(alpha_s, beta, n):
    link = fit_link([(x, alpha_s + beta * x) for x in SIZES[-n:]])
    for x in SIZES:
        assert link.seconds(x) == pytest.approx(alpha_s + beta * x, rel=1e-4, abs=0)


@given(st.floats(0, 1e-1), st.floats(1e-5, 1e-1), st.floats(0.2, 5), st.floats(0, 1e-1), st.integers(1, 5),
       st.integers(1, 5))
def test_two_steps_give_the_seconds_of_adding_gradients(a_s, c_s, factor, adding_s, n, more):
    line, samples = LinearTime(a_s, c_s), 40
    steps = [(k, factor * line.seconds(samples, k) + (k - 1) * adding_s) for k in (n, n + more)]
    scaled, found_s = with_adding(line, samples, *steps)
    assert found_s == pytest.approx(adding_s, rel=1e-6, abs=1e-9 * steps[1][1])
    assert scaled.seconds(samples, 3) == pytest.approx(factor * line.seconds(samples, 3), rel=1e-6)
    assert with_adding(line, samples, steps[0], (n + more, 0.0))[1] == 0  # noise


def test_noise_moves_it_little():
    draw = np.random.default_rng(1)
    points = [(x, (5e-5 + 1e-8 * x) * draw.uniform(0.9, 1.1)) for x in SIZES for _ in range(5)]
    link = fit_link(points)
    assert link.alpha_s == pytest.approx(5e-5, rel=0.15) and link.beta_s_per_byte == pytest.approx(1e-8, rel=0.1)


def test_small_messages_count_as_much_as_large_ones():
    """An unweighted fit would give the microseconds of the small ones away for a percent of the largest."""
    points = [(x, 2e-5 + 1e-8 * x) for x in SIZES[:-1]] + [(SIZES[-1], 1.05 * (2e-5 + 1e-8 * SIZES[-1]))]
    assert fit_link(points).alpha_s == pytest.approx(2e-5, rel=0.2)


def test_no_part_is_negative():
    falling = fit_link([(1000, 2.0), (2000, 1.0)])
    assert falling.beta_s_per_byte == 0
    assert falling.alpha_s == pytest.approx((1 / 2 + 1) / (1 / 4 + 1))  # sum(1/y) / sum(1/y^2)
    steep = fit_link([(1000, 1e-3), (2000, 4e-3)])
    assert steep.alpha_s == 0
    assert steep.beta_s_per_byte == pytest.approx((1e6 + 5e5) / (1e12 + 2.5e11))  # sum(x/y) / sum((x/y)^2)


def test_one_size_tells_bytes_only():
    assert fit_link([(1000, 1e-3)]) == Link(0.0, pytest.approx(1e-6))
    assert fit_link([(1000, 1e-3), (1000, 1e-3)]) == Link(0.0, pytest.approx(1e-6))
    assert fit_link([(0, 1e-3)]) == Link(pytest.approx(1e-3), 0.0)


def test_a_clock_that_stands_still_breaks_nothing():
    link = fit_link([(1000, 0.0), (2000, 0.0)])
    assert 0 <= link.seconds(1000) < 1e-8


def test_seconds_of_calls_and_their_words():
    link = Link(1e-4, 1e-8)
    assert link.seconds(1e6) == pytest.approx(0.0101) and link.seconds(1e6, calls=3) == pytest.approx(0.0103)
    assert link.describe() == "100 us + 100.0 MB/s" and Link(1e-6, 0.0).describe() == "1 us + no time per byte"


def test_traffic_is_summed_by_when_it_can_begin():
    links = {"allreduce float32": Link(1e-3, 1e-6), "allgather": Link(2e-3, 2e-6)}
    traffic = [Traffic("allreduce float32", False, 2, 1000), Traffic("allreduce float32", True, 1, 500),
               Traffic("allgather", True, 3, 100)]
    assert wire_seconds(traffic, links) == (pytest.approx(3e-3), pytest.approx(1.5e-3 + 6.2e-3))
    assert wire_seconds([], links) == (0, 0)
