"""The callback that saves checkpoints: by steps, by the clock, by what a save costs, and after failures."""

from types import SimpleNamespace

import pytest
from fake_run import make_run, walk

from hvdtrain.config import CheckpointConfig as CheckpointSettings
from hvdtrain.core.errors import UserError
from hvdtrain.core.events import Event
from hvdtrain.core.protocols.run import Outcome
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine.callbacks import checkpoint as checkpoint_module
from hvdtrain.engine.callbacks.checkpoint import Checkpoint


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


# --- checkpoint ----------------------------------------------------------------------------------------------------

@pytest.fixture
def saved(monkeypatch):
    """Return steps of written checkpoints; `error` is what writing answers, "disk full" at steps in `bad`."""
    steps = SimpleNamespace(steps=[], error="", bad=(), saver=FakeSaver())

    def save(run):
        steps.steps.append(run.state.cursor.step)
        return "disk full" if run.state.cursor.step in steps.bad else steps.error

    def begin(run):
        run.saver = steps.saver
        run.saver.outcomes.append(Outcome(run.state.cursor.step, save(run)))

    monkeypatch.setattr(checkpoint_module, "save", save)
    monkeypatch.setattr(checkpoint_module, "begin", begin)
    return steps


class FakeSaver:
    """Has written as soon as it was asked to; a save costs ``cost_s`` and takes twice as long."""

    def __init__(self):
        self.outcomes, self.cost_s, self.under_way = [], None, False
        self.spent = SimpleNamespace(last_took_s=0.0)

    def settled(self):
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def busy(self):
        return self.under_way

    def wait(self):
        """Return at once: no write is under way."""

    def end(self):
        """There is nothing to give back."""


def drive(run, callback):
    """Act as the loop does with a due checkpoint and with ranks' reports, on the agreement's outcome."""
    run.callbacks = [callback]
    for _ in walk(run, callback):
        if run.state.wishes.words:
            run.hear()
            run.emit_told()
        due, run.state.save_due = run.state.save_due or run.state.wishes.save, False
        run.state.wishes.save = False
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
    monkeypatch.setattr("hvdtrain.engine.callbacks.checkpoint.time.monotonic", lambda: clock[0])
    run = make_run(tmp_path, rank)
    callback = Checkpoint(CheckpointSettings(every_s=2.5, at_end=False))
    callback.fit_start(run)
    for step in range(1, 11):  # one step a second
        run.state.cursor = Cursor(step=step, epoch_step=step)
        clock[0] += 1.0
        callback.on(Event.STEP_END, run)
        if run.state.wishes.save:
            run.state.wishes.save = False
            callback.on(Event.CHECKPOINT, run)
    assert saved.steps == steps


def test_a_checkpoint_that_fails_is_told_and_the_last_one_is_an_error(run, saved, capsys):
    saved.error = "disk full"
    callback = Checkpoint(CheckpointSettings(every_steps=4))
    drive(run, callback)
    unsaved = str(run.state.findings.unsaved)  # the trainer raises it
    assert unsaved.startswith("the last checkpoint could not be written: disk full")
    said = capsys.readouterr().out
    assert "step 4: checkpoint not written (disk full)" in said and saved.steps == [4, 8, 10]
    assert said.count("not written (") == 1 and "2 checkpoints could not be written, the last 2 in a row" in said


@pytest.mark.parametrize("first, again", [({1, 2, 3, 5}, "step 4: checkpoints are written again, after 3 failures"),
                                          ({1, 3, 5, 6}, "step 2: checkpoints are written again, after 1 failure")])
def test_checkpoints_that_fail_are_said_once_and_counted(first, again, run, saved):
    saved.bad = {*first, 8, 10}
    drive(run, Checkpoint(CheckpointSettings(every_steps=1, at_end=False)))
    assert len(saved.steps) == 10 and run.notes == [
        "step 1: checkpoint not written (disk full); training continues, earlier ones are kept, and further "
        "failures are counted", again, "6 checkpoints could not be written, the last 1 in a row"]


def test_a_checkpoint_that_fails_ends_the_run_where_that_is_asked_for(run, saved):
    saved.bad = {3}
    with pytest.raises(UserError, match="the checkpoint of step 3 could not be written: disk full"):
        drive(run, Checkpoint(CheckpointSettings(every_steps=1, on_failure="stop")))
    assert run.state.cursor.step == 4 and run.notes == []  # told at the agreement after the one that asked for it


def by_the_clock(run, monkeypatch, callback, saver, seconds, **cost):
    """Save a run of one step a second for ``seconds``; returns when."""
    clock, at = [0.0], []
    monkeypatch.setattr("hvdtrain.engine.callbacks.checkpoint.time.monotonic", lambda: clock[0])
    callback.fit_start(run)
    for step in range(1, seconds + 1):
        run.state.cursor = Cursor(step=step, epoch_step=step)
        clock[0] += 1.0
        callback.on(Event.STEP_END, run)
        if run.state.wishes.save:
            run.state.wishes.save = False
            callback.on(Event.CHECKPOINT, run)
            saver.cost_s, saver.spent.last_took_s = cost["cost_s"], cost["took_s"]
            at.append(step)
    return at


@pytest.mark.parametrize("settings, cost, at", [
    ({}, (0.01, 1.0), [60, 120, 180, 240, 300]), ({}, (3.0, 5.0), [60, 160, 260]), ({}, (0.1, 80.0), [60, 180, 300]),
    ({"mtbf_s": 5000.0}, (1.0, 1.0), [60, 160, 260]), ({"mtbf_s": 450.0}, (1.0, 1.0), [*range(60, 301, 34)]),
    ({"every": "off"}, (1.0, 1.0), []), ({"every_s": 150.0}, (9.0, 9.0), [150, 300]),
    ({"every_steps": 1000}, (1.0, 1.0), [])])
def test_without_further_keys_a_run_is_saved_as_often_as_it_costs_little(run, saved, monkeypatch, settings, cost, at):
    callback = Checkpoint(CheckpointSettings(at_end=False, **settings))
    assert by_the_clock(run, monkeypatch, callback, saved.saver, 300, cost_s=cost[0], took_s=cost[1]) == at


def test_no_save_is_wished_for_while_one_is_under_way(run, saved, monkeypatch):
    saved.saver.under_way = True
    callback = Checkpoint(CheckpointSettings(at_end=False))
    assert by_the_clock(run, monkeypatch, callback, saved.saver, 300, cost_s=0.01, took_s=1.0) == [60]


def test_a_run_without_a_step_is_not_saved(run, saved):
    Checkpoint(CheckpointSettings()).on(Event.FIT_END, run)
    assert saved.steps == []
