"""A step without one of its ranks, as estimated, against a made-up world in which that rank is really gone."""

import json

import numpy as np
import pytest
from small_runs import config, lockstep, make_model, samples

from hvdtrain.engine import loop
from hvdtrain.engine.callbacks.whatif import WhatIf
from hvdtrain.planning.batch.plan import equal, plan
from hvdtrain.planning.batch.whatif import BatchDivision, ExchangeSetup, RankCores, Steps, counted, forecast, line_of
from hvdtrain.planning.linear import LinearTime

N = 120
"""Global batch, divisible by 2, 3 and 4 ranks."""

LINES = [LinearTime(2e-3, 0.2e-3), LinearTime(1e-3, 0.2e-3), LinearTime(3e-3, 0.25e-3), LinearTime(2e-3, 0.5e-3)]
UPDATE_S, WIRE_S = 1e-3, 2e-3


def world(lines, samples_P, steps=200, seed=0, noise=0.05):
    """Make steps of ranks that take their lines' seconds, with noise, and wait for slowest and transport."""
    draw = np.random.default_rng(seed)
    size = len(lines)
    work = np.array([line.seconds(m, 1) for line, m in zip(lines, samples_P)])
    work = work * (1 + noise * draw.standard_normal((steps, size))).clip(0.5)
    own = work + UPDATE_S
    wire = WIRE_S * 2 * (size - 1) / size
    wall = np.repeat(own.max(axis=1)[:, None] + wire, size, axis=1)
    return Steps(wall, work, wall - own, np.tile(np.array(samples_P), (steps, 1)))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("lines", [LINES, LINES[:3], LINES[:2], [LINES[0]] * 4], ids=["4", "3", "2", "4 alike"])
def test_a_forecast_holds_when_the_rank_is_gone(lines, planned):
    divide = plan if planned else equal
    steps = world(lines, divide(lines, N).samples_P)
    found = forecast(steps, BatchDivision(N, None if planned else [1.0] * len(lines)), lines)
    assert found.step_s == pytest.approx(steps.wall.mean())
    for gone in range(len(lines)):
        rest = [line for r, line in enumerate(lines) if r != gone]
        real_s = world(rest, divide(rest, N).samples_P, seed=1 + gone).wall.mean()
        assert found.without_s_P[gone] == pytest.approx(real_s, rel=0.02), gone
        assert found.percent_P[gone] == pytest.approx(100 * (found.step_s / real_s - 1), abs=2.5)


def test_without_the_slowest_rank_the_others_are_faster_and_without_a_fast_one_slower():
    found = forecast(world(LINES, [30] * 4), BatchDivision(N, [1.0] * 4), LINES)
    assert found.percent_P[3] > 10 > -5 > found.percent_P[0]


def test_of_many_ranks_only_the_slowest_are_left_out_in_turn():
    lines = [LINES[1]] * 99 + [LINES[3]]
    found = forecast(world(lines, [30] * 100, steps=20), BatchDivision(3000, [1.0] * 100), lines)
    assert sum(s is not None for s in found.without_s_P) == 16 and found.percent_P[99] > 50


def test_ranks_that_share_cores_get_more_of_them_when_one_goes():
    """The shares grow by half; two ranks have a core each in place of two thirds, in sums as well."""
    steps = world([LinearTime(0, 0.6e-3)] * 3, [30] * 3, noise=0)  # 18 ms by the clock, update apart

    def without(cores):
        setup = ExchangeSetup(places_P=(RankCores(),) * 3, cores=(cores,))
        return forecast(steps, BatchDivision(90, [1.0] * 3), [LinearTime(0, 0.6e-3)] * 3, setup).without_s_P[0]

    assert without(0.0) == pytest.approx(27e-3 + UPDATE_S + WIRE_S, rel=0.01)
    alone_s = (18e-3 + UPDATE_S) * 2 / 3 - UPDATE_S
    assert without(2.0) == pytest.approx(1.5 * alone_s + UPDATE_S + WIRE_S * 2 / 3, rel=0.01)


