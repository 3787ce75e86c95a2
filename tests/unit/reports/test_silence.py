"""Announcements of a run while it makes no steps: when, in which words, from which rank."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from hvdtrain.cluster.liveness import pulse
from hvdtrain.config import Config
from hvdtrain.core import ROOT
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.engine.callbacks.auto_compile import AutoCompile
from hvdtrain.engine.callbacks.auto_compression import AutoCompression
from hvdtrain.engine.callbacks.balance import Balance
from hvdtrain.engine.callbacks.checkpoint import Checkpoint
from hvdtrain.engine.callbacks.ledger import Ledger
from hvdtrain.engine.callbacks.memory_fit import MemoryFit
from hvdtrain.reports.progress import silence
from hvdtrain.reports.progress import silence as words


class Told:
    """A watch without its thread, under a clock of the test's; `look` twice a second, as the thread does."""

    def __init__(self, monkeypatch, line=None):
        self.now = 1000.0
        self.lines = []
        self.watch = silence.Watch("plain", False, lambda: self.now)
        self.watch.line = line
        monkeypatch.setattr(silence, "say", self.lines.append)
        monkeypatch.setattr(pulse, "doing", {f"fit_start of {one.__name__}": one.doing for one in (Balance, Ledger)})

    def at(self, phase, seconds, step=None):
        self.watch.at(phase, step)
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.watch.look()

    def steps(self, first, count, seconds, own="backward and exchange"):
        for step in range(first, first + count):
            self.at("data", 0)
            self.at(own, seconds, step)
            self.at("vote", 0)
            self.at("update", 0)
            self.at("step_end of Recorder", 0, step)


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def test_a_phase_is_spoken_of_after_three_seconds_then_seldomer(told):
    told.steps(0, 2, 0.5)
    told.at("evaluation", 130.0)
    told.at("eval_end of Recorder", 2.0)
    assert told.lines == [*(f"evaluating: {s} s so far" for s in (3, 10, 30, 60, 120)), "evaluating: took 130.0 s"]


def test_short_phases_are_spoken_of_when_together_they_are_silent_for_long(told):
    for phase in ("model", "data", "first sample", "exchange", "remat"):
        told.at(phase, 2.0)
    assert told.lines == ["reading the data: 1 s so far", "preparing the gradient exchange: 1 s so far"]


def test_who_was_told_something_else_just_now_is_told_nothing(told):
    for _ in range(4):
        told.at("model", 2.0)
        told.watch.shown()  # a note
    assert told.lines == []


def test_nothing_is_said_while_steps_are_made(told):
    told.steps(0, 20, 1.0)
    told.steps(20, 20, 2.0)
    assert told.lines == []


def test_slow_steps_are_no_silence_but_one_that_is_slower_than_all_before_is(told):
    told.steps(0, 5, 8.0)
    assert told.lines == ["first step: 3 s so far", "step 2: 4 s so far",
                          "step 2: took 8.0 s"]
    told.steps(5, 1, 40.0)
    assert told.lines[3:] == ["step 6: 33 s so far", "step 6: took 40.0 s"]


def test_what_comes_between_steps_is_spoken_of(told):
    told.steps(0, 10, 0.5)
    told.at("evaluation", 6.0, 10)
    told.at("eval_end of Recorder", 0.5)
    assert told.lines == ["evaluating: 4 s so far", "evaluating: took 6.0 s"]
    told.at("data", 5.0)
    assert told.lines[2:] == ["waiting for the next batch: 3 s so far"]


def test_a_rank_that_waits_says_so(told, monkeypatch):
    monkeypatch.setattr(pulse, "own_wait", lambda: "sum of the control plane")
    told.at("restore", 4.0)
    assert told.lines == ["restoring a checkpoint, waiting for other ranks: 3 s so far"]


