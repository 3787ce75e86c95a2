"""The controller on a pretended cluster: quiet under noise, quick after a change, braked, resumable."""

import json
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.planning.batch.plan import equal, plan
from hvdtrain.planning.batch.rebalance import HOLD, LONGEST_WAIT, REST, Rebalancer
from hvdtrain.planning.linear import LinearTime

LINE = LinearTime(0.001, 0.001)


class Cluster:
    """Ranks with lines of their own whose speed can be changed; a step ends with its slowest rank."""

    def __init__(self, size, n, seed=0, noise=0.0, **options):
        self.lines, self.n, self.noise, self.draw = [LINE] * size, n, noise, random.Random(seed)
        self.factors = [1.0] * size
        self.plan = plan(self.lines, n)
        self.controller = Rebalancer(self.lines, n, None, self.plan, **options)
        self.planned, self.plans, self.speeds, self.window = [], [], [], 0

    def run(self, windows, **slow):
        """Go on for ``windows``; ``slow``: r1=2.5 makes rank 1 take 2.5 times as long from here on."""
        for name, factor in slow.items():
            self.factors[int(name[1:])] = factor
        truth = [line.scaled(factor) for line, factor in zip(self.lines, self.factors)]
        for _ in range(windows):
            own_s = [line.seconds(part.samples, part.accumulate) for line, part in zip(truth, self.plan.parts)]
            self.speeds.append(plan(truth, self.n).step_s / max(own_s))  # 1: as fast as these ranks can be
            self.observe([s * self.draw.uniform(1 - self.noise, 1 + self.noise) for s in own_s])
        return self

    def observe(self, own_s, latest_s=()):
        parts = [part.accumulate for part in self.plan.parts]
        new = self.controller.observe(own_s, self.plan.samples_P, parts, latest_s)
        self.window += 1
        if new is not None:
            assert sum(new.samples_P) == self.n and new is self.controller.plan
            self.plan = new
            self.planned.append(self.window)
            self.plans.append(new)


class Steps(Cluster):
    """The same by steps: windows of five, of three where the controller wants them.

    Steps have noise and now and then a spike; one in which speeds change is half of either speed.
    """

    spikes, length = 0.0, 5

    def steps(self, count, **slow):
        before, self.own_s = list(self.factors), getattr(self, "own_s", [])
        self.run(0, **slow)
        for at in range(count):
            factors = [(old + new) / 2 for old, new in zip(before, self.factors)] if at == 0 else self.factors
            self.own_s.append([
                line.seconds(part.samples, part.accumulate) * factor * self.draw.uniform(1 - self.noise, 1 + self.noise)
                * (self.draw.uniform(2, 6) if self.draw.random() < self.spikes else 1.0)
                for line, factor, part in zip(self.lines, factors, self.plan.parts)])
            if len(self.own_s) == self.length:
                seen, self.own_s = self.own_s, []
                self.observe([statistics.median(own) for own in zip(*seen)], seen[-1])
                self.length = 3 if self.controller.closer else 5


@pytest.mark.parametrize("seed", range(4))
def test_spikes_of_single_steps_give_no_plan(seed):
    cluster = Steps(2, 128, seed, noise=0.1)
    cluster.spikes = 0.01
    cluster.steps(2000)
    assert cluster.planned == []


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_very_unlike_length_give_few_plans(seed):
    cluster = Steps(2, 128, seed, noise=0.5)
    cluster.steps(2000)
    assert len(cluster.planned) <= 12


@pytest.mark.parametrize("phase", range(5))
@pytest.mark.parametrize("fast, slow", [("r0", "r1"), ("r1", "r0")])
def test_a_drastic_change_is_planned_for_within_nine_steps(phase, fast, slow):
    cluster = Steps(2, 128, phase, noise=0.05)
    cluster.steps(50, **{fast: 2.5})
    cluster.steps(50 + phase)
    before = len(cluster.planned)
    cluster.steps(9, **{fast: 1.0, slow: 2.5})
    assert len(cluster.planned) == before + 1
    truth = [line.scaled(factor) for line, factor in zip(cluster.lines, cluster.factors)]
    taken = max(line.seconds(n, 1) for line, n in zip(truth, cluster.plan.samples_P))
    assert taken <= 1.08 * plan(truth, 128).step_s
    cluster.steps(40)
    assert len(cluster.planned) <= before + 2


def test_no_plan_is_made_on_the_eve_of_a_drastic_change():
    cluster = Cluster(2, 128).run(10)
    level, slow = LINE.seconds(64, 1), LINE.scaled(1.2).seconds(64, 1)
    cluster.observe([level, slow])
    cluster.observe([level, slow], [3 * level, slow])
    assert cluster.planned == [] and cluster.controller.closer
    cluster.observe([level, slow], [level, slow])
    assert cluster.planned == [13] and not cluster.controller.closer


