"""The end of an allocation: a signal, a supervisor's wish or a wall limit; all ranks save and end together."""

import os
import signal
import threading
from dataclasses import replace

import pytest
from small_runs import Record, apart, config, lockstep, make_model, samples, weights

from hvdtrain import Trainer
from hvdtrain.cluster.liveness import causes
from hvdtrain.commands import train
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.config.texts import ENDS_S, LAUNCHER_ENDS_S, LEAST_RESERVE_S, ends_s, reserve_s, seconds_of
from hvdtrain.core.errors import Interrupted, UserError
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks import limits
from hvdtrain.engine.callbacks import preempt as preempting
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.limits import RunLimit
from hvdtrain.engine.callbacks.preempt import Preempt


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Pass(Callback):
    """Lets time pass in every step, on every rank's own clock."""

    where = "all"

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def step_start(self, run):
        self.clock.now += self.seconds


class At(Callback):
    """Does something on one rank at the end of a step, before the others' callbacks see it."""

    where = "all"

    def __init__(self, step, rank, act):
        self.step, self.rank, self.act = step, rank, act

    def step_end(self, run):
        if (run.state.cursor.step, run.control.rank) == (self.step, self.rank):
            self.act(run)


def preempt(run):
    """Return the run's own callback for it."""
    return next(one for one in run.callbacks if isinstance(one, Preempt))


def ended(size, tmp_path, more, **changes):
    """Train runs to their end on ``size`` ranks as threads, each with the callbacks that ``more(rank)`` gives."""
    def work(run):
        record = Record()
        run.callbacks[:0] = more(run)
        run.callbacks.insert(0, record)
        loop.fit(run)
        return run, record

    settings = config(out=str(tmp_path / "run"), **changes)
    return lockstep(size, settings, lambda rank: make_model("numpy"), (samples(96), samples(16)), work)


@pytest.mark.parametrize("rank, name", [(0, "SIGUSR2"), (1, "SIGTERM"), (1, "SIGINT")])
def test_one_rank_that_is_told_ends_all_saved(tmp_path, rank, name):
    def tell(run):
        preempt(run)._heard(getattr(signal, name), None)

    for run, record in ended(2, tmp_path, lambda run: [At(3, rank, tell)], eval_every=1):
        interrupted = name == "SIGINT"
        assert run.state.requeue and run.state.interrupted == interrupted
        assert run.state.stop == f"{'interrupted' if interrupted else 'requeue'}: {name} (rank {rank})"
        assert run.state.cursor.step == 4, "the next vote"
        assert record.saved_at == [4] and run.state.findings.metrics_at == 2, "saved, not evaluated again"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_supervisors_wish_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(causes, "_marked", set())

    def wish(run):
        (tmp_path / causes.REQUEUE).touch()
        preempt(run)._look_at = 0.0

    for run, record in ended(2, tmp_path, lambda run: [At(2, 0, wish)]):
        assert run.state.requeue and "supervisor" in run.state.stop
        assert run.state.cursor.step == 2 and record.saved_at == [2], "an epoch's end: agreed on outside a step"


def test_a_wish_from_before_the_first_step_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path))
    (tmp_path / causes.REQUEUE).touch()
    for run, record in ended(2, tmp_path, lambda run: []):
        assert run.state.requeue and run.state.cursor.step == 0 and record.saved_at == []


def test_a_known_limit_ends_it_before(tmp_path):
    clocks = [Clock(), Clock(5.0)]  # the other rank's clock is wrong, and does not count

    def more(run):
        clock = clocks[run.control.rank]
        one = preempt(run)
        one.__init__(RunLimit(1100.0, 100.0), clock)
        return [Pass(clock, 10.0)]

    for run, _ in ended(2, tmp_path, more):
        assert run.state.requeue and "time limit" in run.state.stop
        assert clocks[0].now + 10.0 < 1100.0, "with time to save"
        assert 5 <= run.state.cursor.step <= 9


@pytest.mark.parametrize("limit_s, whole, earlier_fit, refused", [
    (3.0, True, False, True), (100.0, True, False, False), (3.0, True, True, False), (3.0, False, False, False)])
