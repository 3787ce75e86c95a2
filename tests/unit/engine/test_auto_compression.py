"""The course of compression auto: what it takes, keeps, gives up, and says. Times are scripted."""

import threading
from types import SimpleNamespace

import pytest
from fake_run import make_run
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, samples

from hvdtrain.backends.numpy.model import Model
from hvdtrain.comm.compressors import create
from hvdtrain.comm.sweep import Sweep
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core import records as stream
from hvdtrain.core.events import Event
from hvdtrain.engine.callbacks import auto_compression
from hvdtrain.engine.callbacks.auto_compression import WARM_STEPS, WINDOW_STEPS, AutoCompression
from hvdtrain.planning.compressor_choice import CompressorChoice, CompressorCost
from hvdtrain.planning.linear import Link, Traffic

STEPS = WARM_STEPS + WINDOW_STEPS


def cost(name, codec_s, wire_s):
    return CompressorCost(name, codec_s, (Traffic("allreduce float32", False, 1, wire_s * 1e8),), int(wire_s * 1e8),
                create(name, Config()).numerics)


SWEPT = Sweep({"allreduce float32": Link(0.0, 1e-8)},
              (cost("none", 0.0, 0.08), cost("fp16", 0.01, 0.04), cost("powersgd", 0.02, 0.002)),
              {"topk": "not here"}, 0.1)
"""Of a step of 100 ms that waits 80: fp16 is predicted to take 70 ms, powersgd 42."""


class Script:
    """A run of two ranks of which one is here; `steps` makes steps of given milliseconds go by."""

    def __init__(self, tmp_path, monkeypatch, swept=SWEPT, rank=0, asynchronous=False, **settings):
        self.auto, self.used, self.sweeps = AutoCompression(), [], 0
        self.run = make_run(tmp_path, rank=rank, compression="auto", **settings)
        self.run.collectives = SimpleNamespace(name="wire", size=2, overlaps=True, in_graph=False)
        self.run.dp = SimpleNamespace(compression="none", reducer=SimpleNamespace(ops=None), buckets=[])
        self.run.parts.stage.asynchronous = asynchronous
        self.run.callbacks = [self.auto]
        self.records = []
        monkeypatch.setattr(stream, "checks", [lambda record: self.records.append(record)])
        self.run.use_compressor = self.use

        def measure(*args):
            self.sweeps += 1
            return swept
        monkeypatch.setattr(auto_compression.sweep, "measure", measure)
        self.auto.on(Event.FIT_START, self.run)

    def use(self, name):
        if name != self.run.dp.compression:
            self.used.append(name)
            self.run.dp.compression = name
            self.run.dp.compressor = create(name, self.run.config)

    def steps(self, *step_ms, wait_ms=80.0):
        for ms in step_ms:
            self.run.timeline.totals.add("wait", wait_ms / 1e3)
            self.run.timeline.totals.add("data", 0.001)
            self.run.timeline.totals.step(ms / 1e3 - 0.001, 8)
            self.auto.on(Event.STEP_END, self.run)

    def same(self, ms, n=STEPS):
        self.steps(*[ms] * n)


@pytest.fixture
def script(tmp_path, monkeypatch):
    return lambda **changes: Script(tmp_path, monkeypatch, **changes)


def test_it_takes_the_best_and_keeps_it(script, capsys):
    s = script()
    assert s.sweeps == 1 and not s.used and not capsys.readouterr().out, "nothing is said before there is an answer"
    s.same(100, STEPS - 1)
    assert not s.used
    s.same(100, 1)
    assert s.used == ["powersgd"] and not s.auto.settled
    out = capsys.readouterr().out
    assert ">  powersgd" in out and "not considered: not here" in out and "  42.00" in out
    s.steps(900, 900, *[45] * WINDOW_STEPS)
    assert s.auto.settled and s.auto.choice == "powersgd" and s.used == ["powersgd"]
    assert s.run.notes == [
        "compression auto: powersgd is predicted to take 42 ms a step against 100 ms uncompressed, 58% less, and "
        "is used from now on; gradients are no longer exact (lossy: low rank)",
        "compression auto: powersgd stays: it took 45 ms a step, predicted were 42 ms, without compression 100 ms"]
    s.same(45, 50)
    assert len(s.run.notes) == 2 and s.sweeps == 1


def test_the_log_has_the_numbers(script):
    s = script()
    s.same(100)
    s.same(45)
    decided, checked = (r.values for r in s.records if r.event == "compression")
    assert decided["stage"] == "decided" and decided["choice"] == "powersgd"
    assert [row["name"] for row in decided["rows"]] == ["none", "fp16", "powersgd"]
    assert decided["base"] == {"step_s": pytest.approx(0.1), "wait_s": pytest.approx(0.08)}
    assert decided["refused"] == {"topk": "not here"} and decided["links"]["allreduce float32"]["alpha_s"] == 0
    assert checked["stage"] == "checked" and checked["measured_s"] == pytest.approx(0.045)


@pytest.mark.parametrize("ms, kept", [(99, True), (60, True), (101, False), (300, False)])
def test_it_gives_up_what_is_not_faster(script, ms, kept):
    s = script()
    s.same(100)
    s.same(ms)
    assert s.auto.settled and s.auto.choice == ("powersgd" if kept else "none")
    assert s.used == (["powersgd"] if kept else ["powersgd", "none"])
    assert f"took {ms} ms a step, predicted were 42 ms, without compression 100 ms" in s.run.notes[-1]
    assert ("wrong" in s.run.notes[-1]) is not kept and ("longer than predicted" in s.run.notes[-1]) is kept
    s.same(1)
    assert len(s.run.notes) == 2, "settled for good"