@settings(max_examples=30, deadline=None)
@given(slow=st.floats(1.3, 3), drift=st.floats(0.97, 1.03))
def test_a_plan_that_was_followed_is_taken_again_where_it_is_about_as_good(slow, drift):
    cluster = Cluster(2, 1000).run(5, r1=slow).run(5, r1=1.0).run(5, r1=slow * drift)
    first, back, again = cluster.planned[0], *cluster.planned[1:3]
    assert (first, back, again) == (2, 7, 12) and len(cluster.plans) == 3
    assert cluster.plans[1].samples_P == (500, 500)
    best = plan([LINE, LINE.scaled(slow * drift)], 1000)
    taken = max(line.seconds(n, 1) for line, n in zip([LINE, LINE.scaled(slow * drift)], cluster.plans[2].samples_P))
    assert taken <= best.step_s * (1 + HOLD) * 1.001
    if abs(drift - 1) < 0.01:
        assert cluster.plans[2].samples_P == cluster.plans[0].samples_P


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_noise_gives_no_plan(size, seed):
    assert Cluster(size, 64 * size, seed, noise=0.1).run(200).planned == []


@pytest.mark.parametrize("lasting", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 10])
@pytest.mark.parametrize("size", [2, 4])
def test_a_change_that_lasts_gives_one_plan_in_time(size, before, lasting):
    cluster = Cluster(size, 64 * size, lasting=lasting).run(before).run(20, r1=2.5)
    assert cluster.planned == [before + lasting] and min(cluster.speeds[before + lasting:]) > 0.99


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise, least", [(0.03, 0.95), (0.1, 0.92)])
def test_a_change_under_noise_is_followed_with_two_plans_at_most(noise, least, seed):
    cluster = Cluster(2, 128, seed, noise).run(15).run(30, r1=2.5)
    assert cluster.planned[0] == 17 and len(cluster.planned) <= 2
    after = cluster.speeds[25:]
    assert min(after) >= least and sum(after) / len(after) >= 0.95


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fast, slow", [(1.17, 0.85), (1.1, 0.92)])
def test_a_wrong_probe_is_corrected_after_two_windows(fast, slow, seed):
    truth, draw = [LinearTime(0.008, 0.0046), LinearTime(0.02, 0.0117)], random.Random(seed)
    lines = [truth[0].scaled(fast), truth[1].scaled(slow)]
    made = plan(lines, 64)
    controller = Rebalancer(lines, 64, None, made)
    for _ in range(2):
        own_s = [line.seconds(n, 1) * draw.uniform(0.97, 1.03) for line, n in zip(truth, made.samples_P)]
        made = controller.observe(own_s, made.samples_P, [1, 1]) or made
    assert max(line.seconds(n, 1) for line, n in zip(truth, made.samples_P)) <= 1.05 * plan(truth, 64).step_s


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_throttle_that_moves_from_rank_to_rank_and_goes(noise):
    cluster = Cluster(2, 128, 3, noise).run(10, r1=2.5).run(10, r1=1.0, r0=2.5).run(10, r0=1.0)
    assert cluster.planned[::] == [2, 12, 22]
    assert all(min(cluster.speeds[at:at + 8]) >= 0.95 for at in cluster.planned)


def test_a_small_change_that_lasts_is_found_and_a_smaller_one_not():
    assert Cluster(2, 256).run(10).run(40, r1=1.2).planned == [12]
    assert Cluster(2, 256).run(10).run(40, r1=1.08).planned == []


@pytest.mark.parametrize("margin, planned", [(0.05, [12]), (0.5, [])])
def test_the_margin(margin, planned):
    assert Cluster(2, 256, margin=margin).run(10).run(20, r1=1.5).planned == planned


def test_outliers_give_no_plan_not_even_two_running_on_different_ranks():
    cluster = Cluster(2, 128).run(10)
    for outlier in ([5, 1], [1, 1], [1, 5], [5, 1], [1, 0.2], [1, 1], [0.2, 5]):
        cluster.observe([LINE.seconds(64, 1) * factor for factor in outlier])
    assert cluster.run(10).planned == []


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_was_not_measured_changes_nothing(bad):
    cluster = Cluster(2, 128).run(3)
    for _ in range(5):
        cluster.observe([LINE.seconds(64, 1), bad])
    assert cluster.planned == [] and cluster.controller.factors_P == [1.0, 1.0]


def test_equal_shares_at_the_start_are_left_when_the_lines_say_so():
    lines = [LinearTime(0.0, 0.001), LinearTime(0.0, 0.003)]
    start = equal(lines, 64)
    controller = Rebalancer(lines, 64, None, start)
    seen = ([line.seconds(32, 1) for line in lines], start.samples_P, [1, 1])
    assert controller.observe(*seen) is None
    assert controller.observe(*seen).samples_P == (48, 16)


