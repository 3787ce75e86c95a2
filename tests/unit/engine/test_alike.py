"""The words for ranks whose models differ, and that ranks which hold other parameters are not compared."""

from __future__ import annotations

import pytest

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Group
from hvdtrain.engine.compare_ranks import check_alike

ONE = ["parameter a float32[3]", "parameter b float32[2]", "buffer c int64[]", "optimizer SGD"]


def said(lines_of_rank, groups=None):
    """Return what each rank is told, "" where it may continue."""
    groups = groups or [tuple(range(len(lines_of_rank)))] * len(lines_of_rank)

    def rank(control, wire):
        try:
            check_alike(control, Group(groups[control.rank], control.rank), lines_of_rank[control.rank])
        except UserError as error:
            return str(error)
        return ""

    return LockstepWorld(len(lines_of_rank)).run(rank, timeout_s=10)


def test_equal_models_go_on():
    assert said([ONE, list(ONE), list(ONE)]) == ["", "", ""]


@pytest.mark.parametrize("other, words", [
    ([ONE[0], "parameter b float32[4]", *ONE[2:]],
     "has parameter b float32[4] where rank 0 has parameter b float32[2]"),
    ([ONE[1], ONE[0], *ONE[2:]], "has parameter b float32[2] where rank 0 has parameter a float32[3]"),
    (ONE[:2] + ONE[3:], "has optimizer SGD where rank 0 has buffer c int64[]"),
    (ONE[:3], "has nothing else where rank 0 has optimizer SGD"),
])
def test_the_first_difference_is_named_on_every_rank(other, words):
    told = said([ONE, other])
    assert told[0] == told[1] and f"the ranks' models differ: rank 1 {words}; expected" in told[0]


def test_the_ranks_that_stand_apart_are_the_fewer():
    other = ["parameter z float32[3]", *ONE[1:]]
    assert "rank 0 has parameter z float32[3] where ranks 1-2 have parameter a" in said([other, ONE, ONE])[2]
    third = [*ONE[:3], "optimizer Adam"]
    told = said([ONE, other, ONE, third])[0]
    assert "rank 1 has parameter z" in told and "(ranks 1,3 differ)" in told


def test_ranks_that_hold_other_parameters_are_not_compared():
    other = ["parameter z float32[3]"]
    halves = [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert said([ONE, ONE, other, other], halves) == [""] * 4
    assert "rank 3 has parameter a float32[3] where rank 2 has parameter z" in said([ONE, ONE, other, ONE], halves)[0]