def test_where_the_wire_hides_it_takes_none(script, capsys):
    s = script()
    s.steps(*[100] * STEPS, wait_ms=1.0)
    assert s.auto.settled and s.auto.choice == "none" and not s.used
    assert "compression auto: none: " in s.run.notes[0] and ">  none" in capsys.readouterr().out


def test_a_margin_of_the_configuration(script):
    s = script(exchange=ExchangeConfig(auto_margin=0.6))
    s.same(100)
    assert s.auto.choice == "none" and "the margin is 60%" in s.run.notes[0]


def test_the_median_of_steps_forgives_one(script):
    s = script()
    s.steps(*[100] * STEPS)
    s.steps(*[45] * WARM_STEPS, 45, 45, 2000, 45, 45)
    assert s.auto.choice == "powersgd"


def test_a_device_that_runs_behind_is_timed_by_the_window(script):
    s = script(asynchronous=True)
    s.same(100)
    s.steps(*[45] * WARM_STEPS, 1, 1, 600, 1, 1)  # queued, then waited for
    assert s.auto.choice == "none" and "took 120.8 ms" in s.run.notes[-1]


def test_a_warmup_of_topk_passes_before_the_check(script):
    swept = Sweep(SWEPT.links, (SWEPT.costs[0], cost("topk", 0.001, 0.001)), {}, 0.1)
    s = script(swept=swept, exchange=ExchangeConfig(topk_warmup_steps=20))
    s.same(100)
    s.same(150, 20 + STEPS - 1)
    assert s.auto.choice == "topk" and not s.auto.settled
    s.same(150, 1)
    assert s.auto.settled and s.auto.choice == "none"


def test_quiet_and_other_ranks_print_no_table(script, capsys):
    s = script(rank=1)
    s.same(100)
    assert s.used == ["powersgd"] and not capsys.readouterr().out and not s.records and len(s.run.notes) == 1
    s = script(progress="off")
    s.same(100)
    assert "not considered" not in capsys.readouterr().out


def test_one_rank_has_nothing_to_choose(script, monkeypatch, tmp_path):
    run = make_run(tmp_path, compression="auto")
    run.collectives = SimpleNamespace(name="null", size=1)
    run.use_compressor = lambda name: None
    auto = AutoCompression()
    auto.on(Event.FIT_START, run)
    auto.on(Event.STEP_END, run)
    assert auto.settled and run.notes == ["compression auto: none: one rank sends nothing"]


def test_a_run_that_is_too_short_says_so(script):
    s = script()
    s.same(100, 3)
    s.auto.on(Event.FIT_END, s.run)
    assert s.run.notes == ["compression auto: the run was too short to decide"]
    s = script()
    s.same(100)
    s.auto.on(Event.FIT_END, s.run)
    assert s.run.notes[-1] == "compression auto: the run was too short to check the choice of powersgd"


def test_a_run_goes_on_with_its_choice(script):
    first = script()
    first.same(100)
    unsettled = first.auto.state_dict()
    first.same(45)
    again = script()
    again.sweeps = 0
    again.auto.load_state_dict(first.auto.state_dict())
    again.auto.restored(again.run)
    again.auto.on(Event.FIT_START, again.run)
    assert again.used == ["powersgd"] and again.sweeps == 0 and "as decided before" in again.run.notes[0]
    again.auto.load_state_dict(unsettled)
    again.auto.on(Event.FIT_START, again.run)
    assert again.used == ["powersgd", "none"] and again.sweeps == 1 and not again.auto.settled
    again.auto.load_state_dict({**first.auto.state_dict(), "world": "elsewhere"})
    again.auto.on(Event.FIT_START, again.run)
    assert again.sweeps == 2 and again.auto.choice == "none"


def auto_run(size, tmp_path, max_steps=2 * STEPS + 1):
    """(choice, settled, notes, compressor in use) by rank, of a run of the float32 reference model over lockstep."""
    def work(run):
        auto = next(c for c in run.callbacks if isinstance(c, AutoCompression))
        fitted(run)
        return auto.choice, auto.settled, run.notes, run.dp.compression

    setting = config(global_batch=12, max_steps=max_steps, compression="auto", out=str(tmp_path))
    return lockstep(size, setting, lambda rank: Model((FEATURES, 16, CLASSES), 0, "float32"), samples(60), work)


@pytest.mark.parametrize("size", [2, 3])
def test_a_real_run_decides_alike_on_all_ranks(size, tmp_path):
    results = auto_run(size, tmp_path)
    assert all(result == results[0] for result in results)
    choice, settled, notes, used = results[0]
    assert settled and used == choice and any(note.startswith("compression auto: ") for note in notes)


@pytest.mark.parametrize("keep", [True, False])
def test_a_real_run_changes_its_exchange_between_steps(keep, tmp_path, monkeypatch):
    """The decisions are scripted, and differ on rank 1, which must follow rank 0."""
    monkeypatch.setattr(auto_compression.compressor_choice, "decide", lambda rows, margin: CompressorChoice(
        "powersgd" if threading.current_thread().name == "lockstep-0" else "none", 1.0, "scripted"))
    monkeypatch.setattr(auto_compression.compressor_choice, "verdict", lambda decision, base, measured_s: (
        (threading.current_thread().name == "lockstep-0") is keep, "scripted too"))
    results = auto_run(2, tmp_path)
    assert results[0] == results[1]
    assert results[0][0] == results[0][3] == ("powersgd" if keep else "none")
    assert [note for note in results[0][2] if "scripted" in note] == [
        "compression auto: scripted", "compression auto: scripted too"]


def test_it_is_for_all_ranks():
    assert AutoCompression.where == "all" and Config(compression="auto").check()
