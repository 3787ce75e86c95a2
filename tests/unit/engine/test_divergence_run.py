"""The guard of whole runs, ranks as threads: what writes other weights on some ranks is found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_extensions
from small_runs import CUTS, FRAMEWORKS, SLOW_TENSORFLOW, Recut, config, fitted, lockstep, make_model, replans, samples

from hvdtrain import backends
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import ExchangeConfig, Named
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks import divergence as room
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.divergence import Divergence, stride
from hvdtrain.engine.weight_checks import COLUMNS, Diverged, digest, norm, signed_sum

FIRST = {"numpy": "w0", "torch": "dense_0.linear.weight", "tensorflow": "kernel"}


class Write(Callback):
    """Adds ``by`` to one element of parameter ``at`` on some ranks after some step; 0 changes the lowest bit."""

    where = "all"

    def __init__(self, ranks, step, by=1e-3, at=0, element=5):
        self.ranks, self.step, self.by, self.at, self.element = ranks, step, by, at, element

    def step_end(self, run):
        if run.control.rank in self.ranks and run.state.cursor.step == self.step:
            self.write(run)

    def write(self, run):
        (bucket,) = plan_buckets(run.parts.params.specs, 16.0)
        flat_N = own_ops(run).to_host(run.parts.params.flat(bucket)).copy()
        offset = bucket.offsets[bucket.params.index(self.at)]
        at = offset + self.element
        flat_N[at] = flat_N[at] + self.by if self.by else np.nextafter(flat_N[at], 9)
        run.parts.params.write(bucket, own_ops(run).from_host(flat_N))


class WriteAtStart(Write):
    def fit_start(self, run):
        params = run.parts.params
        (bucket,) = plan_buckets(params.specs, 16.0)
        if run.control.rank in self.ranks:
            params.write(bucket, params.flat(bucket) * 1.5)


def own_ops(run):
    return backends.load(run.spec.framework).Ops()


def guard(run):
    return next(c for c in run.callbacks if isinstance(c, Divergence))


def trained(framework, size, *callbacks, steps=12, change=None, **settings):
    """Train with ``callbacks`` before the guard; the runs, by rank."""
    def work(run):
        run.callbacks[:0] = callbacks
        if change is not None:
            change(run)
        return fitted(run)

    setting = config(**{"global_batch": 8, "max_steps": steps, "check_every": 5, **settings})
    return lockstep(size, setting, lambda rank: make_model(framework), samples(64), work)


def found(*args, **settings):
    with pytest.raises(Diverged) as error:
        trained(*args, **settings)
    return error.value


@pytest.mark.parametrize("framework", ["numpy", *SLOW_TENSORFLOW])
@pytest.mark.parametrize("size", [2, 3])
def test_a_weight_that_is_written_on_one_rank_is_named(framework, size, tmp_path):
    error = found(framework, size, Write([1], 6, at=0), out=str(tmp_path / "run"))
    assert FIRST[framework] in error.variable and error.ranks == (1,) and isinstance(error, UserError)
    assert str(error).startswith("after update 8 the ranks no longer hold the same weights: "
                                 f"{error.variable!r} differs on rank 1 of {size} by ")
    assert "They were equal after step 5" in str(error) and "from a checkpoint of step 5 or before" in str(error)


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_another_rate_on_one_rank_is_found_early(framework, tmp_path):
    def change(run):
        if run.control.rank == 1:
            rate(run, 0.2)

    error = found(framework, 2, change=change, out=str(tmp_path / "run"))
    assert "after update 2" in str(error) and error.ranks == (1,) and "different learning rates" in str(error)


def rate(run, lr):
    optimizer = run.parts.optimizer
    if run.spec.framework == "numpy":
        optimizer.lr = lr
    elif run.spec.framework == "torch":
        optimizer.optimizer.param_groups[0]["lr"] = lr
    else:
        optimizer.own.learning_rate.assign(lr)


@pytest.mark.parametrize("size, ranks, who", [(3, (0,), (0,)), (4, (1, 2), (1, 2)), (2, (0,), (1,))])
def test_the_ranks_that_are_fewer_stand_apart(size, ranks, who, tmp_path):
    error = found("numpy", size, Write(ranks, 3, at=1), out=str(tmp_path / "run"))
    assert error.ranks == who and error.variable == "b0"


def test_one_bit_is_found_between_like_devices_and_forgiven_between_unlike_ones(monkeypatch, tmp_path):
    error = found("numpy", 2, Write([1], 3, by=0), check_every=1, out=str(tmp_path / "run"))
    assert "'w0' differs on rank 1 of 2" in str(error)
    monkeypatch.setattr(room, "kinds", lambda run: ["cpu a", "cpu b"])
    trained("numpy", 2, Write([1], 3, by=0), check_every=1, out=str(tmp_path / "unlike"))
    assert "differs" in str(found("numpy", 2, Write([1], 3, by=1e-3), out=str(tmp_path / "far")))
    monkeypatch.setattr(room, "kinds", lambda run: ["cpu a", "cpu b", "cpu b"])
    error = found("numpy", 3, Write([2], 3, by=0), check_every=1, out=str(tmp_path / "pair"))
    assert error.ranks, "the two of one kind have to have the same bits"


def test_weights_that_differ_before_the_first_step_are_refused(tmp_path):
    error = found("numpy", 2, WriteAtStart([1], 0), out=str(tmp_path / "run"))
    assert "after update 0" in str(error) and "before the first step of this run" in str(error)
    assert not (tmp_path / "run").exists(), "a refused run has written nothing"


def test_what_comes_apart_late_is_found_before_the_last_save(tmp_path):
    saved = []

    class Last(Callback):
        def fit_end(self, run):
            saved.append(run.state.cursor.step)

    with pytest.raises(Diverged, match="after update 12"):
        trained("numpy", 2, Write([1], 12), steps=12, check_every=100, out=str(tmp_path / "run"))
    trained("numpy", 2, Last(), Write([1], 12), check_every=0, out=str(tmp_path / "off"))
    assert saved == [12]


def test_copies_are_compared_when_they_have_met(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(test_extensions.MINE)
    for way, steps in (("local_sgd", 12), ("seldom", 14)):
        runs = trained("numpy", 2, steps=steps, check_every=1, data_parallel=f"{mine}:{way}", out=str(tmp_path / way))
        assert guard(runs[0])._good == 12
    error = found("numpy", 2, Still(1), check_every=1, data_parallel=f"{mine}:seldom", out=str(tmp_path / "still"))
    assert "after update 3" in str(error)


class Still(Callback):
    """Has one rank keep its own weights where the copies become their mean."""

    where = "all"

    def __init__(self, rank):
        self.rank = rank

    def fit_start(self, run):
        if run.control.rank == self.rank:
            run.parts.params.write = lambda bucket, flat_N, known=(0, 0): None


CLEAN = [{"framework": "torch", "compression": c} for c in ("fp16", "bf16", "int8", "topk", "powersgd")] + [
    {"accumulate": 3}, {"clip_norm": 0.1}, {"optimizer": Named("SGD", {"momentum": 0.9})}, {"balance": "auto"},
    {"framework": "torch", "compression": "topk", "exchange": ExchangeConfig(topk_momentum=0.9)}, {"nan_guard": "skip"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", CLEAN, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items())[:40])
def test_no_false_alarm_in_whole_runs(settings, tmp_path):
    callbacks = [] if settings.get("balance") else [Recut(replans(3))]
    framework = settings.get("framework", "numpy")
    changes = {name: value for name, value in settings.items() if name != "framework"}
    runs = trained(framework, 3, *callbacks, steps=40, check_every=1, out=str(tmp_path / "run"), **changes)
    assert all(guard(run)._good == 40 for run in runs)


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "fp16"}, {"optimizer": Named("Adam")},
                                      {"sync_batchnorm": True}, {"accumulate": 2, "shares": [3, 1]}],
                         ids=lambda s: next(iter(s)))
def test_no_false_alarm_in_the_frameworks(framework, settings, tmp_path):
    runs = trained(framework, 2, steps=10, check_every=1, out=str(tmp_path / "run"), **settings)
    assert all(guard(run)._good == 10 for run in runs)


@pytest.mark.slow
def test_a_thousand_clean_steps_on_uneven_ranks(tmp_path):
    runs = trained("numpy", 3, steps=1000, check_every=1, shares=CUTS[3][1], out=str(tmp_path / "run"))
    assert guard(runs[0])._good == 1000


def test_roundings_of_a_first_fit_are_forgiven_in_a_second(monkeypatch, tmp_path):
    """5 roundings of 16 after 40 updates, where sqrt(40) are: as many as different devices may have."""
    monkeypatch.setattr(room, "kinds", lambda run: ["cpu a", "cpu b"])

    def work(run):
        run.callbacks.insert(0, Write([1], 30, by=5.5 * 80 * 2.0**-52))
        fitted(run)
        run.config, run.state.stop = replace(run.config, max_steps=50), ""
        return fitted(run).state.cursor.step

    setting = config(global_batch=8, max_steps=40, check_every=5, out=str(tmp_path / "run"))
    assert lockstep(2, setting, lambda rank: make_model("numpy"), samples(64), work) == [50, 50]


def test_auto_compares_as_often_as_it_may_cost(tmp_path):
    def rows(own_s, gather_s, step_s):
        return [(None, own_s, gather_s, step_s), (None, own_s / 2, 2 * gather_s, step_s)]

    assert stride(rows(0.001, 0.0001, 0.1)) == 200
    assert stride(rows(0.1, 0.02, 0.1)) == 400
    assert stride(rows(0.1, float("inf"), 0.1)) == 334
    assert stride(rows(1.0, 0.0, 0.0)) == 200, "nothing is known of a step"
    runs = trained("numpy", 2, steps=12, check_every="auto", out=str(tmp_path / "run"))
    assert guard(runs[0])._next == guard(runs[1])._next >= 200


@pytest.mark.parametrize("value", [-1, "often", 1.5])
def test_what_no_cadence_is(value):
    with pytest.raises(UserError, match="check_every is"):
        replace(config(), check_every=value).check()


@pytest.mark.parametrize("n", [0, 1, 3, 8, 4 * COLUMNS, 4 * COLUMNS + 5, 40_000])
def test_any_changed_bit_changes_the_digest(n):
    draw = np.random.default_rng(n)
    x = draw.integers(0, 256, n).astype(np.uint8)
    seen = {digest(x)}
    for _ in range(min(n * 8, 200)):
        y = x.copy()
        y[draw.integers(n)] ^= 1 << draw.integers(8)
        if not np.array_equal(x, y):
            assert digest(y) != digest(x)
    assert digest(x.copy()) in seen and digest(np.append(x, np.uint8(0))) not in seen
    unaligned = np.empty(n + 1, np.uint8)[1:]
    unaligned[:] = x
    assert digest(unaligned) in seen


def test_signs_that_are_all_turned_change_the_digest():
    for n in (2, 1000, 2 * COLUMNS, 64 * COLUMNS, 100_000):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        assert digest(-x) != digest(x)
        y = x.copy()
        y[1::2] *= -1
        assert digest(y) != digest(x) and digest(x[::-1]) != digest(x)


def test_the_difference_of_signed_sums_is_about_the_distance():
    draw = np.random.default_rng(0)
    ratios = []
    for n in (5, 1000, 3000):
        for _ in range(50):
            x, far = draw.standard_normal(n), 0.1 * draw.standard_normal(n)
            ratios.append(((signed_sum(x + far) - signed_sum(x)) / norm(far)) ** 2)
    assert 0.5 < np.mean(ratios) < 2
    assert all(abs(signed_sum(np.ones(n))) > 1e-4 * np.sqrt(n) for n in range(1, 200)), "a constant adds up to 0"
    assert np.isnan(signed_sum(np.array([1.0, np.nan]))) and np.isnan(norm(np.array([np.nan])))


def test_ranks_that_exchange_nothing_on_purpose_are_not_compared(tmp_path):
    def work(control, wire):
        own = NullCollectives(control.rank, control.size)
        run = fitted(assemble(setting, make_model("numpy"), samples(64), control, own))
        return {type(callback).__name__ for callback in run.callbacks}

    setting = config(global_batch=8, max_steps=12, out=str(tmp_path), audit=2)
    for names in LockstepWorld(2).run(work, timeout_s=30.0):
        assert not names & {"Divergence", "Audit"}, names
