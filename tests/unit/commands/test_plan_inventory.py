"""The command ``plan --inventory``: its options, files and output; models that are built, and described ones."""

import json
import subprocess
import sys

import pytest

from hvdtrain.commands.plan import cli, inventory
from hvdtrain.core.errors import UserError

KEYS = {"fits", "step_s", "samples_per_s", "efficiency", "hours", "cost", "energy_kwh", "assumed", "alternatives"}
INVENTORY = """\
hosts:
  - {name: fast, devices: "2 x A100-40GB", price_per_hour: 6}
  - {name: old, devices: "2 x RTX 3090", price_per_hour: 1.5}
links: {between_hosts_gbit: 25}
"""
MODEL = "model: {parameters: 25e6, flops_per_sample: 25e9, activation_bytes_per_sample: 5e7, optimizer: momentum}\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Make a folder with an inventory and assumptions, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "assume.yaml").write_text("efficiency: 0.4\n" + MODEL)
    return tmp_path


def planned(capsys, *options, inventory="inventory.yaml", assume="assume.yaml"):
    given = ["--inventory", inventory, *(["--assume", assume] if assume else []), "--json", "-", *options]
    assert cli.main(given) == 0
    return json.loads(capsys.readouterr().out)


DESCRIBED = ("--model", "resnet50", "--samples", "1_280_000", "--global_batch", "256", "--precision", "bf16")


def test_a_described_model_on_hardware_that_is_not_here(files, capsys):
    found = planned(capsys, *DESCRIBED)
    assert found.keys() >= KEYS and found["fits"] is True and found["assumed"] is True
    assert found["step_s"]["low"] is found["step_s"]["high"] is None and found["step_s"]["mid"] > 0
    assert found["hours"] == pytest.approx(5000 * found["step_s"]["mid"] / 3600)
    assert found["cost"] == pytest.approx(7.5 * found["hours"]) and 0 < found["efficiency"] < 1
    assert found["line"].startswith("python -m hvdtrain launch -H fast:2,old:2 -- train --model resnet50")
    assert found["line"].endswith("--max_steps 5000") and found["choice"] == {"name": "as given", "line": found["line"]}
    for one in found["alternatives"]:
        assert one.keys() >= KEYS - {"alternatives"} | {"name", "reason", "line"} and one["reason"]
    assert [one["name"] for one in found["alternatives"]][0] == "without host old"
    assert cli.main(["--inventory=inventory.yaml", "--assume=assume.yaml", *DESCRIBED, "--budget", "0.3"]) == 0
    text = capsys.readouterr().out
    assert "ASSUMED plan: resnet50, 4 ranks on 2 hosts" in text and "note: ASSUMED: RTX-3090 reaches 40 %" in text
    assert "within 0.3 USD: without host old" in text


def test_a_plan_that_does_not_fit_names_what_does(files, capsys):
    devices = 'devices: {A100-40GB: {efficiency: 0.4}, "3090": {efficiency: 0.2}}\n'
    (files / "assume.yaml").write_text(devices + MODEL.replace("5e7", "2e9"))
    found = planned(capsys, *DESCRIBED)
    assert found["fits"] is False and found["choice"]["name"] == "accumulate 8"
    assert "RTX-3090 reaches 20 % of 71 TFLOPS (bf16)" in found["assumptions"]  # by another of its names
    (files / "assume.yaml").write_text("efficiency: 0.4\n" + MODEL.replace("25e6", "1e15"))
    assert planned(capsys, *DESCRIBED)["choice"] is None
    assert cli.main(["--inventory=inventory.yaml", "--assume=assume.yaml", *DESCRIBED]) == 0
    assert "nothing above is within the memory of each device" in capsys.readouterr().out


def test_failures_lengthen_the_hours(files, capsys):
    plain, failing = planned(capsys, *DESCRIBED), planned(capsys, *DESCRIBED, "--mtbf", "0.2", "--restart", "30")
    assert failing["hours"] > plain["hours"] and failing["failures"] > 0 and plain["failures"] is None
    (files / "inventory.yaml").write_text(INVENTORY.replace("price_per_hour", "mtbf_hours: 0.2, price_per_hour"))
    assert planned(capsys, *DESCRIBED, "--mtbf", "9", "--restart=30")["hours"] == pytest.approx(failing["hours"])


@pytest.mark.parametrize("shares", ["fast=3,old=1", "A100-40GB=3,RTX 3090=1", "A100=3,*=1", "[3,3,1,1]"])
def test_shares_are_those_of_hosts_and_devices_of_the_plan(files, capsys, shares):
    assert planned(capsys, *DESCRIBED, "--shares", shares)["samples_by_rank"] == [[2, 96], [2, 32]]
    planned(capsys, *DESCRIBED, "--shares", "fast=3,old=1,gone=1")  # of that a note tells, but for standard output


def test_the_command_trains_as_many_samples_as_were_planned(files, capsys):
    found = planned(capsys, *DESCRIBED, "--max_steps", "5")
    assert found["line"].endswith("--max_steps 5 --max_steps 5000")  # the last one counts


