"""Cases of a training step for any backend: ``from step_cases import *`` beside a fixture ``kit``.

A step is touched through `OneStep` alone. A case that a backend cannot have is left out by the name of what its kit
lacks, with the kit's reason.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from one_step import SGD, TwoRanksInOne, X, Y, batch, cut
from pipeline_cases import *  # noqa: F401,F403
from step_kit import EPSILON, Halves, by_hand, given, gradient, length, near, needs, same, same_state, spoilt
from step_state_cases import *  # noqa: F401,F403

from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import Config, Named, ScheduleConfig
from hvdtrain.parallel.precision import Precision

CUTS = [((20,), (12,)), ((7, 6), (0,), (19,)), ((1,), (30, 1), (0,))]
"""Micro-batch sizes of each rank."""
WIRES = [NullCollectives, TwoRanksInOne]
PLAIN = replace(SGD, optimizer=Named("sgd"))


# --- what a step computes ------------------------------------------------------------------------------------------

def test_params_are_the_same_whenever_a_model_is_built(kit):
    first, second = kit.step().params(), kit.step(kit.model(8)).params()
    assert first == second and len({p.name for p in first}) == 4
    assert sorted(p.n for p in first) == [5, 16, 80, 192] and {p.dtype for p in first} == {str(kit.dtype)}


@pytest.mark.parametrize("clip, wire", [(0.0, NullCollectives), *((0.5, wire) for wire in WIRES),
                                        (100.0, TwoRanksInOne)])
def test_sgd_with_momentum_is_a_plain_loop(kit, clip, wire):
    step = kit.step(wire=wire())
    for t in range(20):
        run = step.run([batch(t)], 1 / 32, clip)
        assert run[0][0]
    near(kit.plain(step.model), by_hand("sgd", 20, clip=clip), 1e-5)


@needs("Adam")
@pytest.mark.parametrize("name, decay", [("adam", 0.0), ("AdamW", 0.1)])
def test_adam_is_a_plain_loop(kit, name, decay):
    args = {kit.epsilon: EPSILON, **({"weight_decay": decay} if decay else {})}
    step = kit.step(config=Config(optimizer=Named(name, args), lr=0.01))
    for t in range(20):
        step.run([batch(t)], 1 / 32)
    near(kit.plain(step.model), by_hand(kit.adam, 20, lr=0.01, decay=decay), 1e-5)


@needs("schedules")
def test_schedule_warm_up_and_scaling(kit):
    schedule = replace(kit.halving, warmup_steps=4, linear_scaling_base=16)
    step = kit.step(config=Config(optimizer=Named("sgd"), lr=0.1, schedule=schedule, global_batch=32))
    rates = []
    for t in range(6):
        rates.append(step.learning_rate())
        step.run([batch(t)], 1 / 32)
    assert rates == pytest.approx([0.2 * 0.5**t * min(1, (t + 1) / 4) for t in range(6)], rel=1e-5)
    words = step.describe()
    assert words["optimizer"] == "SGD, lr 0.2" and words["warm-up"] == "linear over 4 steps"
    assert words["device"] == "cpu" and words["lr scaling"].endswith("x 32/16")
    assert words["schedule"].lower() == f"{kit.halving.name} per step"


@pytest.mark.parametrize("wire", WIRES)
def test_accumulation_is_the_whole_batch(kit, wire):
    step = kit.step(wire=wire())
    for t in range(5):
        _, pairs = step.run(cut(batch(t), 9, 3, 20), 1 / 32)
        assert [w for _, w in pairs] == [9, 3, 20]
        assert sum(loss for loss, _ in pairs) == pytest.approx(gradient(by_hand("sgd", t), *batch(t))[0], rel=1e-5)
    near(kit.plain(step.model), by_hand("sgd", 5), 1e-5)


@needs("sample weights")
def test_sample_weights(kit):
    (x, y), w = batch(0), np.linspace(0, 2, 32).astype(np.float32)
    each = [gradient(given(), x[i:i + 1], y[i:i + 1])[0] for i in range(32)]
    step = kit.step()
    _, ((loss, weight),) = step.run([(x, y, w)], 1 / 32)
    assert weight == 32 and loss == pytest.approx(float(w @ each), rel=1e-5)


def test_a_step_that_was_left_in_the_middle_leaves_nothing(kit):
    for wire in WIRES:
        step = kit.step(wire=wire())
        step.zero()
        step.forward_backward(batch(9), 1 / 32, False)
        step.run(cut(batch(0), 16, 16), 1 / 32)
        near(kit.plain(step.model), by_hand("sgd", 1), 1e-5)


# --- ranks ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parts", CUTS, ids=str)
def test_ranks_with_unequal_parts_follow_a_plain_loop(kit, parts):
    """Laws 1 and 2; and the squares of the ranks' parts of a gradient add up to the square of its norm."""
    models = [kit.model(3 + rank) for rank in range(len(parts))]  # rank 0's are everyone's

    def one_rank(control, wire):
        step = kit.step(models[control.rank], SGD, wire, control.rank)
        for t in range(12):
            now = parts[t % len(parts):] + parts[:t % len(parts)]
            before = sum(map(sum, now[:control.rank]))
            verdict, _ = step.run(cut(tuple(a[before:] for a in batch(t)), *now[control.rank]), 1 / 32, check=True)
        return step.weights(), kit.plain(step.model), verdict, step.squares()

    results = LockstepWorld(len(parts)).run(one_rank)
    for other in results[1:]:
        same(other[0], results[0][0])
    near(results[0][1], by_hand("sgd", 12), 1e-5)
    ((finite, norm),) = {verdict for _, _, verdict, _ in results}
    assert finite and norm == pytest.approx(length(gradient(by_hand("sgd", 11), *batch(11))[1]) / 32, rel=1e-4)
    assert sum(own for *_, own in results) == pytest.approx(norm**2, rel=1e-5)


