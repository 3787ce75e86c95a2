"""Each callback alone, driven by a made-up run."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.callbacks import checkpoint as checkpoint_module
from hvdtrain.callbacks import progress
from hvdtrain.callbacks.base import Callback
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.early_stop import EarlyStop
from hvdtrain.callbacks.jsonl import Jsonl
from hvdtrain.callbacks.nan_guard import NanGuard
from hvdtrain.callbacks.throughput import Throughput
from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import Checkpoint as CheckpointSettings
from hvdtrain.config import Config
from hvdtrain.config import EarlyStop as EarlyStopSettings
from hvdtrain.data.cursor import Cursor
from hvdtrain.errors import UserError
from hvdtrain.events import Event
from hvdtrain.run import Phases, Run, State

STEPS_PER_EPOCH = 5


class FakeFeed:
    """Five steps an epoch, or a stream of unknown length."""

    def __init__(self, steps=STEPS_PER_EPOCH):
        self.steps_per_epoch = steps

    def steps_left(self, cursor):
        return None if self.steps_per_epoch is None else self.steps_per_epoch - cursor.epoch_step


def make_run(tmp_path, rank=0, steps=STEPS_PER_EPOCH, **config):
    """A run without step, data and wire."""
    control = SoloControl("here")
    control.rank = rank
    step = SimpleNamespace(learning_rate=lambda: 0.1, describe=lambda: {"optimizer": "SGD"})
    return Run(config=Config(**config), control=control, group=None, topology=SimpleNamespace(describe=lambda: "1 host"),
               collectives=SimpleNamespace(name="null"), spec=SimpleNamespace(framework="numpy", name="m:build"), step=step,
               feed=FakeFeed(steps), eval_feed=None, out=tmp_path)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def walk(run, callback, epochs=2, losses=None):
    """Every event of a run of five steps an epoch; yields after each STEP_END."""
    callback.on(Event.FIT_START, run)
    for epoch in range(epochs):
        callback.on(Event.EPOCH_START, run)
        for i in range(STEPS_PER_EPOCH):
            run.state.cursor = run.state.cursor.advance(8)
            run.state.loss = 1.0 / run.state.cursor.step if losses is None else losses[run.state.cursor.step - 1]
            run.phases.step(0.01, 8)
            callback.on(Event.STEP_END, run)
            yield run.state.cursor.step
        run.state.cursor = run.state.cursor.next_epoch()
        run.state.metrics = {"loss": 0.5, "accuracy": 0.75}
        callback.on(Event.EVAL_END, run)
        callback.on(Event.EPOCH_END, run)
    callback.on(Event.FIT_END, run)


def all_of(walked):
    return list(walked)


# --- base ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("every, seen", [("", list(range(1, 11))), ("1 step", list(range(1, 11))), ("4 step", [4, 8]),
                                         ("1 epoch", [5, 10]), ("2 epoch", [10]), ("3 epoch", [])])
def test_every_thins_out_steps_only(run, every, seen):
    class Seer(Callback):
        def __init__(self):
            self.steps, self.evals, self.every = [], 0, every

        def step_end(self, run):
            self.steps.append(run.state.cursor.step)

        def eval_end(self, run):
            self.evals += 1

    seer = Seer()
    all_of(walk(run, seer))
    assert seer.steps == seen and seer.evals == 2


def test_every_so_many_seconds(run, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("hvdtrain.callbacks.base.time.monotonic", lambda: clock[0])

    class Seer(Callback):
        every, count = "2.5 s", 0

        def step_end(self, run):
            self.count += 1

    seer, counts = Seer(), []
    for _ in range(8):  # one step a second
        seer.on(Event.STEP_END, run)
        counts.append(seer.count)
        clock[0] += 1.0
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3]


def test_an_epoch_of_a_stream_is_never_seen_coming(tmp_path):
    class Seer(Callback):
        every, count = "1 epoch", 0

        def step_end(self, run):
            self.count += 1

    seer = Seer()
    seer.on(Event.STEP_END, make_run(tmp_path, steps=None))
    assert seer.count == 0


@pytest.mark.parametrize("every, where", [("5 s", "all"), ("x step", "root"), ("0 step", "root"), ("-1 step", "root"), ("1.5 step", "root"),
                                          ("5", "root"), ("5 hours", "root"), ("0 s", "root"), ("nan s", "root"), ("step", "root")])
def test_impossible_intervals_are_refused(run, every, where):
    class Seer(Callback):
        def step_end(self, run):
            raise AssertionError("not its turn")

    seer = Seer()
    seer.every, seer.where = every, where
    with pytest.raises(UserError, match="Seer.every is"):
        seer.on(Event.STEP_END, run)


def test_events_without_a_method_and_state_are_nothing(run):
    callback = Callback()
    for event in Event:
        callback.on(event, run)
    assert callback.state_dict() == {}
    callback.load_state_dict({})


def test_root_callbacks_run_on_rank_0_only(tmp_path):
    class Seer(Callback):
        def __init__(self, where):
            self.where, self.count = where, 0

        def epoch_end(self, run):
            self.count += 1

    for rank, want in ((0, (1, 1)), (1, (0, 1))):
        run = make_run(tmp_path, rank)
        run.callbacks = [Seer("root"), Seer("all")]
        run.emit(Event.EPOCH_END)
        assert tuple(c.count for c in run.callbacks) == want


# --- nan_guard -----------------------------------------------------------------------------------------------------

def hit(guard, run, step, ranks=(1,)):
    run.state.cursor = Cursor(step=step, epoch_step=step)
    run.state.bad_ranks = list(ranks)
    guard.on(Event.NON_FINITE, run)


def test_nan_guard_stops_with_rank_and_step(run):
    with pytest.raises(UserError, match=r"not finite at step 7 on rank 1, 3; the update was not made; .*nan_guard: skip"):
        hit(NanGuard("stop", 20), run, 7, (1, 3))


def test_nan_guard_skips_some_in_a_row(run, capsys):
    guard = NanGuard("skip", 2)
    for step in (3, 4, 6, 7):
        hit(guard, run, step)
    assert (guard.in_a_row, guard.skipped) == (2, 4)
    assert capsys.readouterr().out.count("update skipped on every rank") == 4
    resumed = NanGuard("skip", 2)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    hit(resumed, run, 20)
    for step in (8,):
        with pytest.raises(UserError, match="3 steps in a row"):
            hit(guard, run, step)


# --- early_stop ----------------------------------------------------------------------------------------------------

def watch(run, values, **settings):
    """The number of evaluations after which the callback wants to stop (None: never)."""
    stop = EarlyStop(EarlyStopSettings(**{"metric": "loss", **settings}))
    for i, value in enumerate(values):
        run.state.metrics = {"loss": value, "accuracy": value}
        stop.on(Event.EVAL_END, run)
        if run.state.wants_stop:
            return i + 1
    return None


@pytest.mark.parametrize("values, settings, after", [
    ([5, 4, 3, 2, 1], {"patience": 1}, None),
    ([5, 4, 4, 4], {"patience": 2}, 4),
    ([5, 4, 4, 3, 3, 3], {"patience": 2}, 6),
    ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max", "metric": "accuracy"}, 5),
    ([5, 4.95, 4.9], {"patience": 2, "min_delta": 0.2}, 3),
    ([5, 4.95, 4.7], {"patience": 2, "min_delta": 0.2}, None),
    ([math.nan, math.nan, 1, 0.5, 0.4], {"patience": 3}, None),
    ([math.nan, math.nan], {"patience": 2}, 2),
    ([1, math.inf, math.nan], {"patience": 2, "mode": "max"}, 3)], ids=str)
def test_early_stop(run, values, settings, after):
    assert watch(run, values, **settings) == after


def test_early_stop_only_wishes(run):
    watch(run, [1, 1], patience=1)
    assert run.state.wants_stop == "early stop: loss not better than 1 for 1 evaluations" and not run.stopping()
    run.agree_on_stop()
    assert run.stopping()


def test_early_stop_continues_after_a_resume(run):
    first = EarlyStop(EarlyStopSettings("loss", patience=2))
    run.state.metrics = {"loss": 1.0}
    first.on(Event.EVAL_END, run)
    first.on(Event.EVAL_END, run)
    second = EarlyStop(EarlyStopSettings("loss", patience=2))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.on(Event.EVAL_END, run)
    assert run.state.wants_stop and second.best == 1.0


def test_early_stop_on_an_unknown_metric(run):
    with pytest.raises(UserError, match=r"early_stop.metric 'acuracy' is not evaluated; .*did you mean 'accuracy'"):
        watch(run, [1], metric="acuracy")


# --- checkpoint ----------------------------------------------------------------------------------------------------

@pytest.fixture
def saved(monkeypatch):
    """Steps at which a checkpoint was written; `error` is what writing answers."""
    steps = SimpleNamespace(steps=[], error="")

    def save(run):
        steps.steps.append(run.state.cursor.step)
        return steps.error

    monkeypatch.setattr(checkpoint_module, "save", save)
    return steps


def drive(run, callback):
    """What the loop does with a due checkpoint: on the vote's outcome."""
    for _ in walk(run, callback):
        due, run.state.save_due = run.state.save_due or run.state.wants_save, False
        run.state.wants_save = False
        if due:
            callback.on(Event.CHECKPOINT, run)


