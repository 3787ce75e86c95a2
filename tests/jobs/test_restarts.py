"""``launch --restarts`` for real: a killed rank, the end of an allocation, a supervisor that is killed itself.

One job per framework, since start-ups are most of their time; the others train a numpy model. What the supervisor
decides is tested without jobs.
"""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from runner import _env, end, processes, run

from hvdtrain.launch import history

AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []

ONCE = """
import os, signal, time
from hvdtrain.callbacks.base import Callback

class Once(Callback):
    # after step 7, but not before the checkpoint of step 5 is written, which a thread does beside the steps
    where = "all"

    def step_end(self, run):
        if run.control.rank == 1 and run.state.cursor.step == 7 and os.environ["HVDLAUNCH_ATTEMPT"] == "1":
            ends_at = time.monotonic() + 20
            while not (run.out / "checkpoints" / "step-00000005").exists() and time.monotonic() < ends_at:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
"""

SLOW = """
import sys, time
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.callbacks.base import Callback
from hvdtrain.config import Checkpoint

class Slowly(Callback):
    where = "all"

    def step_end(self, run):
        time.sleep(0.1)

x, y = np.random.default_rng(0).standard_normal((640, 12)), np.arange(640) % 5
result = Trainer(Config(global_batch=8, epochs=9, out=sys.argv[1], resume="auto", collectives="mpi", progress="off",
                        checkpoint=Checkpoint(every_steps=2))).fit(Model((12, 16, 5)), (x, y), callbacks=[Slowly()])
sys.exit(75 if result.requeue else 0)
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_killed_rank_costs_a_restart(framework, script, tmp_path):
    pytest.importorskip(framework)
    model = {"torch": "torch_models.mlp:build", "tensorflow": "tf_models.mlp:build"}[framework]
    out = tmp_path / "run"
    job = run([sys.executable, "-m", "hvdtrain", "launch", "--restarts", "2", "-H", "localhost:2", *AS_ROOT, "--",
               "train", "--model", model, "--data", "synthetic", "--data.args.samples", "640", "--epochs", "1",
               "--collectives", "mpi", "--checkpoint.every_steps", "5", "--callbacks", f"[{script(ONCE)}:Once]",
               "--progress", "off", "--out", str(out)], 150.0)
    assert job.returncode == 0, job.text
    assert (out / "completed.json").exists() and not job.orphans
    first, second = history.read(out)
    assert (first["cause"], first["step_end"], first["checkpoint"], first["steps_lost"]) == ("lost", 7, 5, 2), first
    assert (second["cause"], second["step_start"], second["step_end"]) == ("done", 5, 10), second
    assert "resumed at step 5" in job.text and "recovered in " in job.text
    assert {"start", "import", "load", "first step"} <= set(second["seconds"])


@pytest.fixture
def supervised(script, tmp_path):
    """Start a slow run under a supervisor; yields (its process, its folder, its job's id) after its first steps."""
    job_id, out = uuid.uuid4().hex, tmp_path / "run"
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen([sys.executable, "-m", "hvdtrain", "launch", "--restarts", "2", "-H", "localhost:2",
                                  *AS_ROOT, "--out", str(out), "--", sys.executable, script(SLOW), str(out)],
                                 env=_env(job_id, {}), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        assert until(lambda: any(out.glob("checkpoints/step-*")), 60.0), (tmp_path / "said").read_text()
        yield child, out, job_id
    finally:
        child.kill()
        child.wait()
        end(job_id)


def until(true, timeout_s):
    """Wait for it; whether it came."""
    ends_at = time.monotonic() + timeout_s
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.05)
    return bool(true())


def test_sigterm_saves_and_ends_with_75(supervised):
    child, out, job_id = supervised
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 75
    row, = history.read(out)
    assert row["cause"] == "requeue" and row["steps_lost"] == 0, "saved at its last step"
    assert not (out / "completed.json").exists() and until(lambda: not processes(job_id), 5.0)


def test_a_killed_supervisor_leaves_no_rank(supervised):
    child, _, job_id = supervised
    assert len(processes(job_id)) >= 4, "supervisor, launcher and two ranks at least"
    child.kill()
    child.wait()
    assert until(lambda: not processes(job_id), 20.0), processes(job_id)
