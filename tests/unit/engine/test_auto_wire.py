"""The course of collectives auto: what it takes, checks, gives up, watches and says. Times and wires are scripted."""

from types import SimpleNamespace

import pytest
from fake_run import make_run

from hvdtrain.cluster.topology import HostRanks, Topology
from hvdtrain.comm.compressors import create
from hvdtrain.config import Config
from hvdtrain.core import records as stream
from hvdtrain.core.events import Event
from hvdtrain.engine.callbacks import auto_wire
from hvdtrain.engine.callbacks.auto_compression import WARM_STEPS, WINDOW_STEPS
from hvdtrain.engine.callbacks.auto_wire import LOOK_STEPS, MOST_TIMES, AutoWire
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.planning.linear import Link
from hvdtrain.planning.transport_choice import MeasuredTransport

STEPS = WARM_STEPS + WINDOW_STEPS
TWO = Topology((HostRanks("a", (0,), 2), HostRanks("b", (1,), 2)))
FOUND = [MeasuredTransport("mpi", Link(0.0, 1e-8), 0.5, 0.0),
         MeasuredTransport("horovod", Link(0.0, 1.2e-8), 1.0, 0.02)]
NEAR = [FOUND[0], MeasuredTransport("horovod", Link(0.0, 1.1e-8), 1.0, 0.02)]
"""Of 4 MB: mpi 40 ms, Horovod 48 ms; one of two cores computes, so that they are not short."""


class Wires:
    """Two transports; ``lacking``: what cannot be had, and why."""

    def __init__(self, lacking):
        self.names, self.left_out, self.why = ["mpi", "horovod"], {"shared": "it would be mpi"}, "no host has several"
        self.lacking, self.used, self.returned = lacking, [], []

    def get(self, name):
        return (None, self.lacking[name]) if name in self.lacking else (SimpleNamespace(name=name, in_graph=False), "")

    def use(self, run, name):
        if name in self.lacking:
            return self.lacking[name]
        self.used.append(name)
        run.collectives = SimpleNamespace(name=name, size=2, in_graph=False)
        return ""

    def give_back(self, name):
        self.returned.append(name)


class Script:
    """A run of two ranks of which one is here; `steps` makes steps of given milliseconds go by."""

    def __init__(self, tmp_path, monkeypatch, max_steps=10_000, found=FOUND, lacking=(), state=None):
        self.auto, self.sweeps = AutoWire(), 0
        self.run = run = make_run(tmp_path, steps=10_000, max_steps=max_steps, threads=1)
        run.topology, run.spelled, run.wires = TWO, run.config, Wires(dict(lacking))
        run.collectives = SimpleNamespace(name="mpi", size=2, in_graph=False)
        run.dp = Replicate.__new__(Replicate)
        run.dp.__dict__.update(plan=lambda wire: [], buckets=[SimpleNamespace(nbytes=4_000_000)],
                               reducer=SimpleNamespace(ops=None, compressor=create("none", Config())))
        self.records = []
        monkeypatch.setattr(stream, "checks", [lambda record: self.records.append(record)])

        def measure(wires, *_):
            self.sweeps += 1
            return [m for m in found if m.name in wires]
        monkeypatch.setattr(auto_wire.transport_sweep, "measure", measure)
        if state:
            self.auto.load_state_dict(state)
            self.auto.restored(run)
        self.auto.on(Event.FIT_START, run)

    def steps(self, n, ms, wait_ms):
        for _ in range(n):
            self.run.timeline.totals.add("wait", wait_ms / 1e3)
            self.run.timeline.totals.step(ms / 1e3, 8)
            self.run.state.cursor = self.run.state.cursor.advance(8)
            self.auto.on(Event.STEP_END, self.run)


@pytest.fixture
def script(tmp_path, monkeypatch):
    return lambda **changes: Script(tmp_path, monkeypatch, **changes)


def test_it_takes_the_best_gives_the_other_back_and_keeps_it(script, capsys):
    s = script()
    assert s.sweeps == 1 and s.auto.choice == "mpi" and not s.run.wires.used and "horovod" in s.run.wires.returned
    out = capsys.readouterr().out
    assert ">  mpi" in out and "not considered: it would be mpi" in out and "48.00" in out
    s.steps(STEPS, 100, 45)
    assert s.auto.settled and s.run.notes == [
        "collectives auto: mpi, plain MPI from rank to rank (flat): 40 ms a step at most, horovod 48 ms",
        "collectives auto: mpi stays: steps of 100 ms wait 45 ms"]
    decided, checked = (r.values for r in s.records if r.event == "wire")
    assert decided["stage"] == "decided" and [row["name"] for row in decided["rows"]] == ["mpi", "horovod"]
    assert decided["bytes"] == 4_000_000 and decided["hosts"][0]["ranks"] == 1 and decided["short"] == 0
    assert checked["stage"] == "checked" and checked["wait_s"] == pytest.approx(0.045)