@pytest.mark.parametrize("settings, steps", [({}, [10]), ({"at_end": False}, []), ({"every_steps": 4}, [4, 8, 10]),
                                             ({"every_steps": 3, "at_end": False}, [3, 6, 9])])
def test_checkpoints_by_steps(run, saved, settings, steps):
    drive(run, Checkpoint(CheckpointSettings(**settings)))
    assert saved.steps == steps


@pytest.mark.parametrize("rank, steps", [(0, [3, 6, 9]), (1, [])])
def test_checkpoints_by_rank_0s_clock(tmp_path, saved, monkeypatch, rank, steps):
    clock = [0.0]
    monkeypatch.setattr("hvdtrain.callbacks.checkpoint.time.monotonic", lambda: clock[0])
    run = make_run(tmp_path, rank)
    callback = Checkpoint(CheckpointSettings(every_s=2.5, at_end=False))
    callback.fit_start(run)
    for step in range(1, 11):  # one step a second
        run.state.cursor = Cursor(step=step, epoch_step=step)
        clock[0] += 1.0
        callback.on(Event.STEP_END, run)
        if run.state.wants_save:
            run.state.wants_save = False
            callback.on(Event.CHECKPOINT, run)
    assert saved.steps == steps


def test_a_checkpoint_that_fails_is_told_and_the_last_one_is_an_error(run, saved, capsys):
    saved.error = "disk full"
    callback = Checkpoint(CheckpointSettings(every_steps=4))
    with pytest.raises(UserError, match="the last checkpoint could not be written: disk full"):
        drive(run, callback)
    assert "step 4: checkpoint not written (disk full)" in capsys.readouterr().out and saved.steps == [4, 8, 10]


