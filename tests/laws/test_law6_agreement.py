"""Law 6: what changes control flow (stop, save, skip) comes from agreement, never from a rank's own `if`."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    CLASSES,
    FEATURES,
    FRAMEWORKS,
    SLOW_TENSORFLOW,
    Record,
    bits,
    config,
    hiding_model,
    lockstep,
    make_model,
    samples,
    weights,
)

from hvdtrain.config import CheckpointConfig, EarlyStopConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks.base import Callback

UNSHUFFLED = replace(config().data, shuffle=False)


class Wish(Callback):
    """``ranks`` wish to stop at step ``stop_at`` and to save at step ``save_at``."""

    where = "all"

    def __init__(self, ranks, stop_at=-1, save_at=-1):
        self.ranks, self.stop_at, self.save_at = ranks, stop_at, save_at

    def step_end(self, run):
        if run.control.rank in self.ranks:
            if run.state.cursor.step == self.stop_at:
                run.want_stop(f"rank {run.control.rank} is done")
            if run.state.cursor.step == self.save_at:
                run.want_save()


def seen(run, *callbacks):
    """(step, reason, saved at, weights' hash) after a fit with more callbacks."""
    run.callbacks[:0] = [record := Record(), *callbacks]
    loop.fit(run)
    return run.state.cursor.step, run.state.stop, record.saved_at, bits(run)


@pytest.mark.parametrize("size, ranks, reason", [(1, [0], 0), (2, [1], 1), (3, [2], 2), (4, [3, 1], 1)])
def test_the_wish_of_some_ranks_is_everyones(size, ranks, reason, tmp_path):
    setting = config(global_batch=5, max_steps=30, out=str(tmp_path))
    results = lockstep(size, setting, lambda rank: make_model("numpy"), samples(40),
                       lambda run: seen(run, Wish(ranks, stop_at=9, save_at=4)))
    assert len(set(map(repr, results))) == 1
    assert results[0][:3] == (10, f"rank {reason} is done", [5])
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]


def test_a_wish_at_the_end_of_an_epoch_stops_before_the_next(tmp_path):
    setting = config(global_batch=5, out=str(tmp_path))
    results = lockstep(3, setting, lambda rank: make_model("numpy"), samples(20),
                       lambda run: seen(run, Wish([2], stop_at=4)))
    assert {result[:2] for result in results} == {(4, "rank 2 is done")}


def test_a_clock_of_rank_0_saves_on_all(tmp_path):
    """Clocks differ: only rank 0's counts, and it goes through the agreement."""
    setting = config(global_batch=5, max_steps=4, out=str(tmp_path),
                     checkpoint=CheckpointConfig(every_s=1e-6, at_end=False))
    results = lockstep(3, setting, lambda rank: make_model("numpy"), samples(40), seen)
    assert len(set(map(repr, results))) == 1 and results[0][2] == [2, 4]  # step 2's wish is met by its save


class Teller(Callback):
    """``ranks`` tell their number to all at step 2 and at step 4, an epoch's last; every rank notes what it hears."""

    where = "all"

    def __init__(self, ranks):
        self.ranks, self.heard = ranks, []

    def step_end(self, run):
        if run.control.rank in self.ranks and run.state.cursor.step in (2, 4):
            run.tell_all("number", str(run.control.rank))

    def told(self, run):
        self.heard += [(run.state.cursor.step, *word) for word in run.state.told]


def test_what_some_ranks_tell_all_hear_in_rank_order(tmp_path):
    def heard(run):
        teller = Teller([2, 0])
        seen(run, teller)
        return teller.heard

    setting = config(global_batch=5, max_steps=6, out=str(tmp_path))
    results = lockstep(3, setting, lambda rank: make_model("numpy"), samples(20), heard)
    told = [(step, rank, "number", str(rank)) for step in (3, 4) for rank in (0, 2)]
    assert results == [told] * 3  # the second time where the epoch ends, by no step's vote


