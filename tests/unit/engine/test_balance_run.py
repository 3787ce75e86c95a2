"""`balance` in whole runs of the numpy backend, ranks as threads: the ranks' speeds are made up, all else is real."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_runs import Record, apart, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.config import CheckpointConfig, DataConfig, Named, RebalanceConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.engine.callbacks import balance as room
from hvdtrain.engine.callbacks import meter
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run_parts import RunState
from hvdtrain.planning.linear import LinearTime, Speed

BATCH, STEPS = 48, 60
FAST, SLOW = LinearTime(0.001, 0.0005), LinearTime(0.001, 0.002)


class Clock(Callback):
    """Stands before the meter: each rank's computing took what its line of the moment says."""

    where = "all"

    def __init__(self, line_at):
        self.line_at, self.total, self.own, self.micros = line_at, 0.0, 0, 0

    def step_end(self, run):
        p = run.timeline.totals
        line = self.line_at(run.control.rank, run.state.cursor.step)
        self.total += line.seconds(p.own_samples - self.own, p.own_micros - self.micros)
        self.own, self.micros = p.own_samples, p.own_micros
        p.seconds["compute"] = self.total
        p.step_s = 10.0 * p.steps  # long windows: the meter compares every five steps


def settings(tmp_path, **changes):
    return config(global_batch=BATCH, max_steps=STEPS, out=str(tmp_path), optimizer=Named("SGD", {"momentum": 0.5}),
                  **changes)


def balanced(monkeypatch, size, tmp_path, lines, line_at, **changes):
    """(weights, samples by step, notes, reading) by rank, of whole runs whose probe finds ``lines``."""
    monkeypatch.setattr(room, "probe", lambda run, backend: [Speed(line, 0, (8,), (1.0,)) for line in lines])

    class Parts(Callback):
        where = "all"

        def __init__(self):
            self.before, self.taken = 0, []

        def step_end(self, run):
            self.taken.append(run.timeline.totals.own_samples - self.before)
            self.before = run.timeline.totals.own_samples

    def work(run):
        parts = Parts()
        run.callbacks[:0] = [Clock(line_at), parts]
        fitted(run)
        compared = next(c for c in run.callbacks if isinstance(c, meter.Meter))
        return weights(run), parts.taken, run.notes, compared.reading

    return lockstep(size, settings(tmp_path, **changes), lambda rank: make_model("numpy"), samples(BATCH * 4), work)


def curve(tmp_path):
    ((want),) = lockstep(1, settings(tmp_path), lambda rank: make_model("numpy"), samples(BATCH * 4),
                         lambda run: weights(fitted(run)))
    return want


def test_static_keeps_the_plan_of_the_probe_and_the_curve(monkeypatch, tmp_path):
    ranks = balanced(monkeypatch, 2, tmp_path / "2", [FAST, SLOW], lambda rank, step: FAST if rank else SLOW,
                     balance="static")
    want = curve(tmp_path / "1")
    for (got, taken, notes, _), count in zip(ranks, (39, 9)):
        assert taken == [count] * STEPS
        assert apart(got, want) < 1e-12
        assert any("39 + 9 samples" in note for note in notes)


@pytest.mark.parametrize("after", [20, 22])
def test_auto_follows_a_rank_that_changes_its_speed_and_the_curve_does_not_notice(monkeypatch, tmp_path, after):
    def line_at(rank, step):
        return FAST if (rank == 0) == (step <= after) else SLOW

    ranks = balanced(monkeypatch, 2, tmp_path / "2", [FAST, SLOW], line_at, balance="auto")
    want = curve(tmp_path / "1")
    for (got, taken, notes, reading), first, last in zip(ranks, (39, 9), (9, 39)):
        assert taken[:after] == [first] * after and taken[after + 15:] == [last] * (STEPS - after - 15)
        assert apart(got, want) < 1e-12
        assert any("balance auto: from step" in note for note in notes)
        assert 0 < reading.percent <= 101
    moved = next(step for step, n in enumerate(ranks[0][1]) if n != 39)
    assert moved <= after + 8, "a window of five steps shows it and one of three confirms it"


def test_auto_on_equal_ranks_changes_nothing(monkeypatch, tmp_path):
    for _, taken, notes, _ in balanced(monkeypatch, 3, tmp_path, [FAST] * 3, lambda rank, step: FAST, balance="auto"):
        assert taken == [16] * STEPS and not any("from step" in note for note in notes)