def test_a_run_without_a_step_is_not_saved(run, saved):
    Checkpoint(CheckpointSettings()).on(Event.FIT_END, run)
    assert saved.steps == []


# --- jsonl ---------------------------------------------------------------------------------------------------------

def test_jsonl(run, tmp_path):
    log = Jsonl(4)
    losses = [math.nan if step == 4 else 1.0 / step for step in range(1, 11)]
    for step in walk(run, log, losses=losses):
        if step == 4:
            run.state.bad_ranks = [2]
            log.on(Event.NON_FINITE, run)
    records = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(r["event"], r["step"]) for r in records] == [
        ("start", 0), ("step", 4), ("non_finite", 4), ("eval", 5), ("step", 8), ("eval", 10), ("end", 10)]
    assert records[0]["config"] == Config().to_dict() and records[0]["world_size"] == 1
    assert records[1]["loss"] is None and records[4]["loss"] == 1 / 8 and set(records[4]["phases_s"]) == set(Phases.NAMES)
    assert records[2]["ranks"] == [2] and records[3]["metrics"] == {"loss": 0.5, "accuracy": 0.75}
    assert all(r["time"] > 1e9 for r in records)


def test_jsonl_goes_on_where_a_run_was_resumed(run, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n')
    Jsonl(1).on(Event.FIT_END, run)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


# --- throughput, progress ------------------------------------------------------------------------------------------

def test_throughput_is_that_of_a_window(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hvdtrain.callbacks.throughput.time.perf_counter", lambda: clock[0])
    meter, seen = Throughput(window=2), []
    meter.on(Event.EPOCH_START, run)
    for step_s in (1.0, 1.0, 4.0, 4.0, 4.0):
        clock[0] += step_s
        run.phases.step(step_s, 8)
        meter.on(Event.STEP_END, run)
        seen.append(run.state.samples_per_s)
    assert seen == [8.0, 8.0, 16 / 5, 2.0, 2.0]
    clock[0] += 1000  # an evaluation is not training
    meter.on(Event.EPOCH_START, run)
    clock[0] += 1.0
    run.phases.step(1.0, 8)
    meter.on(Event.STEP_END, run)
    assert run.state.samples_per_s == 8.0


@pytest.mark.parametrize("kind, terminal, launched, made", [
    ("off", True, False, []), ("plain", True, False, [progress.Lines]), ("rich", False, True, [progress.Bar]),
    ("auto", True, False, [progress.Bar]), ("auto", False, False, [progress.Lines]), ("auto", True, True, [progress.Lines])])
def test_progress_by_kind(monkeypatch, kind, terminal, launched, made):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    kinds = [type(c) for c in progress.make(kind, launched)]
    monkeypatch.undo()
    assert kinds == made


@pytest.mark.parametrize("steps, config, total", [
    (5, {"epochs": 3}, 15), (5, {"epochs": 3, "max_steps": 7}, 7), (5, {"epochs": 1, "max_steps": 7}, 5), (None, {"epochs": 3}, None),
    (None, {"max_steps": 7}, 7), (5, {"epochs": 0}, None)])
def test_steps_of_the_whole_run(tmp_path, steps, config, total):
    assert progress._total(make_run(tmp_path, steps=steps, **config)) == total


@pytest.mark.parametrize("steps", [5, None])
def test_lines(tmp_path, capsys, monkeypatch, steps):
    clock = [0.0]
    monkeypatch.setattr("hvdtrain.callbacks.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hvdtrain.callbacks.base.time.monotonic", lambda: clock[0])
    run = make_run(tmp_path, steps=steps, epochs=2)
    run.state.samples_per_s = 1234.5
    for _ in walk(run, progress.Lines(seconds=3.0)):
        clock[0] += 1.0
    lines = capsys.readouterr().out.splitlines()
    total = "/10" if steps else ""
    assert lines[0] == f"step 1{total}  epoch 1/2  loss 1.0000  lr 0.1  1,234 samples/s"
    assert lines[1].startswith(f"step 4{total}  epoch 1/2  loss 0.2500") and lines[1].endswith("eta 0:00:04" if steps else "samples/s")
    assert lines[2] == "epoch 1/2  step 5  test loss 0.5000  accuracy 0.7500  1,234 samples/s"
    assert [line.split()[1] for line in lines] == [f"1{total}", f"4{total}", "1/2", f"7{total}", f"10{total}", "2/2"]


@pytest.mark.parametrize("steps", [5, None])
def test_bar(tmp_path, capsys, steps):
    run = make_run(tmp_path, steps=steps, epochs=2)
    all_of(walk(run, progress.Bar()))
    assert "epoch 1  test loss 0.5000  accuracy 0.7500" in capsys.readouterr().out


# --- the state that callbacks see ----------------------------------------------------------------------------------

def test_phases_leave_the_first_step_out_of_the_speed():
    phases = Phases()
    assert math.isnan(phases.samples_per_s())
    phases.step(100.0, 8)
    assert math.isnan(phases.samples_per_s())
    phases.step(1.0, 8)
    phases.step(1.0, 6)
    phases.add("data", 2.0)
    phases.add("wait", -1e-9)
    assert phases.samples_per_s() == 14 / 4.0 and phases.seconds == {"data": 2.0, "compute": 0.0, "wait": 0.0, "update": 0.0}


def test_the_first_reason_to_stop_counts(run):
    run.agree_on_stop()
    assert not run.stopping() and State().stop == ""
    run.want_stop("a")
    run.want_stop("b")
    run.agree_on_stop()
    assert run.state.stop == "a"