def test_a_limit_that_the_start_has_used_up_ends_it_before_a_step(tmp_path, monkeypatch, limit_s, whole, earlier_fit,
                                                                  refused):
    """A second is left: of a short limit no job could use more; else earlier attempts, an earlier fit of this process,
    or what ran before in a scheduler's job have used the rest."""
    monkeypatch.setattr(causes, "started_at", lambda: 998.0)
    monkeypatch.setattr(limits, "_trained", threading.Event())
    if earlier_fit:
        first = config(out=str(tmp_path / "first"), epochs=1)
        lockstep(2, first, lambda rank: make_model("numpy"), samples(96), loop.fit)
    settings = config(out=str(tmp_path / "run"), epochs=10**6)

    def work(run):
        preempt(run).__init__(RunLimit(1001.0, limit_s, whole=whole), Clock(1000.0 if run.control.rank == 0 else 5.0))
        loop.fit(run)
        return run

    if refused:
        with pytest.raises(UserError, match="limit of 3 s, of which the start took 2.0 s.* Raise"):
            lockstep(2, settings, lambda rank: make_model("numpy"), samples(96), work)
        assert not (tmp_path / "run").exists()
        return
    for run in lockstep(2, settings, lambda rank: make_model("numpy"), samples(96), work):
        assert run.state.requeue and run.state.cursor.step == 0 and "1 s are left of the time limit" in run.state.stop


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_users_handler_is_called_and_comes_back(tmp_path, number):
    heard = []
    before = signal.signal(number, lambda *args: heard.append(args))
    try:
        mine = signal.getsignal(number)
        trainer = Trainer(replace(config(out=str(tmp_path / "run"), eval_every=0), checkpoint=CheckpointConfig()))
        result = trainer.fit(make_model("numpy"), samples(64),
                             callbacks=[At(2, 0, lambda run: os.kill(os.getpid(), number))])
        assert signal.getsignal(number) is mine and len(heard) == 1
    finally:
        signal.signal(number, before)
    assert result.requeue and result.steps <= 3 and result.stop.startswith(f"requeue: {number.name}")
    assert not (tmp_path / "run" / "completed.json").exists() and not (tmp_path / "run" / "model").exists()
    again = Trainer(replace(trainer.config, resume="auto", epochs=2))
    assert not again.fit(make_model("numpy"), samples(64)).requeue
    assert (tmp_path / "run" / "completed.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_another_fit_continues_after_a_requeue(tmp_path, framework, monkeypatch, interruptible):
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(causes, "_left", set())
    settings = config(out=str(tmp_path / "run"), eval_every=1, epochs=2, global_batch=32, checkpoint=CheckpointConfig())
    if framework != "numpy":
        settings = replace(settings, optimizer=Named("SGD", {"momentum": 0.9}))
    unbroken = Trainer(replace(settings, out=str(tmp_path / "unbroken")))
    wanted = unbroken.fit(make_model(framework), (samples(160), samples(16)))
    trainer = Trainer(settings)
    stops = [At(1, 0, press(signal.SIGTERM)), At(6, 0, press(signal.SIGINT))]
    first = trainer.fit(make_model(framework), (samples(160), samples(16)), callbacks=stops)
    assert first.requeue and first.steps == 2 and [row["kind"] for row in causes.read(tmp_path)] == ["requeue"]
    with pytest.raises(Interrupted, match=f"saved at step 7 in {tmp_path}/run"):
        trainer.fit()
    assert [row["kind"] for row in causes.read(tmp_path)] == ["interrupted"]
    assert (tmp_path / "run" / "checkpoints" / "step-00000007").is_dir()
    last = trainer.fit()
    assert not last.requeue and (last.steps, last.stop, last.metrics) == (wanted.steps, "", wanted.metrics)
    assert list(last.history) == list(wanted.history)
    assert all(last.history[name] == pytest.approx(values) for name, values in wanted.history.items())
    assert apart(weights(trainer.run), weights(unbroken.run)) == 0.0 and not causes.read(tmp_path)
    assert (tmp_path / "run" / "completed.json").exists()


@pytest.fixture
def interruptible():
    """Python's own handler of SIGINT, which is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(*numbers):
    """Return a callback's act that sends this process signals."""
    return lambda run: [os.kill(os.getpid(), number) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("again_s, error", [(0.0, KeyboardInterrupt), (60.0, Interrupted)])
def test_a_second_interrupt_ends_at_once_unless_it_is_the_first_one_twice(tmp_path, monkeypatch, interruptible,
                                                                          again_s, error, capsys):
    monkeypatch.setattr(preempting, "AGAIN_S", again_s)
    trainer = Trainer(config(out=str(tmp_path / "run")))
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit(make_model("numpy"), samples(256), callbacks=[At(1, 0, press(signal.SIGINT, signal.SIGINT))])
    assert caught.type is error and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists() == (error is Interrupted)
    assert "interrupt again to end it at once" in capsys.readouterr().err
    if error is KeyboardInterrupt:  # another fit is not ended by the signals of this one
        assert trainer.fit().stop == "" and (tmp_path / "run" / "completed.json").exists()


@pytest.mark.parametrize("early", [True, False])
def test_a_signal_after_the_last_step_saves_or_lets_the_run_complete(tmp_path, early):
    class Last(Callback):
        where = "all"

        def fit_end(self, run):
            preempt(run)._heard(signal.SIGINT, None)

    def more(run):
        run.callbacks.insert(0 if early else len(run.callbacks), Last())  # before or after the last agreement
        return []

    (run, _), = ended(1, tmp_path, more, epochs=1)
    assert run.state.requeue == run.state.interrupted == early
    assert (tmp_path / "run" / "checkpoints").exists() == early


def test_an_ignored_signal_stays_ignored_and_a_forked_child_has_the_handler_of_before(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        trainer = Trainer(config(out=str(tmp_path / "run"), epochs=2))
        result = trainer.fit(make_model("numpy"), samples(64), callbacks=[At(1, 0, press(signal.SIGTERM))])
        assert not result.requeue and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    one, heard = preempt(trainer.run), []
    one._before, one._pid = {signal.SIGTERM: lambda *args: heard.append(args)}, -1
    one._heard(signal.SIGTERM, None)
    assert len(heard) == 1 and not one._asked


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_train_keeps_a_signal_that_comes_before_its_fit(tmp_path, monkeypatch, number):
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR2, signal.SIGTERM)}
    monkeypatch.setattr(preempting, "_early", [])
    try:
        for one in before:
            signal.signal(one, signal.SIG_DFL)  # whatever other tests of this process have left
        assert train.main(["--print_config"]) == 0
        os.kill(os.getpid(), number)
        (run, record), = ended(1, tmp_path, lambda run: [], epochs=1)
        assert run.state.requeue and run.state.cursor.step == 0 and record.saved_at == []
        assert run.state.stop == f"requeue: {number.name} (rank 0)"
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_without_any_of_it_a_run_ends_as_ever(tmp_path):
    (run, _), = ended(1, tmp_path, lambda run: [], epochs=1)
    assert not run.state.requeue and run.state.stop == "" and run.state.cursor.epoch == 1


@pytest.mark.parametrize("text, seconds", [("", 0), ("90", 90), ("1.5", 1.5), ("00:10:00", 600), ("36:00:05", 129605),
                                           ("1-12:00:00", 129600)])
def test_limits(text, seconds):
    assert seconds_of(text) == seconds
    assert config(time_limit=text).check().time_limit_s() == seconds


@pytest.mark.parametrize("text", ["-5", "10:00", "1h", "00:99:00", "nan", "１０"])
def test_limits_that_are_none(text):
    with pytest.raises(UserError, match="time_limit"):
        config(time_limit=text).check()


def test_what_is_kept_free_for_the_save():
    assert reserve_s(3600, 0, 0) == 120 and reserve_s(600, 0, 0) == 30
    assert reserve_s(20, 0, 0) == LEAST_RESERVE_S
    assert reserve_s(3600, 4.0, 1.0) == 12 + 1.0, "the save, and two more as a margin"
    assert reserve_s(30, 0.1, 0.02) == pytest.approx(0.3 + 0.02), "below a tenth of a short limit"
    assert reserve_s(60, 6.0, 0) == pytest.approx(6.0 + 3.0), "half a save more where it is long"
    assert reserve_s(30, 60.0, 0) == 15, "half the limit at most"
    assert ends_s(1.0, 30) == ENDS_S and ends_s(6.0, 30) == pytest.approx(3.3), "a slow start, a slow end"
    assert ends_s(500.0, 30) == 3.5 and ends_s(500.0, 3600) == 180.0, "of a long start most is data"
    assert ends_s(1.0, 30, 2) == ENDS_S + LAUNCHER_ENDS_S, "MPI and its launcher take their time"
