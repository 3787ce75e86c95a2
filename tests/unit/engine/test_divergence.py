"""The verdict on ranks whose weights have come apart."""

import pickle

import numpy as np
import pytest

from hvdtrain.engine.weight_checks import Diverged, FingerprintRows, apart, judge, tolerance

NAMES = ["dense/kernel", "dense/bias"]


def rows(now, before=None, norm=10.0):
    now = np.asarray(now, float)
    before = np.zeros_like(now) if before is None else np.asarray(before, float)
    return FingerprintRows(before, now, np.full(now.shape, norm))


def test_equal_ranks_pass():
    assert judge(rows([[1.0, 2.0]] * 4), NAMES, 100) is None
    assert judge(rows([[1.0, 2.0]]), NAMES, 1) is None


def test_rounding_of_unlike_devices_is_forgiven_and_grows_with_the_steps():
    off = [[1.0, 2.0], [1.0 + 10 * 1e-4, 2.0]]
    assert judge(rows(off), NAMES, 2) is not None
    assert judge(rows(off), NAMES, 10_000) is None
    assert tolerance(4, 2.0**-23) == pytest.approx(2 * tolerance(1, 2.0**-23))
    assert judge(rows(off), NAMES, 2, eps=2.0**-7) is None  # a bfloat16 weight moves by more


@pytest.mark.parametrize("now, who, words", [
    ([[1, 0], [2, 0]], (1,), "differs on rank 1 of 2 by 0.1 of its norm;"),
    ([[1, 0], [2, 0], [2, 0]], (0,), "differs on rank 0 of 3"),
    ([[1, 5], [1, 6], [2, 5], [1, 7]], (2,), "the first of 2 of 2 variables"),
    ([[1, 0], [2, 0], [3, 0]], (1, 2), "every rank (against each other, 3 ranks)"),
    ([[1, 0], [np.nan, 0]], (1,), "Rank 1 holds a value that is not finite"),
])
def test_the_first_variable_and_the_ranks_apart_are_named(now, who, words):
    error = judge(rows(now), NAMES, 8)
    assert isinstance(error, Diverged) and error.ranks == who
    assert f"{error.variable!r} differs" in str(error) and words in str(error) and "after update 8" in str(error)


def test_nan_on_every_rank_is_no_divergence():
    assert judge(rows([[np.nan, np.inf]] * 3, norm=np.nan), NAMES, 8) is None
    assert apart(np.array([np.nan, np.nan, 1.0]), np.ones(3), 0.0) == (2,)


@pytest.mark.parametrize("before, distributed, cause", [
    ([[1, 0], [2, 0]], True, "BroadcastGlobalVariablesCallback(0)"),
    ([[1, 0], [2, 0]], False, "BroadcastGlobalVariablesCallback(0)"),
    ([[1, 0], [1, 0]], True, "something other than this optimizer's exchanged gradients"),
    ([[1, 0], [1, 0]], False, "Likely the optimizer of model.compile is not hvd.DistributedOptimizer"),
])
def test_the_likely_cause_follows_from_the_start(before, distributed, cause):
    assert cause in str(judge(rows([[1, 0], [2, 0]], before), NAMES, 2, distributed=distributed))


def test_rows_are_unpacked_and_ranks_have_their_global_numbers():
    packed = np.array([[1, 1, 5, 5, 9, 9], [1, 1, 6, 5, 9, 9]])
    error = judge(FingerprintRows.unpack(packed), NAMES, 2, ranks=[4, 7])
    assert error.ranks == (7,) and "rank 7 of ranks 4, 7" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
