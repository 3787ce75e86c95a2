"""`chaos` for real: a training that is killed in a save and between saves loses nothing, in both frameworks."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from runner import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORK = Path(__file__).with_name("workloads.py")
CASES = {
    "torch": (("--seed", "1"), ("--model", "torch_models.mlp:build", "--eval_every", "0")),
    "tensorflow": (("--hold-ranks",), (
        "--model", f"{WORK}:keras_model", "--data.name", f"{WORK}:data", "--data.args.n", "90", "--global_batch", "13",
        "--eval_every", "3", "--lr", "0.01", "--optimizer.name", "Adam", "--schedule.warmup_steps", "25")),
}
"""Options of chaos and of training. In PyTorch ranks and shares change at each restart; in TensorFlow the bits must be
equal with Adam, shuffle, dropout and warm-up, as test_resume.py has it for PyTorch."""


@pytest.mark.parametrize("framework", CASES)
def test_two_kills_lose_nothing(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    options, training = CASES[framework]
    out = tmp_path / "chaos"
    job = run([sys.executable, "-m", "benchmarks", "chaos", "--kills", "2", *options, "--steps", "90",
               "--out", str(out), "--", "train", *training], 200)
    assert job.returncode == 0, job.text
    assert not job.orphans
    assert "2 of 2 faults hit what was alive" in job.stdout and "0 lost and 0 doubled" in job.stdout
    assert "LOST" not in job.stdout and "chaos: nothing was lost" in job.stdout
    events = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    hits = [one for one in events if one["event"] == "fault" and one["hit"]]
    assert len(hits) == 2 and all(one["fault"]["kind"] == "kill" for one in hits)
    assert ("to the bit" in job.stdout) or framework == "torch"
