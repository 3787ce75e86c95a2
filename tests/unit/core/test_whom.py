"""Attribution of waiting, from the moments at which ranks began their exchanges, also by different clocks."""

import numpy as np
import pytest

from hvdtrain.core.timeline import spans as whom
from hvdtrain.core.timeline.spans import LEAST, MOST, Blocked, BlockedSpans, packed


def compare(rows_P, stood_P, offsets_P):
    return whom.compare([packed(rows) for rows in rows_P], stood_P, offsets_P)


def at(step, name, came_s, end_s, begin_s=None):
    return Blocked(step, name, came_s, came_s if begin_s is None else begin_s, end_s)


def test_a_rank_waits_for_the_last_to_come_and_then_for_the_wire():
    rows = [[at(0, "b0", 1.0, 5.0), at(0, "vote", 6.0, 9.0)],
            [at(0, "b0", 4.0, 5.0), at(0, "vote", 5.5, 9.0)],
            [at(0, "b0", 2.0, 5.0), at(0, "vote", 8.0, 9.0)]]
    found = compare(rows, [7.0, 4.5, 4.0], [0.0] * 3)
    np.testing.assert_allclose(found.wait_PP, [[0, 3, 2], [0, 0, 2.5], [0, 2, 0]])
    np.testing.assert_allclose(found.wire_P, [2, 2, 2])


def test_what_a_rank_hands_over_early_is_not_waited_for_while_it_computes():
    rows = [[at(0, "b0", 1.0, 7.0, begin_s=4.0)], [at(0, "b0", 5.0, 7.0, begin_s=6.0)]]
    found = compare(rows, [3.0, 1.0], [0.0, 0.0])
    np.testing.assert_allclose(found.wait_PP, [[0, 1], [0, 0]])  # from 4, when rank 0 had nothing left to do, to 5
    np.testing.assert_allclose(found.wire_P, [2, 1])


def test_a_rank_computes_until_its_own_device_has_handed_over():
    rows = [[at(0, "b0", 4.0, 7.0, begin_s=1.0)], [at(0, "b0", 6.0, 7.0, begin_s=2.0)]]
    found = compare(rows, [6.0, 5.0], [0.0, 0.0])
    np.testing.assert_allclose(found.own_P, [3, 4])
    np.testing.assert_allclose(found.wait_PP, [[0, 2], [0, 0]])
    np.testing.assert_allclose(found.wire_P, [1, 1])


def test_nobody_waited_for_one_that_came_after_the_end():
    rows = [[at(0, "bcast", 1.0, 1.5)], [at(0, "bcast", 8.0, 8.25)]]
    found = compare(rows, [0.5, 0.25], [0.0, 0.0])
    np.testing.assert_allclose(found.wait_PP, np.zeros((2, 2)))
    np.testing.assert_allclose(found.wire_P, [0.5, 0.25])


def test_clocks_that_are_apart_are_put_right():
    ahead = 1000.0
    rows = [[at(0, "b0", 1.0, 5.0)], [at(0, "b0", 4.0 + ahead, 5.0 + ahead)]]
    found = compare(rows, [4.0, 1.0], [0.0, ahead])
    np.testing.assert_allclose(found.wait_PP, [[0, 3], [0, 0]])


@pytest.mark.parametrize("odd", [at(0, "send", 1.5, 2.0), at(0, "b0", 5.0, 5.5)])
def test_exchanges_of_some_ranks_alone_are_matched_by_step_name_and_order(odd):
    rows = [[at(0, "b0", 1.0, 5.0), odd, at(1, "b0", 6.0, 8.0)], [at(0, "b0", 4.0, 5.0), at(1, "b0", 7.0, 8.0)]]
    found = compare(rows, [6.5, 2.0], [0.0, 0.0])
    np.testing.assert_allclose(found.wait_PP, [[0, 4], [0, 0]])
    np.testing.assert_allclose(found.wire_P, [2.5, 2])


def test_kept_exchanges_stand_for_all_and_nothing_is_lost_where_none_was_kept():
    found = compare([[at(0, "b0", 1.0, 5.0)], [at(0, "b0", 4.0, 5.0)]], [8.0, 2.0], [0.0, 0.0])
    np.testing.assert_allclose(found.wait_PP.sum(axis=1) + found.wire_P, [8, 2])
    np.testing.assert_allclose(found.wait_PP[0, 1], 6)
    none = compare([[], []], [3.0, 0.0], [0.0, 0.0])
    np.testing.assert_allclose(none.wait_PP, [[3, 0], [0, 0]])


def test_ranks_keep_the_same_steps_without_a_word():
    kept = []
    for rank in range(2):
        stood = BlockedSpans(most=8)
        for step in range(20):
            for name in ("b0", "vote"):
                stood.add(at(step, name, step + 0.1 * rank, step + 0.5))
        kept.append([row[:2] for row in stood.take()])
        assert stood.stride == 1 and not stood.rows
    assert kept[0] == kept[1] and len(kept[0]) <= 8 and {step for step, _ in kept[0]} == {0, 8, 16}
    stood = BlockedSpans()
    for ranks, most in ((1, MOST), (64, 512), (10000, LEAST)):
        stood.among(ranks)
        assert stood.most == most
