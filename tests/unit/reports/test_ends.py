"""Reports at a run's ends: saves, failures, and what rank 0 could no longer report."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from small_runs import config, make_model, samples

from hvdtrain.config import CheckpointConfig
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.engine import report_page as page
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.reports import survivor
from hvdtrain.reports.survivor import Writer
from hvdtrain.trainer import Trainer


def log(out, event):
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def fit(tmp_path, *callbacks, **changes):
    settings = config(out=str(tmp_path / "run"), global_batch=8, epochs=1, **changes)
    return Trainer(settings).fit(make_model("numpy"), samples(48), callbacks=callbacks)


class Fails(Callback):
    """Raises ``error`` at the end of step ``step``."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def step_end(self, run):
        if run.state.cursor.step == self.step:
            raise self.error


def test_every_save_is_told_with_its_seconds_and_bytes(tmp_path):
    fit(tmp_path, checkpoint=CheckpointConfig(every_steps=2, keep=9, at_end=False))
    saved = log(tmp_path / "run", "saved")
    assert [row["at_step"] for row in saved] == [2, 4, 6]
    for row in saved:
        folder = tmp_path / "run" / "checkpoints" / f"step-{row['at_step']:08d}"
        assert row["bytes"] == sum(path.stat().st_size for path in folder.iterdir()) and row["error"] == ""
        assert 0 < row["blocked_s"] <= row["took_s"] < 30


@pytest.mark.slow
def test_a_save_that_fails_is_told_with_its_reason(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvdtrain.checkpoint.store.write_snapshot", full)
    with pytest.raises(UserError, match="No space left"):
        fit(tmp_path, checkpoint=CheckpointConfig(every_steps=4))
    saved = log(tmp_path / "run", "saved")
    assert {row["bytes"] for row in saved} == {0} and all("No space left" in row["error"] for row in saved)
    assert log(tmp_path / "run", "failed")[0]["error"].startswith("UserError: the last checkpoint could not be written")


def test_a_run_that_fails_says_why_in_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, Fails(3, RuntimeError("boom")), checkpoint=CheckpointConfig(every_steps=2))
    (failed,) = log(tmp_path / "run", "failed")
    assert (failed["step"], failed["error"], failed["rank"]) == (3, "RuntimeError: boom", 0)
    assert [row["at_step"] for row in log(tmp_path / "run", "saved")] == [2]  # also one that nobody asked about


def test_the_rank_that_an_error_accuses_is_named():
    assert survivor.failure(UserError("rank 3 on host b: no file"), 0)["rank"] == 3
    assert survivor.failure(MemoryError(), 2) == {"error": "MemoryError", "rank": 2}


def test_a_log_that_breaks_off_gets_its_end_once(tmp_path):
    lines = ['{"event": "start", "time": 1.0, "step": 0}', '{"event": "step", "time": 2.0, "step": 7}', '{"event": "st']
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    values = {"error": survivor.SILENT, "rank": 0}
    assert survivor.append(tmp_path, values) and not survivor.append(tmp_path, values)
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert (row["event"], row["step"], row["error"]) == ("failed", 7, survivor.SILENT)


def test_a_log_that_has_its_end_is_left_alone(tmp_path):
    text = '{"event": "start", "time": 1.0, "step": 0}\n{"event": "end", "time": 2.0, "step": 7}\n'
    (tmp_path / "log.jsonl").write_text(text)
    assert not survivor.append(tmp_path, {"error": "x", "rank": 0})
    assert (tmp_path / "log.jsonl").read_text() == text


# --- the page ------------------------------------------------------------------------------------------------------

KILLED = """
import sys, time
sys.path.insert(0, {fixtures!r})
from small_runs import config, make_model, samples
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine import report_page as page
from hvdtrain.trainer import Trainer

class Slow(Callback):
    def step_end(self, run):
        print("step", flush=True)
        time.sleep(0.05)

page.AFTER_S = 0.0
Trainer(config(out={out!r}, global_batch=8, log_every=1)).fit(make_model("numpy"), samples(48), callbacks=[Slow()])
"""


def test_a_page_is_written_at_a_good_end_and_at_a_bad_one(tmp_path):
    fit(tmp_path / "good")
    assert "</html>" in (tmp_path / "good" / "run" / "report.html").read_text()
    with pytest.raises(RuntimeError, match="boom of step 3"):
        fit(tmp_path / "bad", Fails(3, RuntimeError("boom of step 3")))
    assert "boom of step 3" in (tmp_path / "bad" / "run" / "report.html").read_text()


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch, capsys):
    def broken(out):
        raise ValueError("no ink")

    monkeypatch.setattr("hvdtrain.reports.html.write", broken)
    result = fit(tmp_path)
    assert result.steps == 6 and (tmp_path / "run" / "completed.json").exists()
    assert "note: report.html could not be written (ValueError: no ink)" in capsys.readouterr().out


def test_a_process_beside_that_does_not_go_costs_a_run_nothing_but_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "QUIT_S", 0.1)
    beside = page.Survivor(None)
    beside._child = child = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, bufsize=0)
    try:
        beside.tell(survivor.QUIT)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_run_that_is_refused_leaves_no_page(tmp_path):
    class Refuses(Callback):
        def fit_start(self, run):
            raise UserError("not today")

    with pytest.raises(UserError):
        fit(tmp_path, Refuses())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_killed_run_gets_its_page_from_the_process_that_outlives_it(tmp_path):
    out = tmp_path / "run"
    script = KILLED.format(out=str(out), fixtures=str(ROOT.parent / "tests" / "fixtures"))
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    for _ in range(20):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    until = time.monotonic() + 40
    while not (out / "report.html").exists() and time.monotonic() < until:
        time.sleep(0.1)
    (failed,) = log(out, "failed")
    assert failed["error"] == survivor.SILENT and failed["step"] >= 15
    assert survivor.SILENT in (out / "report.html").read_text().replace("&#39;", "'")


def test_the_process_beside_goes_when_it_is_told_to(tmp_path):
    child = page.start_survivor(tmp_path)
    child.stdin.write(survivor.QUIT)
    child.stdin.close()
    assert child.wait(20) == 0 and not (tmp_path / "report.html").exists()


def test_a_supervisor_has_pages_written_without_waiting(tmp_path):
    writer = Writer()
    writer.start(tmp_path)  # no run of ours: nothing is started
    writer.end(0.0)
    fit(tmp_path)
    out = tmp_path / "run"
    (out / "report.html").unlink()
    writer.start(out)
    writer.end(30.0)
    assert "</html>" in (out / "report.html").read_text()