def test_a_global_batch_without_any_sample_is_no_error(kit):
    """Weight 0: every rank hands over zeros."""
    step = kit.step(config=PLAIN, wire=TwoRanksInOne())
    before = step.weights()
    assert step.run([], 0.0, check=True)[0] == (True, 0.0)
    same(step.weights(), before)


@needs("buffers")
@pytest.mark.parametrize("sizes", [(0, 8, 24), (0, 0)], ids=str)
def test_statistics_become_their_mean_by_the_samples_that_ranks_saw(kit, sizes):
    models, ends = [kit.noisy() for _ in sizes], np.cumsum((0, *sizes))
    parts = [tuple(a[i:j] for a in batch(0)) for i, j in zip(ends, ends[1:])]
    alone = []
    for part in parts:
        one = kit.step(kit.noisy())
        one.run([part] if len(part[0]) else [], 1 / 32)
        alone.append(kit.statistics(one.model))

    def one_rank(control, wire):
        step, mine = kit.step(models[control.rank], SGD, wire, control.rank), parts[control.rank]
        step.run([mine] if len(mine[0]) else [], 1 / 32)
        step.sync_buffers()
        once = kit.statistics(step.model)
        step.sync_buffers()  # nothing new was seen
        same(kit.statistics(step.model), once)
        return once

    results = LockstepWorld(len(sizes)).run(one_rank)
    weight = np.array(sizes) / sum(sizes) if sum(sizes) else np.eye(len(sizes))[0]
    near(results[0], [sum(w * a for w, a in zip(weight, rows)) for rows in zip(*alone)], 1e-6)
    for other in results[1:]:
        same(other, results[0])


@needs("buffers")
def test_without_an_exchange_ranks_keep_their_statistics(kit):
    step = kit.step(kit.noisy(), wire=TwoRanksInOne())
    step.run([batch(0)], 1 / 32)
    before = step.weights()
    step.sync_buffers()
    same(step.weights(), before)


