"""What callbacks tell: the log, the throughput, and the progress on a terminal or in lines."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from fake_run import all_of, make_run, walk

from hvdtrain.callbacks import progress
from hvdtrain.callbacks.jsonl import Jsonl
from hvdtrain.callbacks.throughput import Throughput
from hvdtrain.config import Config
from hvdtrain.events import Event
from hvdtrain.run import Phases


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


# --- jsonl ---------------------------------------------------------------------------------------------------------

def test_jsonl(run, tmp_path):
    log = Jsonl(4)
    losses = [math.nan if step == 4 else 1.0 / step for step in range(1, 11)]
    for step in walk(run, log, losses=losses):
        if step == 4:
            run.state.bad_ranks = [2]
            log.on(Event.NON_FINITE, run)
    records = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert [(r["event"], r["step"]) for r in records] == [
        ("start", 0), ("step", 4), ("non_finite", 4), ("eval", 5), ("step", 8), ("eval", 10), ("end", 10)]
    assert records[0]["config"] == Config().to_dict() and records[0]["world_size"] == 1
    assert (
        records[1]["loss"] is None
        and records[4]["loss"] == 1 / 8
        and set(records[4]["phases_s"]) == set(Phases.NAMES)
    )
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


@pytest.mark.parametrize(
    "kind, terminal, launched, made",
    [
        ("off", True, False, []),
        ("plain", True, False, [progress.Lines]),
        ("rich", False, True, [progress.Bar]),
        ("auto", True, False, [progress.Bar]),
        ("auto", False, False, [progress.Lines]),
        ("auto", True, True, [progress.Lines]),
    ],
)
def test_progress_by_kind(monkeypatch, kind, terminal, launched, made):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    kinds = [type(c) for c in progress.make(kind, launched)]
    monkeypatch.undo()
    assert kinds == made


@pytest.mark.parametrize(
    "steps, config, total",
    [
        (5, {"epochs": 3}, 15),
        (5, {"epochs": 3, "max_steps": 7}, 7),
        (5, {"epochs": 1, "max_steps": 7}, 5),
        (None, {"epochs": 3}, None),
        (None, {"max_steps": 7}, 7),
        (5, {"epochs": 0}, None),
    ],
)
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
    assert lines[1].startswith(f"step 4{total}  epoch 1/2  loss 0.2500") and lines[1].endswith(
        "eta 0:00:04" if steps else "samples/s"
    )
    assert lines[2] == "epoch 1/2  step 5  test loss 0.5000  accuracy 0.7500  1,234 samples/s"
    assert [line.split()[1] for line in lines] == [f"1{total}", f"4{total}", "1/2", f"7{total}", f"10{total}", "2/2"]


@pytest.mark.parametrize("steps", [5, None])
def test_bar(tmp_path, capsys, steps):
    run = make_run(tmp_path, steps=steps, epochs=2)
    all_of(walk(run, progress.Bar()))
    assert "epoch 1  test loss 0.5000  accuracy 0.7500" in capsys.readouterr().out
