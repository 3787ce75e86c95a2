"""``launch --restarts`` for real: a killed rank, the end of an allocation, a supervisor that is killed itself.

One job trains PyTorch (TensorFlow under kills: test_chaos_run.py), the others a numpy model. What the supervisor
decides is tested without jobs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest
from runner import _env, _flags, _path, end, processes, run

from hvdtrain.reports import jsonl as history

AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []

ONCE = """
import os, signal, time
from hvdtrain.engine.callbacks.base import Callback

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
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.config import CheckpointConfig

class Slowly(Callback):
    where = "all"

    def step_end(self, run):
        time.sleep(0.1)
        run.out.joinpath("stepped").touch()

x, y = np.random.default_rng(0).standard_normal((640, 12)), np.arange(640) % 5
result = Trainer(Config(global_batch=8, epochs=9, out=sys.argv[1], resume="auto", collectives="mpi", progress="off",
                        checkpoint=CheckpointConfig(every_steps=int(sys.argv[2])))
                 ).fit(Model((12, 16, 5)), (x, y), callbacks=[Slowly()])
sys.exit(75 if result.requeue else 0)
"""


def test_a_killed_rank_costs_a_restart(script, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    out = tmp_path / "run"
    job = run([sys.executable, "-m", "hvdtrain", "launch", "--restarts", "2", "-H", "localhost:2", *AS_ROOT, "--",
               "train", "--model", "torch_models.mlp:build", "--data", "synthetic", "--data.args.samples", "640",
               "--epochs", "1", "--collectives", "mpi", "--checkpoint.every_steps", "5", "--callbacks",
               f"[{script(ONCE)}:Once]", "--progress", "off", "--out", str(out)], 150.0)
    assert job.returncode == 0, job.text
    assert "ranks 0-1" in json.loads((out / "completed.json").read_text())["hosts"] and not job.orphans
    first, second = history.read_attempts(out)
    assert (first["cause"], first["step_end"], first["checkpoint"], first["steps_lost"]) == ("lost", 7, 5, 2), first
    assert (second["cause"], second["step_start"], second["step_end"]) == ("done", 5, 10), second
    assert "resumed at step 5" in job.text and "recovered in " in job.text
    assert {"start", "import", "load", "first step"} <= set(second["seconds"])


@contextlib.contextmanager
def slow_run(tmp_path, words, begun):
    """Start a slow run; yields (its process, its folder, its job's id) once it has written a file like ``begun``."""
    job_id, out = uuid.uuid4().hex, tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen(words, env=_env(job_id, {}), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    signal.signal(signal.SIGINT, before)
    try:
        assert until(lambda: any(out.glob(begun)), 60.0), (tmp_path / "said").read_text()
        yield child, out, job_id
    finally:
        child.kill()
        child.wait()
        end(job_id)


@pytest.fixture
def supervised(script, tmp_path):
    """Start a slow run under a supervisor; yields (its process, its folder, its job's id) after its first steps."""
    words = [sys.executable, "-m", "hvdtrain", "launch", "--restarts", "2", "-H", "localhost:2", *AS_ROOT,
             "--out", str(tmp_path / "run"), "--", sys.executable, script(SLOW), str(tmp_path / "run"), "2"]
    with slow_run(tmp_path, words, "checkpoints/step-*") as started:
        yield started


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
    row, = history.read_attempts(out)
    assert row["cause"] == "requeue" and row["steps_lost"] == 0, "saved at its last step"
    assert not (out / "completed.json").exists() and until(lambda: not processes(job_id), 5.0)


def test_ctrl_c_under_mpirun_saves_within_its_grace(script, tmp_path):
    launcher = shutil.which("mpirun", path=_path())
    if launcher is None or "(Open MPI) 4." not in subprocess.run([launcher, "--version"], capture_output=True,
                                                                 text=True).stdout:
        pytest.skip("only Open MPI 4 leaves its ranks a second")
    words = [launcher, *_flags(launcher), "--mca", "odls_base_sigkill_timeout", "3", "-np", "2", sys.executable,
             script(SLOW), str(tmp_path / "run"), "999"]
    with slow_run(tmp_path, words, "stepped") as (child, out, job_id):
        child.send_signal(signal.SIGINT)
        child.wait(timeout=60)
        assert until(lambda: not processes(job_id), 5.0), processes(job_id)
    step, = [int(path.name[5:]) for path in (out / "checkpoints").iterdir()]
    assert step > 0 and not (out / "completed.json").exists()
    assert "the run saves after this step and ends; --resume auto" in (tmp_path / "said").read_text()


def test_a_killed_supervisor_leaves_no_rank(supervised):
    child, _, job_id = supervised
    assert len(processes(job_id)) >= 4, "supervisor, launcher and two ranks at least"
    child.kill()
    child.wait()
    assert until(lambda: not processes(job_id), 20.0), processes(job_id)