def test_a_rank_that_only_holds_others_up_gets_nothing(monkeypatch, tmp_path):
    ranks = balanced(monkeypatch, 3, tmp_path / "3", [FAST, LinearTime(1.0, 0.1), FAST], lambda rank, step: FAST,
                     balance="static")
    want = curve(tmp_path / "1")
    assert [taken[0] for _, taken, _, _ in ranks] == [24, 0, 24]
    assert all(apart(got, want) < 1e-12 for got, *_ in ranks)


def test_memory_is_honoured_by_accumulating_on_that_rank_alone(monkeypatch, tmp_path):
    made = [Speed(FAST, 0, (8,), (1.0,)), Speed(FAST, 5, (8,), (1.0,))]
    monkeypatch.setattr(room, "probe", lambda run, backend: made)

    def work(run):
        fitted(run)
        return weights(run), run.timeline.totals.own_samples / STEPS, run.timeline.totals.own_micros / STEPS

    first, second = lockstep(2, settings(tmp_path / "2", balance="static"), lambda rank: make_model("numpy"),
                             samples(BATCH * 4), work)
    assert first[2] == 1 and second[2] == -(-second[1] // 5)
    want = curve(tmp_path / "1")
    assert apart(first[0], want) < 1e-12


def test_a_plan_that_a_device_does_not_hold_is_never_followed(monkeypatch, tmp_path):
    """Every try fails and takes one sample off, as often as plans are tried."""
    found = [Speed(FAST, 0, (2,), (1.0,)), Speed(FAST, 0, (2,), (1.0,))]
    monkeypatch.setattr(room, "probe", lambda run, backend: found)
    refused = []
    monkeypatch.setattr(room, "verified", lambda run, backend, size, tried: refused.append(size) or size - 1)

    def work(run):
        run.devices = [DeviceFacts("cuda", "made up", "sm_80", 1000)] * 2
        fitted(run)
        return run.timeline.totals.own_samples, run.timeline.totals.own_micros

    rows = lockstep(2, settings(tmp_path, balance="static"), lambda rank: make_model("numpy"), samples(BATCH * 4), work)
    assert len(refused) == 2 * room.VERIFY_ROUNDS
    assert all(own / micros < min(refused) for own, micros in rows)


def test_a_resumed_run_goes_on_with_its_plan(monkeypatch, tmp_path):
    def line_at(rank, step):
        return FAST if rank == 1 else SLOW

    out = tmp_path / "out"
    monkeypatch.setattr(room, "probe", lambda run, backend: [Speed(FAST, 0, (8,), (1.0,)) for _ in range(2)])

    def work(steps, resume):
        def inner(run):
            run.callbacks.insert(0, Clock(line_at))
            fitted(run)
            return run.timeline.totals.own_samples, run.timeline.totals.steps, run.notes, weights(run)
        return lockstep(2, replace(settings(out, balance="auto", resume=resume), max_steps=steps,
                                   checkpoint=CheckpointConfig(at_end=True)),
                        lambda rank: make_model("numpy"), samples(BATCH * 4), inner)

    work(40, "")
    monkeypatch.setattr(room, "probe", None)  # it must not be called again
    slow, fast = work(STEPS, "auto")
    assert slow[0] / slow[1] < 12 and fast[0] / fast[1] > 36
    assert any("as planned before" in note for note in slow[2])
    want = curve(tmp_path / "1")
    assert apart(slow[3], want) < 1e-12


def test_a_resumed_run_with_less_memory_probes_anew(monkeypatch, tmp_path):
    out = tmp_path / "out"

    def work(steps, **changes):
        kept = replace(settings(out, balance="static", **changes), max_steps=steps,
                       checkpoint=CheckpointConfig(at_end=True))

        def inner(run):
            fitted(run)
            return run.timeline.totals.own_samples, run.timeline.totals.own_micros, run.notes

        return lockstep(2, kept, lambda rank: make_model("numpy"), samples(BATCH * 4), inner)

    monkeypatch.setattr(room, "probe", lambda run, backend: [Speed(FAST, 0, (8,), (1.0,)) for _ in range(2)])
    assert [row[1] for row in work(4)] == [4, 4]
    limited = [Speed(FAST, 4, (4,), (1.0,)) for _ in range(2)]
    monkeypatch.setattr(room, "probe", lambda run, backend: limited)
    rows = work(8, resume="auto", rebalance=RebalanceConfig(max_micro_batch=[4, 4]))
    assert [row[:2] for row in rows] == [(96, 24)] * 2
    assert any("other ranks, devices or limits" in note for note in rows[0][2])


def test_windows_before_a_plan_is_in_force_are_not_judged(monkeypatch, tmp_path):
    seen = []
    observe = room.Rebalancer.observe
    monkeypatch.setattr(room.Rebalancer, "observe", lambda self, own, samples_P, *rest: seen.append(samples_P) or
                        observe(self, own, samples_P, *rest))

    def line_at(rank, step):
        return FAST if (rank == 0) == (step <= 20) else SLOW

    balanced(monkeypatch, 2, tmp_path, [FAST, SLOW], line_at, balance="auto", data=DataConfig(prefetch=16))
    assert (39, 9) in seen and (9, 39) in seen
    assert set(seen) == {(39, 9), (9, 39)}, "no window mixes cuts"
    assert (39, 9) not in seen[seen.index((9, 39)):], "none of the old one is judged after the decision"


def test_a_rank_with_samples_in_few_steps_counts_by_those(monkeypatch, tmp_path):
    place = SimpleNamespace(hosts=(), host_of=lambda rank: SimpleNamespace(node="here"), cores_of=lambda rank: 2)
    run = SimpleNamespace(config=config(global_batch=100), state=RunState(), topology=place,
                          dp=SimpleNamespace(compression="none"), mesh=Mesh.of([1, 1], 0),
                          feed=SimpleNamespace(data=None, samples=100), control=SimpleNamespace(rank=0))
    # 200 steps of 0.1 s: rank 0 takes 99.5 samples each; rank 1 takes 10 in 10 of them, at 250 samples/s.
    sums = [[20.0, 20.0, 19900.0, 0.0, 20.0, 0.0, 0.0, 0.0],
            [20.0, 0.4, 100.0, 0.0, 0.4, 17.6, 2.0, 0.0]]
    assert meter._reading(run, sums, 200).percent == pytest.approx(100 * 1000 / (995 + 250))


def test_the_log_has_the_plan_and_the_meter(monkeypatch, tmp_path):
    balanced(monkeypatch, 2, tmp_path / "2", [FAST, SLOW], lambda rank, step: SLOW if rank else FAST, balance="auto")
    records = [json.loads(line) for line in (tmp_path / "2" / "log.jsonl").read_text().splitlines()]
    plan = next(r for r in records if r["event"] == "balance")
    assert plan["stage"] == "plan" and plan["samples"] == [39, 9] and len(plan["rows"]) == 2
    meter = next(r for r in records if r["event"] == "meter")
    assert len(meter["ranks"]) == 2 and meter["advice"]


def test_one_rank_takes_all_and_says_so(tmp_path):
    (notes,) = lockstep(1, settings(tmp_path, balance="auto"), lambda rank: make_model("numpy"), samples(BATCH),
                        lambda run: (run.callbacks.append(Record()), fitted(run).notes)[1])
    assert any("one rank" in note for note in notes)


def test_the_real_probe_plans_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = RebalanceConfig(probe_s=0.05)
    for turn in ("measured", "confirmed or measured anew"):
        for notes in lockstep(2, settings(tmp_path / turn, balance="static", rebalance=options),
                              lambda rank: make_model("numpy"), samples(BATCH * 4), lambda run: fitted(run).notes):
            assert any(note.startswith("balance static: ") for note in notes)
    assert len(list((tmp_path / "cache" / "hvdtrain" / "probe").glob("*.json"))) == 2, "one for each place"


@pytest.mark.parametrize("changes, text", [
    ({"balance": "auto", "shares": [1, 1]}, "one of the two"),
    ({"rebalance": RebalanceConfig(max_micro_batch=[4, 4, 4])}, "one per rank"),
    ({"emulate_speed": [1.0]}, "one per rank"),
    ({"emulate_speed": [1.0, 2.0]}, "to 1 at most"),
])
def test_mistakes_are_named(changes, text, tmp_path):
    with pytest.raises(UserError, match=text):
        lockstep(2, settings(tmp_path, **changes), lambda rank: make_model("numpy"), samples(BATCH), fitted)
