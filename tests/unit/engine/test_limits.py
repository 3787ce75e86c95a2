"""Limits of time and money: when they end a run, what an attempt has cost, and prices that are missing."""

import json
import threading
import time

import pytest
from small_runs import config, lockstep, make_model, samples

from hvdtrain.cluster.liveness import causes
from hvdtrain.config.texts import ENDS_S
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks import limits as limits_module
from hvdtrain.engine.callbacks.limits import RunLimit, limit_of

HOSTS = "hosts: [{{name: '*', devices: CPU, price_per_hour: {price}}}]"


def priced(tmp_path, text):
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    return str(path)


def limits(size, settings):
    """Return each rank's limit."""
    return lockstep(size, settings, lambda rank: make_model("numpy"), samples(96), limit_of)


def test_a_budget_is_the_time_that_it_pays_for(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(causes, "started_at", lambda: now)
    path = priced(tmp_path, HOSTS.format(price=36))
    found = limits(2, config(budget=2.0, inventory=path))
    begun = causes.started_at()
    assert all(one.ends_at == pytest.approx(begun + 200, abs=1) and one.limit_s == 200 for one in found)
    sooner, = limits(1, config(budget=2.0, inventory=path, time_limit="100"))
    assert sooner.ends_at == pytest.approx(begun + 100, abs=1) and sooner.what == "time limit"
    free, = limits(1, config(budget=2.0, inventory=priced(tmp_path, HOSTS.format(price=0))))
    assert free.ends_at == 0


def test_a_start_that_uses_up_the_time_limit_is_refused_but_not_after_an_earlier_fit(monkeypatch):
    now = time.time()
    monkeypatch.setattr(causes, "started_at", lambda: now - 50)
    monkeypatch.setattr(limits_module, "_trained", trained := threading.Event())
    with pytest.raises(UserError, match="time limit of 40 s, of which the start took 5"):
        limits(2, config(time_limit="40"))
    trained.set()
    assert all(one.whole for one in limits(2, config(time_limit="40")))
    monkeypatch.setenv(causes.ENDS_AT, str(now + 3))
    assert not any(one.whole for one in limits(2, config())), "of a scheduler's limit the length is not known"


@pytest.mark.parametrize("text, words", [("hosts: [{name: '*', devices: CPU}]", "no price"),
                                         ("hosts: [{name: elsewhere, devices: CPU, price_per_hour: 1}]", "no host")])
def test_a_host_without_a_price_is_refused_on_all_ranks(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        limits(2, config(budget=2.0, inventory=priced(tmp_path, text)))
    with pytest.raises(UserError, match="no inventory"):
        config(budget=2.0).check()


def test_attempts_of_one_supervisor_share_the_budget(tmp_path, monkeypatch):
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path / "002"))
    monkeypatch.setenv(causes.JOB, "mine")
    now = time.time()
    monkeypatch.setenv(causes.STARTED_AT, f"{now - 100:.3f}")
    rows = [{"job": "other", "time": now - 90, "per_s": 9.0}, {"job": "mine", "time": now - 80, "per_s": 2.0}]
    (tmp_path / causes.PRICES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert causes.spent(1.0) == pytest.approx(200, abs=1), "until now the hosts of the attempt before were there"
    assert causes.spent_at(tmp_path, "mine", 230.0, now - 100) == pytest.approx(now + 30, abs=1)
    assert causes.spent_at(tmp_path, "nobody", 230.0, now - 100) == 0
    assert causes.cost([(10.0, 2.0), (20.0, 1.0)], 0.0, 30.0) == 50.0


def test_what_a_limit_keeps_free(tmp_path):
    (run,) = lockstep(1, config(out=str(tmp_path / "run"), eval_every=1, global_batch=32),
                      lambda rank: make_model("numpy"), (samples(96), samples(16)), lambda run: run)
    limit = RunLimit(1100.0, 100.0)
    limit.begin(1000.0, 1.0, 1)
    limit.save_s = 0.1
    limit.step(5.0, True)
    assert limit.step_s == 2.5 and limit.needed_s(run) == pytest.approx(0.3 + 5 + ENDS_S)
    for met in (True, False, False, True):
        limit.step(0.5, met)
    assert limit.step_s == 0.5, "the first step, which traces, is forgotten"
    assert limit.needed_s(run) == pytest.approx(0.3 + 4 * 0.5 + ENDS_S + 5.0 + 0.5 * 16 / 32), \
        "up to two steps without an agreement; an evaluation may follow within those"
    limit.evaluation_s = 7.0
    assert limit.needed_s(run) == pytest.approx(0.3 + 4 * 0.5 + ENDS_S + 7.0)
    fresh = RunLimit(1100.0, 100.0)
    fresh.begin(1000.0, 1.0, 1)
    assert not fresh.probes(run, 1040.0) and fresh.probes(run, 1060.0)
    assert not limit.probes(run, 1060.0), "a save has been timed"


def test_a_run_ends_in_time_and_is_saved(tmp_path):
    """A real clock: the limit passes while the run trains."""
    path = priced(tmp_path, HOSTS.format(price=3600))
    settings = config(out=str(tmp_path / "run"), epochs=10**6, budget=1.0, inventory=path)

    def work(run):
        spend = next(one for one in run.callbacks if type(one).__name__ == "Preempt")
        spend._limit.ends_at, spend._limit.limit_s = time.time() + 2.5, 4.0
        loop.fit(run)
        return run

    for run in lockstep(2, settings, lambda rank: make_model("numpy"), samples(96), work):
        assert run.state.requeue and "budget of 1 USD" in run.state.stop
        assert run.saver.spent.saves >= 1