def test_early_stop_stops_all_at_one_step(tmp_path):
    setting = config(global_batch=5, epochs=50, eval_every=1, lr=1e-12, out=str(tmp_path), shares=[1, 0, 3],
                     early_stop=EarlyStopConfig("loss", patience=2, min_delta=0.1))
    results = lockstep(3, setting, lambda rank: make_model("numpy"), (samples(10), samples(6, 1)), seen)
    assert len(set(map(repr, results))) == 1
    assert results[0][0] == 6 and results[0][1].startswith("early stop: loss not better")


def with_nan(at):
    """24 samples, of which number ``at`` is NaN: unshuffled, in batches of 8, the ranks' parts lie in rank order."""
    x, y = samples(24)
    x[at] = np.nan
    return x, y


def outcome(run):
    """Return how a fit ended, and with what."""
    run.callbacks[:0] = [record := Record()]
    try:
        loop.fit(run)
        end = "completed"
    except UserError as error:
        end = str(error)
    assert all(np.isfinite(w).all() for w in weights(run))
    return end, run.state.cursor.step, tuple(record.non_finite_at), bits(run)


@pytest.mark.parametrize("framework", ["numpy", *SLOW_TENSORFLOW])
@pytest.mark.parametrize("size, at, bad", [(2, 15, 1), (3, 8, 0), (4, 12, 2)])
def test_a_nan_on_one_rank_stops_all_with_one_message(framework, size, at, bad, tmp_path):
    make_model(framework)
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, out=str(tmp_path))
    results = lockstep(size, setting, lambda rank: make_model(framework), with_nan(at), outcome)
    assert len(set(results)) == 1, results
    assert f"not finite at step 1 on rank {bad};" in results[0][0] and "update was not made" in results[0][0]
    before = replace(setting, max_steps=1, out=str(tmp_path / "before"))
    assert results[0][3] == lockstep(size, before, lambda rank: make_model(framework), with_nan(at), outcome)[0][3]


@pytest.mark.parametrize("framework", ["numpy", *SLOW_TENSORFLOW])
@pytest.mark.parametrize("size, at", [(1, 9), (2, 15), (3, 8), (4, 12)])
def test_a_nan_on_one_rank_is_skipped_by_all(framework, size, at, tmp_path):
    make_model(framework)
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, nan_guard="skip", out=str(tmp_path))
    results = lockstep(size, setting, lambda rank: make_model(framework), with_nan(at), outcome)
    assert len(set(results)) == 1, results
    assert results[0][:3] == ("completed", 3, (1,))


FIRST = {"torch": "0.weight", "tensorflow": "hiding/first/kernel"}
"""The parameter of `hiding_model` whose gradient a NaN sample makes NaN."""


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("size, bad", [(1, 0), (2, 1), (3, 2)])
def test_a_nan_that_the_loss_does_not_show_stops_all_before_the_update(framework, size, bad, tmp_path):
    """Sample 14 is in step 1, of the last rank; with shares a rank without samples looks on."""
    hiding_model(framework)
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, out=str(tmp_path), accumulate=2)
    results = lockstep(size, setting, lambda rank: hiding_model(framework), with_nan(14), outcome)
    assert len(set(results)) == 1, results
    end = results[0][0]
    assert f"not finite at step 1 on rank {bad}; that step's update was not made" in end
    assert f"first there: the gradient of {FIRST[framework]}" in end
    before = replace(setting, max_steps=1, out=str(tmp_path / "before"))
    assert results[0][3] == lockstep(size, before, lambda rank: hiding_model(framework), with_nan(14), outcome)[0][3]


def test_a_nan_in_a_rank_s_only_sample_is_skipped_with_batchnorm_over_ranks(tmp_path, capsys):
    """Batches of one sample have no statistics: the second search for the NaN must not end the run."""
    nn = pytest.importorskip("torch").nn
    setting = config(global_batch=2, epochs=1, max_steps=3, data=UNSHUFFLED, nan_guard="skip", sync_batchnorm=True,
                     out=str(tmp_path))
    results = lockstep(2, setting, lambda rank: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6),
                                                              nn.Linear(6, CLASSES)), with_nan(3), outcome)
    assert len(set(results)) == 1 and results[0][:3] == ("completed", 3, (1,)), results
    assert "not finite on rank 1, update skipped on every rank; first there" in capsys.readouterr().out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_nan_that_the_loss_does_not_show_is_skipped_by_all(framework, tmp_path, capsys):
    hiding_model(framework)
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, nan_guard="skip", shares=[1, 0, 1], out=str(tmp_path))
    results = lockstep(3, setting, lambda rank: hiding_model(framework), with_nan(14), outcome)
    assert len(set(results)) == 1 and results[0][:3] == ("completed", 3, (1,)), results
    assert f"rank 2, update skipped on every rank; first there: the gradient of {FIRST[framework]}" in (
        capsys.readouterr().out)