def test_a_slow_rank_delays_sums_on_the_processors():
    lines = [LinearTime(0, 0.2e-3)] * 2 + [LinearTime(0, 0.4e-3)]
    steps = world(lines, [30] * 3, noise=0)

    def without(on_cores):
        setup = ExchangeSetup("shared", (RankCores(),) * 3, (0.0,), on_cores)
        return forecast(steps, BatchDivision(90, [1.0] * 3), lines, setup).without_s_P[2]

    wire_s = WIRE_S * 2 * 2 / 3  # of three ranks
    assert without(False) - without(True) == pytest.approx(wire_s * 3 / 4 / 2, rel=0.05)


def test_shares_that_are_given_are_kept_among_those_that_stay():
    steps = world(LINES, [40, 40, 20, 20])
    found = forecast(steps, BatchDivision(N, [2, 2, 1, 1]), LINES)
    real_s = world(LINES[:3], [48, 48, 24], seed=9).wall.mean()
    assert found.without_s_P[3] == pytest.approx(real_s, rel=0.02)


def test_a_short_last_step_tells_how_seconds_depend_on_samples():
    work = np.array(([10e-3] * 9 + [6e-3]) * 4)
    sizes = np.array(([32] * 9 + [12]) * 4)
    line = line_of(work, sizes)
    assert (line.a_s, line.c_s) == pytest.approx((3.6e-3, 0.2e-3))
    assert line_of(work[:9], sizes[:9]) is None and line_of(work[:10], sizes[:10]) is None


def test_steps_that_a_save_or_another_cut_sets_apart_do_not_count():
    steps = world(LINES, [30] * 4, steps=50)
    steps.wall[7] += 1.0  # a save: all ranks stood
    steps.samples[:20] = [60, 20, 20, 20]  # before a new plan
    steps.samples[40] = [5, 5, 5, 4]  # the last of an epoch
    steps.work[30], steps.wall[30] = steps.work[30] * 50, steps.wall[30] * 50  # traced
    assert len(counted(steps).wall) == 28


def test_what_was_not_seen_is_not_told():
    few = world(LINES, [30] * 4, steps=5)
    assert forecast(few, BatchDivision(N, [1.0] * 4), LINES) is None
    idle = world(LINES, [60, 60, 0, 0])
    assert forecast(idle, BatchDivision(N, [1, 1, 0, 0]), [None] * 4).without_s_P[3] is not None  # it never had any
    assert forecast(idle, BatchDivision(N, None), [*LINES[:3], None]).without_s_P[0] is None
    alone = forecast(idle, BatchDivision(N, [0, 0, 1, 1]), LINES)
    assert alone.without_s_P[0] is not None and None not in alone.percent_P


def test_a_run_of_several_ranks_records_it(tmp_path):
    settings = config(out=str(tmp_path / "run"), global_batch=8, epochs=20, emulate_speed=[1.0, 0.2])
    lockstep(2, settings, lambda rank: make_model("numpy"), samples(32), loop.fit)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "whatif"] == [64, 80]
    for row in rows:
        if row["event"] == "whatif":
            assert len(row["ranks"]) == len(row["without_s"]) == 2 and row["step_s"] > 0
            assert row["ranks"] == pytest.approx([100 * (row["step_s"] / s - 1) for s in row["without_s"]])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_rank_measures_its_line_and_leaves_the_model_as_it_was(framework, tmp_path):
    settings = config(out=str(tmp_path / "run"), global_batch=16, epochs=2)

    def measured(run):
        loop.fit(run)
        callback = next(c for c in run.callbacks if isinstance(c, WhatIf))
        callback._micro = (samples(8)[0], samples(8)[1])
        before = run.parts.state.state()[0]["model"]
        line = callback._measured(run)
        after = run.parts.state.state()[0]["model"]
        return line, all(np.array_equal(before[name], after[name]) for name in before)

    for line, same in lockstep(2, settings, lambda rank: make_model(framework), samples(32), measured):
        assert same and line.a_s >= 0 and line.c_s > 0
