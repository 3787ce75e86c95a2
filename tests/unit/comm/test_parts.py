"""Vectors cut into parts: windows that cover them, and sums in the order of the ranks."""

import numpy as np
import pytest

from hvdtrain.comm.collectives.base import TILE, Scratch, add_rows, begins, windows


@pytest.mark.parametrize("sizes", [[5, 5, 5], [0, 12, 1], [0, 0, 7], [1], [0, 0]])
@pytest.mark.parametrize("most", [1, 2, 5, 14, 15, 100])
def test_windows_cover_each_part_once_and_hold_no_more_than_asked(sizes, most):
    ends = [0] * len(sizes)
    at = 0
    for begin, pieces in windows(sizes, most):
        assert begin == at and len(pieces) * max(pieces) <= max(most, len(sizes))
        first = begins(sizes)
        for r, piece in enumerate(pieces):
            if piece:
                assert first[r] + ends[r] == begin + sum(pieces[:r])
            ends[r] += piece
        at += sum(pieces)
    assert ends == sizes and at == sum(sizes)


@pytest.mark.parametrize("n", [0, 1, TILE, 2 * TILE + 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_are_added_in_order_and_halves_in_float32(n, size):
    rng = np.random.default_rng(n)
    for dtype in (np.float32, np.float16, np.int32):
        rows = [(rng.standard_normal(n) * 100).astype(dtype) for _ in range(size)]
        want = rows[0].astype(np.float32) if dtype == np.float16 else rows[0].copy()
        for row in rows[1:]:
            want += row
        got = np.empty(n, dtype)
        add_rows(rows, got)
        np.testing.assert_array_equal(got, want.astype(dtype))


def test_what_is_not_finite_stays_so_without_a_warning():
    got = np.empty(2, np.float32)
    with np.errstate(all="raise"):
        add_rows([np.array([np.inf, 3e38], np.float32), np.array([-np.inf, 3e38], np.float32)], got)
    assert np.isnan(got[0]) and np.isinf(got[1])


def test_scratch_is_kept_and_grows():
    scratch, kind = Scratch(), np.dtype(np.float32)
    long = scratch.vector(10, kind)
    assert np.shares_memory(scratch.vector(4, kind), long) and scratch.vector(11, kind).size == 11
    assert scratch.vector(3, np.dtype(np.int16)).dtype == np.int16