def test_a_gpu_leaves_the_update_out_by_itself_and_tells_a_step_later(tmp_path):
    hiding_model("torch")
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, out=str(tmp_path))

    def late(run):
        run.parts.stage.asynchronous = run.parts.optimizer.looks = True
        return outcome(run)

    results = lockstep(2, setting, lambda rank: hiding_model("torch"), with_nan(14), late)
    assert len(set(results)) == 1 and "not finite at step 2 on rank 0, 1; detected one step late" in results[0][0]
    before = replace(setting, max_steps=1, out=str(tmp_path / "before"))
    assert results[0][3] == lockstep(2, before, lambda rank: hiding_model("torch"), with_nan(14), outcome)[0][3]
    end = replace(setting, out=str(tmp_path / "last"))
    last = lockstep(2, end, lambda rank: hiding_model("torch"), with_nan(22), late)
    assert len(set(last)) == 1 and "not finite at step 3 on rank 0, 1; detected one step late" in last[0][0]


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_a_model_that_is_not_finite_is_not_trained(framework, tmp_path):
    def poisoned(rank):
        model = make_model(framework) if framework == "numpy" else hiding_model(framework)
        if framework == "numpy":
            model.params["w1"][0, 0] = np.inf
        elif framework == "torch":
            next(iter(model.parameters())).data[0, 0] = np.nan
        else:
            model.layers[-1].bias.assign(np.full(CLASSES, np.nan, np.float32))
        return model

    with pytest.raises(UserError, match="of the model is not finite before the first step"):
        lockstep(2, config(global_batch=8, epochs=1, out=str(tmp_path)), poisoned, samples(24), outcome)


@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_that_overflows_in_the_sum_is_skipped_by_all(size, tmp_path):
    """Every loss is finite; only the summed gradient is not, which every rank sees alike."""
    x, y = samples(24)
    x = x.astype(np.float64)
    x[9:12] = 1e308 * np.sign(x[9:12])
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, nan_guard="skip", out=str(tmp_path))

    def work(run):
        forward = run.spec.model.gradient

        def overflowing(x, y):
            loss, grads = forward(np.clip(x, -5, 5), y)
            huge = np.abs(x).max() > 1e300
            return loss, {n: g + 1.7e308 * np.sign(g) if huge else g for n, g in grads.items()}

        run.spec.model.gradient = overflowing
        with np.errstate(over="ignore", invalid="ignore"):
            return outcome(run)

    results = lockstep(size, replace(setting, accumulate=8), lambda rank: make_model("numpy"), (x, y), work)
    assert len(set(results)) == 1 and results[0][:3] == ("completed", 3, (1,))


def test_too_many_skips_in_a_row_stop_all(tmp_path):
    x, y = samples(40)
    x[8:32] = np.nan
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, nan_guard="skip", max_skipped=2, out=str(tmp_path))
    results = lockstep(2, setting, lambda rank: make_model("numpy"), (x, y), outcome)
    assert len(set(results)) == 1
    assert "step 3 on rank 0, 1 (3 steps in a row)" in results[0][0]


def test_the_log_tells_what_was_agreed(tmp_path):
    setting = config(global_batch=5, max_steps=30, out=str(tmp_path), log_every=2)
    lockstep(2, setting, lambda rank: make_model("numpy"), samples(40), lambda run: seen(run, Wish([1], stop_at=5)))
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "step"] == [2, 4, 6]
    assert [r["event"] for r in records[-2:]] == ["end", "seconds"] and records[-2]["stop"] == "rank 1 is done"
