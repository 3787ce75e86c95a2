"""Pairs of ranks that recompute each other's micro-batches."""

from itertools import combinations

import pytest

from hvdtrain.engine.callbacks.audit import comparable, left_out, pairs, tournament


@pytest.mark.parametrize("size", range(2, 10))
def test_every_two_ranks_meet_once_a_series_and_take_turns(size):
    length = size - 1 + size % 2
    series = [[pair for turn in range(s * length, (s + 1) * length) for pair in tournament(range(size), turn)]
              for s in range(2)]
    for one in series:
        assert sorted(tuple(sorted(pair)) for pair in one) == list(combinations(range(size), 2))
    assert sorted(series[0]) == sorted(pair[::-1] for pair in series[1])
    for turn in range(2 * length):
        ranks = [rank for pair in tournament(range(size), turn) for rank in pair]
        assert len(ranks) == len(set(ranks)) == size - size % 2, "no rank is idle but one of an odd number"


@pytest.mark.parametrize("kinds", ["a", "ab", "abb", "aabb", "abc", "abbbcc", "abcdd", "aaab", "aaabbbccccd"])
def test_ranks_of_one_kind_meet_and_nobody_is_left_out(kinds):
    seen = [pairs(kinds, turn) for turn in range(60)]
    assert seen == [pairs(list(kinds), turn) for turn in range(60)], "a function of the turn"
    met = {rank for plan in seen for pair in plan for rank in pair}
    assert met == (set(range(len(kinds))) if len(kinds) > 1 else set())
    for plan in seen:
        ranks = [rank for pair in plan for rank in pair]
        assert len(ranks) == len(set(ranks))
        for a, b in plan:
            assert kinds[a] == kinds[b] or kinds.count(kinds[a]) == 1 or kinds.count(kinds[b]) == 1
    for kind in set(kinds):
        like = [r for r, k in enumerate(kinds) if k == kind]
        assert {tuple(sorted(p)) for plan in seen for p in plan} >= set(combinations(like, 2))


def test_the_only_rank_of_its_kind_meets_every_other():
    assert {tuple(sorted(p)) for t in range(8) for p in pairs("abbb", t) if 0 in p} == {(0, 1), (0, 2), (0, 3)}
    assert tournament([], 3) == tournament([4], 0) == []


def test_results_in_16_bits_are_compared_among_like_ranks_alone():
    kinds, narrow = ["cpu, fp32", "gpu, fp32", "gpu, bf16", "gpu, bf16"], [False, False, True, True]
    every = [(0, 1), (2, 3), (0, 2), (3, 1)]
    assert comparable(every, kinds, narrow) == [(0, 1), (2, 3)] and comparable(every, kinds, [False] * 4) == every
    assert left_out(kinds, narrow) == [] and left_out(kinds[:3], narrow[:3]) == [2]
    assert left_out(kinds[1:3], narrow[1:3]) == [0, 1] and left_out(["bf16"] * 2, [True] * 2) == left_out([], []) == []