def test_ceilings_and_equal_numbers_of_micro_batches_are_kept():
    lines = [LinearTime(0.0, 0.001)] * 2
    start = plan(lines, 64, [0, 8], same_parts=True)
    controller = Rebalancer(lines, 64, [0, 8], start, same_parts=True)
    new = None
    while new is None:
        new = controller.observe([p.predicted_s * f for p, f in zip(start.parts, (3, 1))], start.samples_P, [4, 4])
    assert new.samples_P == (16, 48) and [p.accumulate for p in new.parts] == [6, 6] and new.parts[1].micro_batch == 8


def test_a_rank_that_stalls_gets_nothing_and_is_tried_again_about_50_windows_later():
    cluster = Cluster(2, 32).run(10).run(150, r1=100.0)
    assert cluster.planned[0] == 12
    tries = cluster.planned[1::2]
    assert 2 <= len(tries) and REST < tries[0] - 12 <= 65
    assert all(back - there == 2 for there, back in zip(tries, cluster.planned[2::2]))  # given up again at once
    assert min(cluster.speeds[12:]) > 0.05  # a try costs a few samples' time, not half the batch's
    again = Cluster(2, 32).run(10).run(10, r1=100.0).run(90, r1=1.0)
    assert again.speeds[-1] == 1.0 and again.plan.samples_P == (16, 16)


def test_a_rank_that_the_lines_give_nothing_is_left_alone():
    lines = [LINE, LinearTime(1.0, 1.0)]
    start = plan(lines, 32)
    controller = Rebalancer(lines, 32, None, start)
    assert start.samples_P == (32, 0)
    assert all(controller.observe([0.033, 0.0], (32, 0), (1, 0)) is None for _ in range(100))


def test_windows_with_a_rest_between_them_are_not_running():
    lines = [LinearTime(0.0, 0.001)] * 2
    controller = Rebalancer(lines, 64, None, equal(lines, 64))
    for samples in (32, 0, 32):
        assert controller.observe([0.032, 0.003 * samples], (64 - samples, samples), (1, 1)) is None
    assert controller.factors_P[1] == 1.0
    controller.observe([0.032, 0.096], (32, 32), (1, 1))
    assert controller.factors_P[1] == pytest.approx(3.0)


def test_plans_that_win_nothing_come_ever_more_rarely():
    # A rank that is slow whenever it has much to do and fast when it has little: no line tells that.
    cluster = Cluster(2, 128)
    for _ in range(400):
        share = cluster.plan.samples_P[1]
        cluster.observe([0.2, LINE.seconds(share, 1) * (4.0 if share >= 64 else 0.25)])
    gaps = [b - a for a, b in zip(cluster.planned, cluster.planned[1:])]
    assert min(gaps) >= 2 and gaps[-1] >= 32 and max(gaps) <= 2 * LONGEST_WAIT
    assert len(cluster.planned) <= 30  # of 200 that would be possible


def test_every_copy_answers_the_same_bits():
    first, second = Cluster(3, 100, 5, 0.1).run(20).run(20, r2=2.0), Cluster(3, 100, 5, 0.1).run(20).run(20, r2=2.0)
    assert first.planned == second.planned and first.plan == second.plan
    assert first.controller.state_dict() == second.controller.state_dict()


def test_a_resumed_run_goes_on_with_its_plan():
    cluster = Cluster(2, 128).run(10, r1=2.5)
    state = json.loads(json.dumps(cluster.controller.state_dict()))
    resumed = Cluster(2, 128)
    assert resumed.controller.load_state_dict(state) == ""
    assert resumed.controller.plan == cluster.plan and resumed.controller.lines_P == cluster.controller.lines_P
    resumed.plan = resumed.controller.plan
    assert resumed.run(10, r1=2.5).planned == [] and resumed.run(5, r1=1.0).planned == [12]


@pytest.mark.parametrize("size, n, ceilings, why", [
    (3, 128, None, "the plan was made for 2 ranks, these are 3"),
    (2, 64, None, "the plan was made for 128 samples a step, these are 64"),
    (2, 128, [32, 32], "rank 0 holds 32 samples, the plan has micro-batches of 92")])
def test_a_plan_that_does_not_fit_is_not_taken(size, n, ceilings, why):
    state = Cluster(2, 128).run(10, r1=2.5).controller.state_dict()
    start = plan([LINE] * size, n, ceilings)
    other = Rebalancer([LINE] * size, n, ceilings, start)
    assert other.load_state_dict(state) == why
    assert other.plan is start and other.factors_P == [1.0] * size