# --- what gates an update -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wire", WIRES)
def test_the_norm_and_the_clipped_length(kit, wire):
    config = replace(PLAIN, lr=1.0)
    step, free = kit.step(config=config, wire=wire()), kit.step(config=config, wire=wire())
    want = length([g / 32 for g in gradient(given(), *batch(0))[1]])
    (finite, norm), _ = free.run([batch(0)], 1 / 32, check=True)
    assert finite and norm == pytest.approx(want, rel=1e-5)
    (finite, again), _ = step.run([batch(0)], 1 / 32, clip=norm / 4)
    assert finite and again == norm
    for one, moved in ((free, norm), (step, norm / 4)):
        assert length([a - b for a, b in zip(kit.plain(one.model), given())]) == pytest.approx(moved, rel=1e-5)


@needs("an optional norm")
def test_a_norm_that_nobody_asks_for_is_not_taken(kit):
    assert math.isnan(kit.step().run([batch(0)], 1 / 32)[0][1])


@pytest.mark.parametrize("value, wire", [(np.nan, NullCollectives), (np.inf, TwoRanksInOne)])
def test_no_update_from_what_is_not_finite(kit, value, wire):
    """Nor of the optimizer's memory and the schedule."""
    config = SGD if "Adam" in kit.lacks else Config(lr=0.01, schedule=ScheduleConfig(warmup_steps=10))
    step = kit.step(config=config, wire=wire())
    step.run([batch(1)], 1 / 32, check=True)
    before = step.state()
    for clip in (0.0, 1.0):
        (finite, norm), _ = step.run([spoilt(0, value)], 1 / 32, clip, check=True)
        assert not finite and not math.isfinite(norm)
        same_state(step.state(), before)
        step.discard()
    assert step.run([batch(0)], 1 / 32, clip, check=True)[0][0]


def test_one_ranks_nan_stops_the_update_on_all(kit):
    models = [kit.model() for _ in range(2)]

    def one_rank(control, wire):
        step = kit.step(models[control.rank], SGD, wire, control.rank)
        before = step.weights()
        (finite, _), _ = step.run([spoilt(0) if control.rank == 1 else batch(0)], 1 / 64, check=True)
        same(step.weights(), before)
        return finite

    assert LockstepWorld(2).run(one_rank) == [False] * 2


def test_discard_gives_everything_back(kit):
    """Weights, optimizer, statistics and compressor state; and the next step is that of a run without the bad one."""
    guarded = replace(SGD, nan_guard="skip")
    step, plain = (kit.step(kit.noisy(), guarded, compressor=Halves())
                   for _ in range(2))
    step.discard()  # nothing to undo yet
    begin = step.rank_state()
    for one in (step, plain):
        one.load_rank(begin)
        one.run([batch(0)], 1 / 32, check=True)
    before, own, moved = step.state(), step.rank_state(), step.weights()
    assert not step.run(cut(spoilt(1), 9, 23), 1 / 32, check=True)[0][0]
    assert "buffers" in kit.lacks or any((a != b).any() for a, b in zip(step.weights(), moved))
    step.discard()
    same_state(step.state(), before)
    kept = {name: array for name, array in step.rank_state().items() if name.startswith("compressor.")}
    same(kept, {name: own[name] for name in kept})
    assert any(name.endswith(".owed") and array.any() for name, array in kept.items())
    for one in (step, plain):
        one.load_rank(own)
        assert one.run([batch(2)], 1 / 32, check=True)[0][0]
    same_state(step.state(), plain.state())


def test_discard_before_the_first_step_does_nothing(kit):
    step = kit.step(kit.noisy(), replace(SGD, nan_guard="skip"))
    before = step.state()
    step.discard()
    same_state(step.state(), before)


@needs("float16")
def test_float16_gradients_are_unscaled(kit):
    models = [kit.model() for _ in range(2)]
    before = kit.plain(models[0])
    step, exact = (kit.step(model, replace(PLAIN, loss_scale=1024.0), TwoRanksInOne(), precision=precision)
                   for model, precision in zip(models, (Precision(("fp16", "fp32")), Precision(("fp32", "fp32")))))
    for one in (step, exact):
        assert one.run(cut(batch(0), 20, 12), 1 / 32)[0][0]
    for got, want, start in zip(kit.plain(step.model), kit.plain(exact.model), before):
        assert got.dtype == np.float32 and 0 < np.abs(got - want).max() < 2e-2 * np.abs(want - start).max()


