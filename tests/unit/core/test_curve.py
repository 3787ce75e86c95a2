"""Distance of two trainings, and its tolerance."""

import numpy as np
import pytest

from hvdtrain.core import comparison
from hvdtrain.core.errors import UserError


def test_largest_difference():
    a = {"a": np.array([1.0, -2.0]), "b": np.array([[0.0]]), "empty": np.zeros(0)}
    assert comparison.largest_difference(a, a) == (0.0, "")
    assert comparison.largest_difference(a, {**a, "a": np.array([1.0, -2.1])}) == (pytest.approx(0.05), "a")
    assert comparison.largest_difference(a, {**a, "b": np.array([[0.25]])}) == (0.25, "b")  # absolute where all is zero
    assert comparison.largest_difference(a, {**a, "a": np.array([1.0, np.nan])}) == (float("inf"), "a")
    with pytest.raises(UserError, match=r"different names: \['b', 'c'\]"):
        comparison.largest_difference(a, {"a": a["a"], "c": a["b"], "empty": a["empty"]})
    with pytest.raises(UserError, match=r"a has shape \(3,\)"):
        comparison.largest_difference(a, {**a, "a": np.zeros(3)})


def test_the_same_bits():
    a = {"a": np.array([0.0, np.nan]), "empty": np.zeros(0)}
    assert comparison.same_bits(a, {name: array.copy() for name, array in a.items()})
    assert not comparison.same_bits(a, {**a, "a": np.array([-0.0, np.nan])})  # equal, and yet not the same bits
    assert not comparison.same_bits(a, {"a": a["a"]})
    assert not comparison.same_bits(a, {**a, "empty": np.zeros(0, np.float32)})


@pytest.mark.parametrize("noise, value", [(0.0, 1e-5), (1e-6, 1e-5), (1e-5, 4e-5), (1e-3, 1e-4), (float("inf"), 1e-4)])
def test_the_tolerance_is_a_multiple_of_the_noise_within_bounds(noise, value):
    assert comparison.Tolerance.of(noise) == comparison.Tolerance(pytest.approx(value), noise)


def test_the_noise_is_the_larger_of_two_other_cuts():
    moved = {2: 1e-5, 3: 2e-5, 4: 1.0}
    train = lambda parts: {"a": np.array([1 + moved[parts]])}  # noqa: E731
    assert comparison.tolerance({"a": np.array([1.0])}, train).value == pytest.approx(8e-5)
    assert comparison.tolerance({"a": np.array([1.0])}, train, parts=2).value == comparison.MOST