def test_the_line_counts_seconds_until_something_moves(monkeypatch):
    said = []
    line = SimpleNamespace(doing="", close=lambda: said.append("closed"))

    def say(text):
        if text or line.doing:
            line.doing = text
            said.append(text)

    line.say = say
    told = Told(monkeypatch, line)
    told.at("probe", 5.0)
    told.at("fit_start of Ledger", 0.5)
    told.at("data", 0.5, 0)
    what = "measuring each rank's speed"
    assert said == [f"{what}  0:03", f"{what}  0:04", f"{what}  0:04", f"{what}  0:05", "counting samples  0:00",
                    "waiting for the first batch  0:00"]
    told.watch.close()
    assert said[-1] == "closed" and told.lines == []


def test_the_way_to_the_first_step_is_told_once(told):
    told.watch.before_s = 1.25
    told.at("model", 6.0)
    told.at("data", 0.0)
    told.at("fit_start of Balance", 2.0, 0)
    told.steps(0, 1, 3.0)
    assert told.watch.first_step() == (
        "first step ended 12.2 s after the start: Python and the script 1.2, loading the framework and building "
        "the model 6.0, measuring each rank's speed 2.0, first step 3.0 s")
    told.steps(1, 3, 9.0)
    assert told.watch.first_step() == ""


def test_a_quick_start_is_not_worth_a_line(told):
    told.at("model", 1.0)
    told.steps(0, 1, 1.0)
    assert told.watch.first_step() == ""


@pytest.mark.parametrize("callback", [Balance, AutoCompile, AutoCompression, MemoryFit, Checkpoint])
def test_callbacks_that_take_long_have_words(callback):
    assert callback.doing


def test_every_word_is_for_a_phase_that_somebody_publishes():
    sources = [path.read_text() for path in ROOT.rglob("*.py") if path.name != "words.py"]
    calls = [source for source in sources if "pulse.at(" in source or "agreed(" in source]
    assert [name for name in words._PHASES if not any(f'"{name}"' in source for source in calls)] == []


class Trains:
    """A run that is watched as `Trainer.fit` is."""

    def __init__(self, **keys):
        self.config = Config(**keys)

    @silence.told
    def fit(self, inside):
        return inside()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hvdtrain-progress"]


@pytest.mark.parametrize("facts, progress, watches", [
    (LaunchFacts("solo", 0, 1, 0, 1, "none"), "plain", 1), (LaunchFacts("mpi", 0, 2, 0, 2, "mpirun"), "auto", 1),
    (LaunchFacts("mpi", 1, 2, 1, 2, "mpirun"), "auto", 0), (LaunchFacts("mpi", 1, 2, 1, 2, "mpirun"), "rich", 0),
    (LaunchFacts("solo", 0, 1, 0, 1, "none"), "off", 0),
])
def test_only_rank_0_watches(monkeypatch, facts, progress, watches):
    monkeypatch.setattr(silence, "launch_facts", lambda env: facts)
    assert Trains(progress=progress).fit(lambda: len(threads())) == watches
    assert silence.current() is None and pulse.listener is None
    for thread in threads():
        thread.join(5)
    assert not threads()


def test_nothing_is_said_after_the_last_words(monkeypatch, capsys):
    monkeypatch.setattr(silence, "SILENT_S", 0.0)
    monkeypatch.setattr(silence, "LOOK_S", 0.01)

    def fails():
        watch = silence.current()
        watch._at = ("model", -1, -100.0)  # silent for long
        pulse.leaving()
        print("the last words")
        for thread in threads():
            thread.join(5)
        pulse.at("data", 1)
        assert watch._end.is_set() and silence.current() is None
        raise KeyError("broken")

    with pytest.raises(KeyError):
        Trains(progress="plain").fit(fails)
    assert capsys.readouterr().out.endswith("the last words\n")


def test_a_forked_child_that_ends_takes_nothing_away(monkeypatch):
    def inside():
        child = os.fork()
        if child == 0:
            pulse.leaving()
            os._exit(0 if silence.current() is not None else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), silence.current() is not None

    assert "jax" not in sys.modules  # which refuses to be forked
    assert Trains(progress="plain").fit(inside) == (0, True)
