"""Groups and the names of their collectives."""

import pytest

from hvdtrain.core.mesh import Group, spans, world


def test_members_have_a_place():
    group = Group((1, 4, 6), 4)
    assert (group.size, group.index) == (3, 1)
    assert world(3, 2) == Group((0, 1, 2), 2)


def test_names_are_equal_on_all_members_and_differ_between_groups():
    assert len({Group((0, 1, 2), r).name("grad.0") for r in range(3)}) == 1
    assert world(4, 0).name("grad.0") == "g0-3.grad.0"
    names = {Group(ranks, ranks[0]).name("x") for ranks in ((0,), (1,), (0, 1), (0, 2), (0, 1, 2), (10, 11), (1, 2))}
    assert len(names) == 7


def test_spans():
    assert spans((0, 1, 2, 5)) == "0-2,5" and spans((7,)) == "7" and spans((0, 2, 4)) == "0,2,4"


@pytest.mark.parametrize("ranks, rank", [((), 0), ((1, 0), 0), ((0, 0), 0), ((0, 1), 2)])
def test_our_bugs_are_caught(ranks, rank):
    with pytest.raises(AssertionError):
        Group(ranks, rank)
