"""``plan --inventory`` on two ranks: calibrate, and plan from what was kept."""

import json
import sys

import pytest
from runner import mpirun, run


@pytest.mark.parametrize("model", ["torch_models.cnn:build", "tf_models.cnn:build"])
def test_two_ranks_are_calibrated_and_planned_in_one_process(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ["-m", "hvdtrain", "plan", "--model", model, "--samples", "6400", "--rebalance.probe_s", "0.2"]
    job = mpirun(2, [*options, "--inventory", "here", "--json", str(tmp_path / "here.json")], timeout_s=120)
    assert job.returncode == 0, job.text
    here = json.loads((tmp_path / "here.json").read_text())
    assert not here["assumed"] and here["step_s"]["low"] < here["step_s"]["mid"] < here["step_s"]["high"]
    assert here["fits"] is True and here["cost"] is None
    assert {"compression fp16", "ZeRO stage 2"} <= {one["name"] for one in here["alternatives"]}
    kept, = (tmp_path / "cache" / "hvdtrain" / "calibration").glob("*.json")
    measured, = json.loads(kept.read_text())["calibrations"]
    assert measured["zero"][0] == 2 and measured["zero"][1] > 0 and "fp16" in measured["codecs"]
    inventory = tmp_path / "two.yaml"
    inventory.write_text('hosts: [{name: localhost, devices: "2 x CPU", price_per_hour: 2, power_w: 100}]')
    job = run([sys.executable, *options, "--inventory", str(inventory), "--json", "-"], timeout_s=120)
    assert job.returncode == 0, job.text
    kept = json.loads(job.stdout)
    assert kept["step_s"] == here["step_s"] and kept["hours"] == here["hours"]
    assert kept["cost"] == pytest.approx(2 * kept["hours"]) and kept["energy_kwh"] == pytest.approx(0.1 * kept["hours"])