@pytest.mark.parametrize("ms, kept", [(90, "horovod"), (110, "mpi")])
def test_steps_that_wait_longer_than_reckoned_try_the_other(script, ms, kept):
    s = script()
    s.steps(STEPS, 100, 70)
    assert s.run.wires.used == ["horovod"] and not s.auto.settled
    s.steps(STEPS, ms, 50)
    assert s.auto.settled and s.auto.choice == s.run.collectives.name == kept
    assert s.run.wires.used == (["horovod"] if kept == "horovod" else ["horovod", "mpi"])
    assert f"mpi took 100 ms a step, horovod {ms} ms" in s.run.notes[-1]


@pytest.mark.parametrize("in_graph, tried", [(False, ["horovod"]), (True, [])])
def test_one_about_as_good_is_tried_unless_graphs_would_be_traced_again_for_it(script, in_graph, tried):
    s = script(found=NEAR)
    s.auto._in_graph["horovod"] = in_graph
    s.steps(STEPS, 100, 41)
    assert s.run.wires.used == tried and s.auto.settled is (not tried)


def test_what_cannot_be_had_is_said_and_left_out(script):
    s = script(lacking={"horovod": "stale on b"})
    assert [r.values["refused"] for r in s.records if r.event == "wire"] == [
        {"shared": "it would be mpi", "horovod": "stale on b"}]
    s.steps(STEPS, 100, 99)
    assert s.auto.settled and s.run.notes[-1] == "collectives auto: mpi stays: steps of 100 ms wait 99 ms"


def test_a_short_run_measures_nothing_and_says_so(script):
    s = script(max_steps=49)
    assert not s.sweeps and s.auto.settled
    assert s.run.notes == ["collectives auto: mpi, plain MPI from rank to rank (flat), by rule: no host has several; "
                           "not measured in a run of 49 updates"]
    s.auto.on(Event.FIT_END, s.run)
    assert len(s.run.notes) == 1


def test_a_run_that_ends_before_the_check_says_so(script):
    s = script()
    s.steps(3, 100, 45)
    s.auto.on(Event.FIT_END, s.run)
    assert s.run.notes[-1] == "collectives auto: the run was too short to check mpi"


def test_a_settled_choice_is_taken_up_in_the_same_world_only(script):
    s = script(found=[FOUND[0], MeasuredTransport("horovod", Link(0.0, 1e-9), 1.0)])
    assert s.auto.choice == "horovod"
    s.steps(STEPS, 100, 1)
    state = s.auto.state_dict()
    again = script(state=state)
    assert again.run.collectives.name == "horovod" and not again.sweeps
    assert again.run.notes == ["collectives auto: horovod, as decided before"]
    other = script(state={**state, "world": "another"})
    assert other.run.collectives.name == "mpi" and other.sweeps == 1
    gone = script(state=state, lacking={"horovod": "not built"})
    assert gone.run.collectives.name == "mpi" and gone.sweeps == 1
    assert gone.run.notes[0].endswith("is not available: not built")


def test_a_choice_by_rule_is_measured_by_a_run_that_goes_on_for_longer(script):
    short = script(max_steps=10)
    assert not short.sweeps and short.auto.settled
    state = short.auto.state_dict()
    assert script(max_steps=10_000, state=state).sweeps == 1
    assert not script(max_steps=10, state={**state, "settled": True}).sweeps, "the rule holds in a short one"


def test_a_link_that_changes_for_good_is_measured_anew_a_few_times(script):
    s = script()
    s.steps(STEPS, 100, 40)
    s.steps(4 * LOOK_STEPS, 100, 40)
    assert s.sweeps == 1, "as it was"
    s.steps(2 * LOOK_STEPS, 400, 300)
    s.steps(LOOK_STEPS, 100, 40)
    assert s.sweeps == 1, "for a while only"
    for n in range(1, MOST_TIMES + 2):
        s.steps(4 * LOOK_STEPS, 100 * 5 ** n, 90 * 5 ** n)
        assert s.sweeps == 1 + min(n, MOST_TIMES)
    changed = [r.values for r in s.records if r.event == "wire" and r.values["stage"] == "changed"]
    assert len(changed) == MOST_TIMES and "the link has changed" in changed[0]["reason"]
