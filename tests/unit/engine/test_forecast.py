"""The forecast of a run: unknown at first, then from what earlier runs took; its errors; nothing in it ends a run."""

import json
import math
from dataclasses import replace

import pytest
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.core import RunFiles
from hvdtrain.engine import step_history, summary
from hvdtrain.engine.calibration_file import corrected
from hvdtrain.engine.callbacks import forecast as forecasting
from hvdtrain.engine.step_history import LinkRow, StepRow
from hvdtrain.planning.hardware.rates import Calibration
from hvdtrain.planning.linear import LinearTime


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hvdtrain" / "steps"


def trained(tmp_path, name, size=2, **changes):
    """Train 30 steps; return (forecast.json, the run of rank 0)."""
    settings = config(**{"out": str(tmp_path / name), "max_steps": 30, "global_batch": 32, **changes})
    runs = lockstep(size, settings, lambda rank: make_model("numpy"), (samples(80), samples(16)), fitted)
    return json.loads((tmp_path / name / RunFiles.FORECAST).read_text()), runs[0]


def test_a_second_run_is_forecast_and_compared(tmp_path, cache):
    first, run = trained(tmp_path, "first")
    assert first["known"] is False and "no earlier run" in first["why"] and "step_s" not in first
    done = summary.record(run)["forecast"]
    assert done["measured_s"]["step"] > 0 and "error_step" not in done
    assert len(list(cache.glob("*.json"))) == 3 and len(list(cache.glob("*-links.json"))) == 1
    second, run = trained(tmp_path, "second", checkpoint=replace(config().checkpoint, every_steps=10))
    assert second["known"] and second["steps"] == 30 and second["cost"] is None
    assert second["step_s"]["low"] is None, "no earlier forecast whose error is known"
    assert sum(second["parts_s"].values()) == pytest.approx(second["step_s"]["mid"])
    done = summary.record(run)["forecast"]
    errors = {name: value for name, value in done.items() if name.startswith("error_")}
    parts = [value for name, value in errors.items() if name != "error_step"]
    assert len(errors) == 6 and all(map(math.isfinite, errors.values()))
    assert sum(parts) == pytest.approx(errors["error_step"], abs=1e-6), "fractions of the measured step"
    assert done["measured_s"]["saves"] > 0
    path = tmp_path / "prices.yaml"
    path.write_text("hosts: [{name: '*', devices: CPU, price_per_hour: 7}]")
    third, _ = trained(tmp_path, "third", inventory=str(path), max_steps=40)
    assert third["step_s"]["low"] < third["step_s"]["mid"] < third["step_s"]["high"] and third["interval_of"] == 1
    assert third["cost"] == pytest.approx(7 * third["hours"]) and third["currency"] == "USD"
    other, _ = trained(tmp_path, "other", global_batch=4)
    assert not other["known"] and "micro-batches of about 2 samples" in other["why"]


def test_one_rank_and_a_resumed_run(tmp_path):
    trained(tmp_path, "one", 1)
    again, run = trained(tmp_path, "one", 1, max_steps=50, resume="auto",
                         checkpoint=replace(config().checkpoint, at_end=True))
    assert again["known"] and again["sources"]["exchange"] == "nothing is exchanged"
    assert again["parts_s"]["exchange"] == pytest.approx(0, abs=1e-12)
    assert run.state.findings.forecast["error_exchange"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("damage", ["not json", '{"version": 0, "rows": []}',
                                    '{"version": 1, "rows": [{"samples": 1}]}'])
def test_a_damaged_cache_is_no_forecast(tmp_path, cache, damage):
    trained(tmp_path, "first")
    for path in cache.iterdir():
        path.write_text(damage)
    found, run = trained(tmp_path, "second")
    assert found["known"] is False and run.state.cursor.step == 30


def test_what_fails_in_it_ends_no_run(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(forecasting, "_scenes", broken)
    monkeypatch.setattr(step_history, "key_of", broken)
    found, run = trained(tmp_path, "run")
    assert found["known"] is False and run.state.cursor.step == 30 and summary.record(run)["forecast"]["why"]


def test_it_can_be_turned_off(tmp_path, cache):
    with pytest.raises(FileNotFoundError):
        trained(tmp_path, "run", forecast=False)
    assert not cache.exists()


def test_rows_that_are_near_enough():
    rows = [StepRow(32, 2, 0.032, 0.001, 0.0), StepRow(64, 2, 0.048, 0.001, 0.0)]
    line = step_history.line_of(rows, 24)
    assert line.seconds(24, 1) == pytest.approx(0.02)
    assert step_history.line_of(rows, 64) and not step_history.line_of(rows, 65)
    assert step_history.line_of(rows[:1], 20) and not step_history.line_of(rows[:1], 21)
    links = [LinkRow("mpi", "none", 1e6, (2,), 1e-9, 0.0), LinkRow("mpi", "none", 3e6, (4,), 2e-9, 0.0),
             LinkRow("mpi", "fp16", 1e6, (4,), 3e-9, 0.0)]
    assert step_history.link_of(links, "mpi", "none", 1e6, (4,)) is links[1], "as many ranks before as many bytes"
    assert step_history.link_of(links, "mpi", "none", 1e6, (3,)) is links[0]
    assert step_history.link_of(links, "mpi", "none", 1e6, (2, 2)) is None, "one host says nothing of links between"
    assert step_history.link_of(links, "mpi", "none", 1e8, (2,)) is None


def test_the_newest_rows_stay(cache):
    for n in range(20):
        step_history.add("name", StepRow(10 + n, 1, 0.1, 0.0, 0.0))
    step_history.add("name", StepRow(29, 1, 0.2, 0.0, 0.0))
    found = step_history.steps("name")
    assert [row.samples for row in found] == list(range(22, 30)) and found[-1].compute_s == 0.2


def test_a_plan_is_corrected_by_what_runs_took():
    found = Calibration("CPU", "fp32", 1, 1, LinearTime(0.01, 0.001), (16, 32), 0.002, 0.05)
    rows = [StepRow(32, 1, 0.05, 0.004, 0.0, error=0.3), StepRow(60, 2, 0.08, 0.003, 0.0),
            StepRow(200, 1, 9.0, 9.0, 0.0, error=0.9)]
    new = corrected(found, rows)
    assert new.line.seconds(30, 1) == pytest.approx(0.04) and new.update_s == 0.003 and new.error == 0.3
    assert corrected(found, rows[2:]) is found, "of micro-batches that are too large nothing is known"
