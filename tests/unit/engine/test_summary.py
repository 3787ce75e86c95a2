"""The closing table and record: the figures of a run, whole and JSON-able whatever happened in it."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.checkpoint.run_directory import RunOutput
from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import Config
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine import summary
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import RunSetup, Services


@pytest.fixture
def run():
    """Return a run of 40 steps over 64 samples each, 10 ms a step."""
    words = {"optimizer": "SGD, lr 0.1", "warm-up": "linear over 5 steps"}
    parts = SimpleNamespace(layout=None, describe=lambda: words)
    made = Run(RunSetup(
        config=Config(global_batch=64),
        group=None,
        topology=SimpleNamespace(describe=lambda: "1 host: here (rank 0, 2 cores)"),
        spec=SimpleNamespace(framework="torch", name="torch_models.cnn:build"),
        parts=parts,
        schedule=None,
        feed=None,
    ), Services(SoloControl("here"), SimpleNamespace(name="horovod"), RunOutput(Path("runs/cnn-001"))))
    made.dp = SimpleNamespace(divides_state=False, describe=lambda: "powersgd rank 4")
    for _ in range(40):
        made.timeline.totals.step(0.01, 64)
    for name, seconds in (("data", 0.04), ("compute", 0.2), ("wait", 0.1), ("update", 0.1)):
        made.timeline.totals.add(name, seconds)
    made.state.cursor = Cursor(epoch=2, step=40)
    made.state.loss = made.state.outcome.last_loss = 0.25
    made.state.metrics = {"loss": 0.5, "accuracy": 0.97}
    return made


def test_record(run):
    run.notes.append("a remark")
    run.state.stop = "max_steps 40"
    record = summary.record(run)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {
        k: record[k]
        for k in ("framework", "ranks", "wire", "global_batch", "steps", "epochs", "loss", "stop", "notes")
    } == {
        "framework": "torch",
        "ranks": 1,
        "wire": "horovod",
        "global_batch": 64,
        "steps": 40,
        "epochs": 2,
        "loss": 0.25,
        "stop": "max_steps 40",
        "notes": ["a remark"],
    }
    assert record["phases_ms"] == {"data": 1.0, "compute": 5.0, "wait": 2.5, "update": 2.5}
    assert record["samples_per_s"] == pytest.approx(39 * 64 / (39 * 0.01 + 0.04))


def test_the_table_says_what_the_issue_asks_for(run, capsys):
    run.notes.append("dropout draws differ with the number of ranks")
    summary.show(run)
    out = capsys.readouterr().out
    text = " ".join(out.replace("|", " ").split())
    for words in (
        "framework torch, torch_models.cnn:build",
        "ranks 1 on 1 host: here",
        "transport horovod",
        "global batch 64 samples",
        "optimizer SGD, lr 0.1",
        "warm-up linear over 5 steps",
        "steps 40 in 2 epochs",
        "loss 0.25",
        "test accuracy 0.9700",
        "data 1.0",
        "compute 5.0",
        "wait 2.5",
        "update 2.5",
        "runs/cnn-001",
        "note dropout",
    ):
        assert words in text, words
    assert "samples/s" in text and out.isascii()


def test_a_run_that_went_wrong_or_nowhere_has_a_table_too(run, capsys):
    run.state.outcome.last_loss, run.state.metrics, run.state.stop = (
        math.nan,
        {"loss": math.inf},
        "early stop: [bold]loss[/x] not better",
    )
    run.timeline.totals.steps, run.timeline.totals.samples = 0, 0
    record = summary.record(run)
    assert record["loss"] is None and record["metrics"] == {"loss": None} and record["samples_per_s"] is None
    json.dumps(record, allow_nan=False)
    summary.show(run)
    text = " ".join(capsys.readouterr().out.replace("|", " ").split())
    assert "stopped: early stop: [bold]loss[/x] not better" in text and "not known: too few steps" in text


@pytest.mark.parametrize("of, shown", [("rank", "rank 0"), ("copy", "replica 0")])
def test_a_row_of_the_meter_names_ranks_or_replicas(of, shown):
    row = dict.fromkeys(("samples", "compute_s", "wait_s", "data_s", "update_s"), 0.1)
    found = {"percent_of_solo": 90.0, "lost_percent": {}, "ranks": [row], "of": of, "advice": "none"}
    assert summary._efficiency(found)[2][0] == shown