@pytest.mark.parametrize("options, words", [
    (["--samples", "0.5"], "--samples is '0.5'"),
    (["--samples", "100", "--shares", "fast=3,odl=1"], "no entry for rank 2 on old"),
    (["--samples", "100", "--precision", "A100-40GB=bf16,RTX-3090=fp32"], "precision by rank, host or device"),
    (["--samples", "100", "--data_parallel.name", "zero", "--data_parallel.shards", "[3,3,1,1]"],
     "data_parallel.shards"),
    (["--samples", "100", "--balance", "static", "--rebalance.max_micro_batch", "fast=8,old=4"], "max_micro_batch"),
    (["--samples", "100", "--exchange.hierarchical", "true"], "exchange.hierarchical"),
    (["--samples", "100", "--pipeline.stages", "2", "--pipeline.order", "gpipe"], "pipeline.order: gpipe"),
    (["--samples", "many"], "--samples is 'many'"),
    (["--samples"], "--samples has no value"),
    (["--budget", "-1"], "--budget is '-1'"),
    (["--mtbf", "never"], "--mtbf is 'never'"),
    (["--samples", "100", "--sync_batchnorm", "true"], "sync_batchnorm with a described model"),
    (["--samples", "100", "--global_batch", "2"], "global_batch 2 for 4 ranks"),
    ([], "number of samples to train is not known"),
    (["--samples", "100", "--precision", "bf16", "--data_parallel.name", "zero", "--data_parallel.stage", "auto"],
     "data_parallel.stage: auto"),
    (["--samples", "100", "--precision", "bf16", "--json", "nowhere/plan.json"], "cannot be written"),
    (["--samples", "1e16"], "above 0 and below 1e.15"),
])
def test_options_that_are_refused(files, options, words):
    with pytest.raises(UserError, match=words):
        cli.main(["--inventory", "inventory.yaml", "--assume", "assume.yaml", "--model", "m", *options])


@pytest.mark.parametrize("name, text, words", [
    ("assume.yaml", "efficiency: 1.5\n" + MODEL, "efficiency is 1.5"),
    ("assume.yaml", "efficiency: 1.0e-300\n" + MODEL, "efficiency is 1e-300"),
    ("assume.yaml", "efficiency: 0.4\n" + MODEL.replace("momentum", "[adam]"), "optimizer of the assumed model is "),
    ("assume.yaml", "eficiency: 0.5\n" + MODEL, "key 'eficiency'.*did you mean 'efficiency'"),
    ("assume.yaml", MODEL, "no efficiency of A100-40GB"),
    ("assume.yaml", "efficiency: 0.4\nmodel: {parameters: 1e6}\n", "flops_per_sample of the assumed model is None"),
    ("assume.yaml", "efficiency: 0.4\nmodel: {parameters: 1e6, size: 3}\n", "key 'size'"),
    ("assume.yaml", "efficiency: 0.4\nlatency_us: fast\n", "latency_us is 'fast'"),
    ("assume.yaml", "efficiency: 0.4\ndevices: {A100-40GB: {peak: {bf32: 1e12}}}\n", "key 'bf32'"),
    ("assume.yaml", "efficiency: 0.4\n" + MODEL.replace("25e6", "1e23"), "parameters of the assumed model is 1e.23"),
    ("assume.yaml", "efficiency: 0.4\n" + MODEL.replace("{", "{layers: 1e6, "), "layers of the assumed model"),
    ("assume.yaml", "devices: {RTX 3091: {efficiency: 0.4}}\n" + MODEL, "device 'RTX 3091'"),
    ("inventory.yaml", INVENTORY.replace("RTX 3090", "RTX 3091"), "device 'RTX 3091'"),
    ("inventory.yaml", INVENTORY.replace("fast,", "old, count: 2,").replace("name: old, d", "name: old1, d"),
     "2 entries of the inventory mean the host 'old1'"),
    ("inventory.yaml", INVENTORY.replace("fast", '"a:8"'), "name is 'a:8'"),
    ("inventory.yaml", INVENTORY.replace("links: {between_hosts_gbit: 25}", ""), "bandwidth between hosts"),
    ("inventory.yaml", INVENTORY.replace("RTX 3090", "T4"), "no peak of T4 in bf16"),
])
def test_files_that_are_refused(files, name, text, words):
    (files / name).write_text(text)
    with pytest.raises(UserError, match=words):
        cli.main(["--inventory", "inventory.yaml", "--assume", "assume.yaml", *DESCRIBED])


def test_a_budget_needs_a_price_of_each_host(files):
    (files / "inventory.yaml").write_text(INVENTORY.replace(", price_per_hour: 1.5", ""))
    for name in ("inventory.yaml", inventory.HERE):
        with pytest.raises(UserError, match="price"):
            cli.main(["--inventory", name, "--assume", "assume.yaml", *DESCRIBED, "--budget", "5"])


def test_a_built_model_on_a_device_here_and_one_elsewhere(files):
    """Calibrate this processor, whose rank is measured, beside a device that is assumed; in TensorFlow."""
    (files / "inventory.yaml").write_text('''
hosts: [{name: localhost, devices: "1 x CPU", price_per_hour: 1}, {name: far, devices: "1 x T4", price_per_hour: 3}]
links: {between_hosts_gbit: 10}
''')
    (files / "guess.yaml").write_text("efficiency: 0.3\n")
    words = [sys.executable, "-m", "hvdtrain", "plan", "--inventory", "inventory.yaml", "--assume", "guess.yaml",
             "--model", "tf_models.cnn:build", "--samples", "64000", "--json", "-", "--rebalance.probe_s", "0.2"]
    job = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(job.stdout)
    assert found.keys() >= KEYS and found["assumed"] is True and found["fits"] is True
    assert found["step_s"]["low"] is None and found["cost"] == pytest.approx(4 * found["hours"])
    assert [text for text in found["assumptions"] if text.startswith("T4 reaches 30 %")]
    assert not [text for text in found["assumptions"] if text.startswith("CPU")]  # which was calibrated
    alone = {one["name"]: one for one in found["alternatives"]}
    here, far = alone["without host far"], alone["without host localhost"]
    assert here["assumed"] is False and here["step_s"]["low"] < here["step_s"]["mid"] < here["step_s"]["high"]
    assert far["assumed"] is True and far["samples_per_s"] > here["samples_per_s"]
