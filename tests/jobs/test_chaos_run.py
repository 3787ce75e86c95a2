"""`chaos` for real: a training that is killed in a save and between saves loses nothing, in both frameworks."""

import importlib.util
import json
import sys

import pytest
from runner import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CASES = {"torch": ("torch_models.mlp:build", ("--seed", "1")), "tensorflow": ("tf_models.mlp:build", ("--hold-ranks",))}
"""The model, and options: in PyTorch ranks and shares change at each restart, in TensorFlow the bits must be equal."""


@pytest.mark.parametrize("framework", CASES)
def test_two_kills_lose_nothing(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    model, options = CASES[framework]
    out = tmp_path / "chaos"
    job = run([sys.executable, "-m", "benchmarks", "chaos", "--kills", "2", *options, "--steps", "90",
               "--out", str(out), "--", "train", "--model", model, "--eval_every", "0"], 200)
    assert job.returncode == 0, job.text
    assert not job.orphans
    assert "2 of 2 faults hit what was alive" in job.stdout and "0 lost and 0 doubled" in job.stdout
    assert "LOST" not in job.stdout and "chaos: nothing was lost" in job.stdout
    events = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    hits = [one for one in events if one["event"] == "fault" and one["hit"]]
    assert len(hits) == 2 and all(one["fault"]["kind"] == "kill" for one in hits)
    assert ("to the bit" in job.stdout) or framework == "torch"