@needs("float16")
def test_a_float16_overflow_is_seen_unasked_and_is_no_update(kit):
    step = kit.step(kit.noisy(), replace(PLAIN, loss_scale=2.0**24), TwoRanksInOne(),
                    precision=Precision(("fp16", "fp32")))
    before = step.state()
    assert before[1]["loss_scale"][0] == 2.0**24
    (finite, norm), _ = step.run([batch(0)], 1 / 32)
    assert not finite and not math.isfinite(norm)
    assert any((a != b).any() for a, b in zip(step.weights(), before[0]["model"].values())), "statistics moved"
    step.discard()
    same_state(step.state(), before)
    assert step.scale.update([0]) and step.scale.value == 2.0**23 and step.state()[1]["loss_scale"] == [2.0**23, 0, 1]
    step.load(*before)
    assert step.scale.value == 2.0**24


# --- what leaves nothing behind --------------------------------------------------------------------------------------

def test_a_trial_leaves_nothing_behind(kit):
    """Before the first step and between two: no weight, statistic, generator or gradient."""
    tried, plain = (kit.step(kit.noisy(), wire=TwoRanksInOne()) for _ in range(2))
    begin = tried.rank_state()
    for one in (tried, plain):
        one.load_rank(begin)
        for t in range(2):
            if one is tried:
                before = one.state(), one.rank_state()
                for n in (3, 8):
                    one.trial(batch(7, n))
                same_state(one.state(), before[0])
                same(one.rank_state(), before[1])
            one.run(cut(batch(t), 20, 12), 1 / 32)
    same_state(tried.state(), plain.state())


def test_the_culprit_is_the_first_parameter_that_is_not_finite(kit):
    step = kit.step(kit.noisy(), replace(SGD, nan_guard="skip"))
    first = step.params()[0].name
    step.run([batch(0)], 1 / 32)
    before = step.state(), step.rank_state()
    assert step.culprit(batch(1)) == ""
    same_state(step.state(), before[0])
    assert not step.run([spoilt(1)], 1 / 32, check=True)[0][0]
    own = step.rank_state()
    assert step.culprit(spoilt(1)) == first
    same(step.rank_state(), own)
    step.discard()
    same_state(step.state(), before[0])
    assert step.run([batch(1)], 1 / 32, check=True)[0][0]


def test_evaluation_changes_nothing(kit):
    step = kit.step(kit.noisy())
    step.run([batch(0)], 1 / 32)
    before = step.state()
    totals = []
    for _ in range(2):
        step.evaluate((X, Y))
        totals.append(step.eval_totals())
    same(totals[1], totals[0])
    same_state(step.state(), before)
    assert step.eval_totals() == {}


def test_totals_of_an_evaluation_add_up_over_cuts(kit):
    step, shares = kit.step(config=replace(SGD, metrics=["accuracy"])), ([3, 47], [14], [])
    pieces, everyone = iter(cut((X, Y), 3, 47, 14)), []
    for share in shares:
        for _ in share:
            step.evaluate(next(pieces))
        everyone.append(step.eval_totals())
    assert everyone[2] == {} and set(everyone[0]) >= {"loss", "accuracy"} and everyone[0]["loss"].dtype == np.float64
    got = step.eval_results({name: everyone[0][name] + everyone[1][name] for name in everyone[0]})
    step.evaluate((X, Y))
    assert got == pytest.approx(step.eval_results(step.eval_totals()), rel=1e-6)
    assert got["loss"] == pytest.approx(gradient(given(), X, Y)[0] / 64, rel=1e-5)
    hidden = np.maximum(X @ given()[0] + given()[1], 0)
    assert got["accuracy"] == ((hidden @ given()[2] + given()[3]).argmax(1) == Y).mean()


@needs("buffers")
def test_what_depends_on_the_cut_of_a_batch_is_told(kit):
    found = kit.step(kit.noisy()).caveats()
    assert len(found) == 2 and "BatchNorm" in found[0] and "dropout" in found[1].lower()
    assert kit.step().caveats() == []


__all__ = [name for name in dir() if name.startswith("test_")]
