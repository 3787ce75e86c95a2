"""What is told of a run at its ends: saves, failures, and what rank 0 could not tell any more."""

import json

import pytest
from small_runs import config, make_model, samples

from hvdtrain.callbacks.base import Callback
from hvdtrain.config import Checkpoint
from hvdtrain.ends import words
from hvdtrain.errors import UserError
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
    fit(tmp_path, checkpoint=Checkpoint(every_steps=2, keep=9, at_end=False))
    saved = log(tmp_path / "run", "saved")
    assert [row["at_step"] for row in saved] == [2, 4, 6]
    for row in saved:
        folder = tmp_path / "run" / "checkpoints" / f"step-{row['at_step']:08d}"
        assert row["bytes"] == sum(path.stat().st_size for path in folder.iterdir()) and row["error"] == ""
        assert 0 < row["blocked_s"] <= row["took_s"] < 30


def test_a_save_that_fails_is_told_with_its_reason(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvdtrain.checkpoint.store.write_snapshot", full)
    with pytest.raises(UserError, match="No space left"):
        fit(tmp_path, checkpoint=Checkpoint(every_steps=4))
    saved = log(tmp_path / "run", "saved")
    assert {row["bytes"] for row in saved} == {0} and all("No space left" in row["error"] for row in saved)
    assert log(tmp_path / "run", "failed")[0]["error"].startswith("UserError: the last checkpoint could not be written")


def test_a_run_that_fails_says_why_in_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, Fails(3, RuntimeError("boom")), checkpoint=Checkpoint(every_steps=2))
    (failed,) = log(tmp_path / "run", "failed")
    assert (failed["step"], failed["error"], failed["rank"]) == (3, "RuntimeError: boom", 0)
    assert [row["at_step"] for row in log(tmp_path / "run", "saved")] == [2]  # also one that nobody asked about


def test_the_rank_that_an_error_accuses_is_named():
    assert words.failure(UserError("rank 3 on host b: no file"), 0)["rank"] == 3
    assert words.failure(MemoryError(), 2) == {"error": "MemoryError", "rank": 2}


def test_a_log_that_breaks_off_gets_its_end_once(tmp_path):
    lines = ['{"event": "start", "time": 1.0, "step": 0}', '{"event": "step", "time": 2.0, "step": 7}', '{"event": "st']
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    values = {"error": words.SILENT, "rank": 0}
    assert words.append(tmp_path, values) and not words.append(tmp_path, values)
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert (row["event"], row["step"], row["error"]) == ("failed", 7, words.SILENT)


def test_a_log_that_has_its_end_is_left_alone(tmp_path):
    text = '{"event": "start", "time": 1.0, "step": 0}\n{"event": "end", "time": 2.0, "step": 7}\n'
    (tmp_path / "log.jsonl").write_text(text)
    assert not words.append(tmp_path, {"error": "x", "rank": 0})
    assert (tmp_path / "log.jsonl").read_text() == text
