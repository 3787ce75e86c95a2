"""A run that is killed and resumed ends as one that was not: whole jobs, killed for real."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from runner import mpirun, run
from workloads import DIE

WORK = Path(__file__).with_name("workloads.py")
STEPS, EVERY = 40, 6
MODELS = {"torch": "torch_model", "tensorflow": "keras_model"}
DIES = {("torch", 1): (0, 23), ("torch", 2): (1, 34), ("tensorflow", 1): (0, 31), ("tensorflow", 2): (0, 20)}
"""(rank, batch) at which each killed run dies, drawn once; fetching is at most 3 batches ahead of training."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def train(framework, ranks, out, *more, die=None):
    """``python -m hvdtrain train`` on ``ranks`` ranks: Adam, shuffle, dropout, warm-up, a checkpoint every 6 steps."""
    argv = ["-m", "hvdtrain", "train", "--model", f"{WORK}:{MODELS[framework]}", "--data.name", f"{WORK}:data",
            "--global_batch", "13", "--max_steps", str(STEPS), "--epochs", "100", "--eval_every", "3", "--lr", "0.01",
            "--optimizer.name", "Adam", "--schedule.warmup_steps", "25", "--checkpoint.every_steps", str(EVERY),
            "--progress", "off", "--seed", "3", "--out", str(out), *more]
    env = {DIE: f"{die[0]}:{die[1]}:{out / 'checkpoints'}"} if die else {}
    return mpirun(ranks, argv, 100, env) if ranks > 1 else run([sys.executable, *argv], 100, env)


def checkpoints(out):
    """Return steps of the checkpoints, oldest first."""
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").glob("step-*"))


def final(out):
    """Return the bytes of the final model; there must be a completion record."""
    assert json.loads((out / "completed.json").read_text())["steps"] == STEPS
    return (out / "model" / "model.safetensors").read_bytes()


def completed(job):
    assert job.returncode == 0, job.text
    assert not re.search("oneDNN|cpu_feature_guard|absl::", job.text), "TensorFlow's start-up lines"
    assert not job.orphans
    return job.text


def killed(job, out):
    """Return the job was ended by the kill, after a checkpoint and before its end."""
    assert job.returncode not in (0, None), job.text
    assert not job.orphans and not (out / "completed.json").exists()
    steps = checkpoints(out)
    assert len(steps) >= 2 and steps[-1] < STEPS and all(step % EVERY == 0 for step in steps)
    return steps[-1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the final model of a run that nobody disturbed, by framework and ranks, run once."""
    found = {}

    def get(framework, ranks):
        if (framework, ranks) not in found:
            out = tmp_path_factory.mktemp("uninterrupted") / "run"
            completed(train(framework, ranks, out))
            found[framework, ranks] = final(out)
        return found[framework, ranks]

    return get


@pytest.mark.parametrize("framework, ranks", DIES, ids=lambda value: str(value))
def test_killed_and_resumed_is_bit_equal(framework, ranks, uninterrupted, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    want, out = uninterrupted(framework, ranks), tmp_path / "run"
    at = killed(train(framework, ranks, out, die=DIES[framework, ranks]), out)
    if (framework, ranks) == ("torch", 1):
        shutil.copytree(out, tmp_path / "damaged")
    text = completed(train(framework, ranks, out, "--resume", "auto"))
    assert f"resumed at step {at}," in text
    assert final(out) == want
    if (framework, ranks) == ("torch", 1):
        damaged_newest(tmp_path / "damaged", want)


def damaged_newest(out, want):
    """Cut the newest checkpoint short: a message reports that, and the one before leads to the same end."""
    before, newest = checkpoints(out)[-2:]
    largest = max((out / "checkpoints" / f"step-{newest:08d}").iterdir(), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    text = completed(train("torch", 1, out, "--resume", "auto"))
    assert f"checkpoint step-{newest:08d} is not used:" in text and largest.name in text
    assert f"resumed at step {before}," in text
    assert final(out) == want


def test_a_foreign_directory_is_refused(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    foreign = tmp_path / "somebody's"
    foreign.mkdir()
    (foreign / "weights.bin").write_bytes(bytes(100))
    job = train("torch", 2, tmp_path / "run", "--resume", str(foreign))
    assert job.returncode == 2, job
    assert "Traceback" not in job.text and not job.orphans
    assert job.stderr.count("hvdtrain:") == 1 and str(foreign) in job.stderr


def test_a_run_is_not_written_over_another(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "log.jsonl").write_text("mine\n")
    job = train("torch", 1, tmp_path)
    assert job.returncode == 2 and "holds a run already" in job.stderr and "--resume auto" in job.stderr
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["checkpoints", "log.jsonl"]
    assert (tmp_path / "log.jsonl").read_text() == "mine\n"
