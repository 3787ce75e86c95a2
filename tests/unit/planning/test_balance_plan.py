"""The plan against brute force, its micro-batches against the sampler's; equal shares, advice, table, worked case."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.errors import UserError
from hvdtrain.planning.batch.minmax import CommonParts, OwnParts, solve
from hvdtrain.planning.batch.plan import (
    COLUMNS,
    BatchPlan,
    RankLabel,
    RankShare,
    advise_drop,
    equal,
    of_shares,
    plan,
    predicted,
    speed,
    table,
)
from hvdtrain.planning.batch.sampler import cut, micro_batches
from hvdtrain.planning.linear import LinearTime

# Round numbers make ties, which random ones never do.
LINES = st.builds(LinearTime, st.one_of(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.floats(0, 100)),
                  st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.01, 100)))
RANKS = st.lists(st.tuples(LINES, st.sampled_from([None, 0, 1, 2, 3, 5, 20])), min_size=1, max_size=4)


def divisions(n, size):
    if size == 1:
        yield (n,)
        return
    for first in range(n + 1):
        for rest in divisions(n - first, size - 1):
            yield (first, *rest)


def brute_force(lines, n, ceilings, least, same):
    limits = [c or n or 1 for c in ceilings]
    best = float("inf")
    for samples in divisions(n, len(lines)):
        parts = [max(0 if same else min(least, m), -(-m // c)) for m, c in zip(samples, limits)]
        if same:
            parts = [max(least, *parts)] * len(parts)
        best = min(best, max(line.seconds(m, k) for line, m, k in zip(lines, samples, parts)))
    return best


@settings(max_examples=60, deadline=None)
@given(RANKS, st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_no_other_division_is_faster(ranks, n, least, same):
    lines, ceilings = zip(*ranks)
    got = plan(lines, n, ceilings, least, same)
    assert sum(got.samples_P) == n and min(got.samples_P) >= 0
    assert got.step_s == pytest.approx(brute_force(lines, n, ceilings, least, same), rel=1e-11)
    assert got.step_s == max(part.predicted_s for part in got.parts)


@settings(max_examples=60, deadline=None)
@given(RANKS, st.integers(0, 3000), st.integers(1, 4), st.booleans())
def test_a_part_is_what_the_sampler_cuts(ranks, n, least, same):
    lines, ceilings = zip(*ranks)
    for got in (plan(lines, n, ceilings, least, same), equal(lines, n, ceilings, least, same)):
        assert sum(got.samples_P) == n
        for part, line, ceiling in zip(got.parts, lines, ceilings):
            sizes = [b - a for a, b in micro_batches(part.samples, max(1, part.accumulate), part.micro_batch)]
            assert len(sizes) == min(part.accumulate, part.samples) and max(sizes, default=0) == part.micro_batch
            assert part.micro_batch <= (ceiling or n)
            assert part.predicted_s == line.seconds(part.samples, part.accumulate)
            if not same:
                assert part.accumulate == max(min(least, part.samples), -(-part.samples // (ceiling or n or 1)))
        if same:
            assert len({part.accumulate for part in got.parts}) == 1 and got.parts[0].accumulate >= least


@settings(max_examples=25, deadline=None)
@given(RANKS, st.integers(0, 3000), st.integers(1, 4), st.booleans())
def test_never_slower_than_equal_shares_and_the_same_every_time(ranks, n, least, same):
    lines, ceilings = zip(*ranks)
    got = plan(lines, n, ceilings, least, same)
    assert got.step_s <= equal(lines, n, ceilings, least, same).step_s
    assert got == plan(list(lines), n, list(ceilings), least, same)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("n", [1, 5, 7, 8, 103])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_ranks_get_what_the_sampler_gives_them(size, n, same):
    got = plan([LinearTime(0.001, 0.002)] * size, n, same_parts=same)
    assert list(got.samples_P) == list(np.diff(cut(n, [1.0] * size)))
    assert got.same(equal([LinearTime(0.001, 0.002)] * size, n, same_parts=same))


def test_only_the_rank_with_little_memory_accumulates():
    got = plan([LinearTime(1.0, 1.0), LinearTime(1.0, 1.0)], 20, [0, 4])
    assert got.parts == (RankShare(11, 11, 1, 12.0), RankShare(9, 3, 3, 12.0)) and got.step_s == 12.0


def test_same_parts_weighs_the_fixed_cost_of_all_against_the_memory_of_one():
    lines = [LinearTime(0.1, 1.0), LinearTime(0.1, 1.0)]
    many, few = plan(lines, 40, [0, 2], same_parts=True), plan([LinearTime(9.0, 1.0)] * 2, 40, [0, 2], same_parts=True)
    assert many.parts == (RankShare(20, 2, 10, 21.0), RankShare(20, 2, 10, 21.0))
    assert few.parts[0] == RankShare(38, 38, 1, 47.0) and few.parts[1] == RankShare(2, 2, 1, 11.0)


@pytest.mark.parametrize("a_s, c_s, ceilings, n, k, samples, step_s", [
    ([0.0, 1.0, 2.0], [3.0, 2.0, 3.0], [3, 10, 2], 10, 1, (3, 5, 2), 11.0),
    ([1.0, 0.5, 2.0], [2.0, 3.0, 0.5], [12, 12, 3], 12, 3, (3, 2, 7), 9.5),
    ([0.0, 2.0, 1.0], [0.5, 3.0, 3.0], [1, 1, 4], 12, 6, (6, 2, 4), 18.0)])
def test_same_parts_where_whole_samples_want_another_number_than_a_continuum(a_s, c_s, ceilings, n, k, samples, step_s):
    got = plan([LinearTime(a, c) for a, c in zip(a_s, c_s)], n, ceilings, same_parts=True)
    assert (got.parts[0].accumulate, got.samples_P, got.step_s) == (k, samples, step_s)


def test_a_rank_that_would_hold_the_others_up_gets_nothing():
    got = plan([LinearTime(0.0, 1.0), LinearTime(50.0, 1.0)], 10)
    assert got.parts == (RankShare(10, 10, 1, 10.0), RankShare(0, 0, 0, 0.0))
    got = plan([LinearTime(0.0, 1.0), LinearTime(5.0, 100.0)], 10, same_parts=True)
    assert got.parts == (RankShare(10, 10, 1, 10.0), RankShare(0, 0, 1, 5.0))


def test_of_slowest_ranks_the_one_that_saves_most_gives_a_sample_up_then_the_highest():
    # (2, 2) fit in 4 s, 2 s against 1 s saved
    assert plan([LinearTime(0.0, 2.0), LinearTime(2.0, 1.0)], 3).samples_P == (1, 2)
    assert plan([LinearTime(0.0, 1.0)] * 3, 7).samples_P == (3, 2, 2)


class Counting(OwnParts):
    """Counts the passes over all ranks."""

    passes = 0

    def seconds(self, samples_P):
        self.passes += 1
        return super().seconds(samples_P)

    def capacity(self, step_s):
        self.passes += 1
        return super().capacity(step_s)


class Rough(OwnParts):
    """Its capacities are off by up to two samples, far more than rounding does."""

    def capacity(self, step_s):
        off_P = np.random.default_rng(int(step_s * 1e6)).integers(-2, 3, len(self.a_P))
        return np.clip(super().capacity(step_s) + off_P, 0, self.most_P)


@pytest.mark.parametrize("seed", range(20))
def test_the_result_does_not_depend_on_how_near_the_bisection_comes(seed):
    draw = random.Random(seed)
    size, n, least = draw.randint(2, 9), draw.randint(20, 200), draw.randint(1, 3)
    vectors = (np.array([draw.choice([0.0, 1.0, draw.random()]) for _ in range(size)]),
               np.array([draw.choice([0.5, 1.0, draw.random()]) for _ in range(size)]),
               np.array([draw.choice([2, 5, n]) for _ in range(size)]))
    exact, rough = OwnParts(*vectors, least, n), Rough(*vectors, least, n)
    assert list(solve(rough, n)) == list(solve(exact, n))


@pytest.mark.parametrize("n", [1000, 100_000, 1_000_000])
@pytest.mark.parametrize("ceiling", [16, 10_000_000])
@pytest.mark.parametrize("alike", [False, True])
def test_1024_ranks_take_some_hundred_passes(n, ceiling, alike):
    draw = random.Random(n)
    a_P = np.array([0.01 if alike else draw.uniform(1e-3, 2e-2) for _ in range(1024)])
    c_P = np.array([0.001 if alike else draw.uniform(1e-4, 2e-3) for _ in range(1024)])
    cost = Counting(a_P, c_P, np.full(1024, min(ceiling, n)), 1, n)
    samples_P = solve(cost, n)
    assert samples_P.sum() == n and cost.passes < 150
    assert cost.seconds(samples_P).max() <= cost.seconds(samples_P + 1).min()


def test_1024_ranks_with_one_number_of_micro_batches():
    draw = random.Random(1)
    lines = [LinearTime(draw.uniform(1e-3, 2e-2), draw.uniform(1e-4, 2e-3)) for _ in range(1024)]
    ceilings = [draw.choice([1, 4, 16, 64, 0]) for _ in lines]
    got = plan(lines, 100_000, ceilings, same_parts=True)
    a_P, c_P = np.array([line.a_s for line in lines]), np.array([line.c_s for line in lines])
    limit_P = np.array([c or 100_000 for c in ceilings])
    k = got.parts[0].accumulate
    for other in {max(1, k - 3), max(1, k - 1), k + 1, k + 3, 2 * k, 10 * k} - {k}:
        assert not CommonParts(a_P, c_P, limit_P, other, 100_000).holds(got.step_s * (1 - 1e-9))


def test_a_sum_of_shares_and_predictions_by_other_lines():
    lines = [LinearTime(0.0, 1.0), LinearTime(0.0, 2.0)]
    got = of_shares(lines, 8, [3, 1], [4, 0])
    assert got.parts == (RankShare(6, 3, 2, 6.0), RankShare(2, 2, 1, 4.0)) and speed(got, 8) == pytest.approx(8 / 6)
    again = predicted(got, [LinearTime(1.0, 1.0), LinearTime(0.0, 5.0)])
    assert again.same(got) and again != got and [p.predicted_s for p in again.parts] == [8.0, 10.0]
    assert again.step_s == 10.0 and not got.same(equal(lines, 8))
    assert speed(plan(lines, 0), 0) == 0.0


@pytest.mark.parametrize("ceiling", [-1, 2.5])
def test_a_ceiling_that_holds_no_sample_is_refused(ceiling):
    with pytest.raises(UserError, match="the memory ceiling of rank 1 is"):
        plan([LinearTime(0.0, 1.0)] * 2, 8, [4, ceiling])


@pytest.mark.parametrize("call", [lambda: plan([], 4), lambda: plan([LinearTime(0.0, 0.0)], 4),
                                  lambda: plan([LinearTime(0.0, 1.0)], -1),
                                  lambda: plan([LinearTime(0.0, 1.0)], 4, [1, 2]),
                                  lambda: plan([LinearTime(0.0, 1.0)], 4, None, 0)])
def test_our_own_mistakes(call):
    with pytest.raises(AssertionError):
        call()


# --- advice ----------------------------------------------------------------------------------------------------------

FAST, SLOW = LinearTime(0.0, 0.001), LinearTime(0.0, 0.02)
HOSTS = [("a", (0, 1)), ("b", (2,))]


def test_a_host_that_brings_less_than_its_wire_costs_is_named():
    got = advise_drop([FAST, FAST, SLOW], HOSTS, 200, 0.03, local_wire_s=0.005)
    assert got == "without host b a step is predicted to take 105 ms instead of 128 ms, 18% less: leave b out"
    assert advise_drop([FAST, SLOW], [("a", (0,)), ("b", (1,))], 200, 0.03, local_wire_s=9.0).endswith("leave b out")


@pytest.mark.parametrize("lines, hosts, wire_s", [
    ([FAST, FAST, FAST], HOSTS, 0.03),                                        # it brings more than that
    ([FAST, FAST, SLOW], HOSTS, 0.0),                                         # a transport that costs nothing
    ([FAST, FAST, SLOW], [("a", (0,)), ("b", (1,)), ("c", (2,))], 0.03),      # a transport stays between a and b
    ([FAST, FAST, SLOW], HOSTS, 0.011),                                       # less than 5 % of the step
    ([FAST, FAST, SLOW], [("a", (0, 1, 2))], 0.03)])
def test_else_nothing_is_advised(lines, hosts, wire_s):
    assert advise_drop(lines, hosts, 200, wire_s, local_wire_s=0.005) == ""


def test_same_parts_can_make_a_host_costly_that_gets_no_samples():
    lines, hosts = [LinearTime(0.01, 0.001), LinearTime(0.01, 0.001), LinearTime(1.0, 0.1)], [("a", (0,)), ("b", (1,)),
                                                                                              ("c", (2,))]
    assert advise_drop(lines, hosts, 100, 0.01) == ""
    assert advise_drop(lines, hosts, 100, 0.01, same_parts=True).startswith("without host c")


# --- table -----------------------------------------------------------------------------------------------------------

def test_the_table():
    labels = [RankLabel("a", "A100", "bf16"), RankLabel("b", "V100", "fp16"), RankLabel("b", "CPU", "fp32")]
    got = table(BatchPlan((RankShare(48, 48, 1, 0.1), RankShare(40, 14, 3, 0.09876), RankShare(0, 0, 0, 0.0)), 0.1),
                labels, [0, 16, None])
    assert got == [["0", "a", "A100", "bf16", "48", "1 x 48", "none", "100"],
                   ["1", "b", "V100", "fp16", "40", "3 x 14", "16", "98.76"],
                   ["2", "b", "CPU", "fp32", "0", "-", "none", "0"]]
    assert all(len(row) == len(COLUMNS) for row in got)


@pytest.mark.parametrize("size, ranks", [(16, [str(rank) for rank in range(16)]), (17, ["0", "1-3", "4-16"])])
def test_many_ranks_share_rows(size, ranks):
    labels = [RankLabel("a" if rank < 4 else "b", "A100", "bf16") for rank in range(size)]
    got = table(equal([LinearTime(0.0, 0.001)] * size, 4 * size + 1), labels)
    assert [row[0] for row in got] == ranks and got[0][4] == "5" and got[-1][1:5] == ["b", "A100", "bf16", "4"]


# --- the worked case of docs/explanation/mixed-hosts.md----------------------------------------------------------------

def test_an_a100_and_an_rtx_3090():
    lines = [LinearTime(0.0, 1 / 2300), LinearTime(0.0, 1 / 1900)]
    even, best = equal(lines, 840), plan(lines, 840)
    assert even.samples_P == (420, 420) and speed(even, 840) == pytest.approx(3800)
    assert best.samples_P == (460, 380) and speed(best, 840) == pytest.approx(4200)


def test_an_a100_and_an_rtx_3090_with_a_fixed_cost_and_less_memory():
    lines, ceilings = [LinearTime(0.004, 1 / 2300), LinearTime(0.004, 1 / 1900)], [512, 128]
    even, best = equal(lines, 840, ceilings), plan(lines, 840, ceilings)
    assert [(p.samples, p.accumulate, p.micro_batch) for p in even.parts] == [(420, 1, 420), (420, 4, 105)]
    assert [(p.samples, p.accumulate, p.micro_batch) for p in best.parts] == [(468, 1, 468), (372, 3, 124)]
    assert (round(speed(even, 840)), round(speed(best, 840))) == (3544, 4043)
