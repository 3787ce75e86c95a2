"""A run that is killed and resumed ends as one that was not: whole jobs of PyTorch, killed for real.

Of TensorFlow: test_chaos_run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from runner import mpirun, run
from workloads import DIE

WORK = Path(__file__).with_name("workloads.py")
STEPS, EVERY = 40, 6
DIES = {1: (0, 23), 2: (1, 34)}
"""By number of ranks, (rank, batch) at which the killed run dies, drawn once; fetching is at most 3 batches ahead of
training."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def train(ranks, out, *more, die=None):
    """``python -m hvdtrain train`` on ``ranks`` ranks: Adam, shuffle, dropout, warm-up, a checkpoint every 6 steps."""
    argv = ["-m", "hvdtrain", "train", "--model", f"{WORK}:torch_model", "--data.name", f"{WORK}:data",
            "--global_batch", "13", "--max_steps", str(STEPS), "--epochs", "100", "--eval_every", "3", "--lr", "0.01",
            "--optimizer.name", "Adam", "--schedule.warmup_steps", "25", "--checkpoint.every_steps", str(EVERY),
            "--progress", "off", "--seed", "3", "--data.workers", "0", "--out", str(out), *more]
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
    assert not job.orphans
    return job.text


def killed(job, out):
    """Return the job was ended by the kill, after a checkpoint and before its end."""
    assert job.returncode not in (0, None), job.text
    assert not job.orphans and not (out / "completed.json").exists()
    steps = checkpoints(out)
    assert len(steps) >= 2 and steps[-1] < STEPS and all(step % EVERY == 0 for step in steps)
    return steps[-1]


@pytest.mark.parametrize("ranks", DIES)
def test_killed_and_resumed_is_bit_equal(ranks, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    through, out = tmp_path / "through", tmp_path / "run"
    completed(train(ranks, through))
    at = killed(train(ranks, out, die=DIES[ranks]), out)
    text = completed(train(ranks, out, "--resume", "auto"))
    assert f"resumed at step {at}," in text
    assert final(out) == final(through)
