"""`benchmarks accuracy` and `verify`, which train in jobs of their own: nothing is left of them when they are ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
import runner

from hvdtrain.cluster.machine.software import find_mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ENDLESS = ["--model_args.width", "16", "--data.args.samples", "64"]
COMMANDS = {"accuracy": ["bench", "accuracy", "--workload", "text", "--compression", "none", "--seeds", "0",
                         "--max_steps", "1000000", *ENDLESS],
            "verify": ["verify", "--np", "2", "--no-uneven", "--steps", "1000000", "--model", "torch_models.gpt:build",
                       "--data.name", "text", *ENDLESS]}


def ranks(job_id):
    """Process ids of the ranks: those that train, without mpirun, which has their command line too."""
    return [pid for pid, line in runner.processes(job_id).items() if " train " in line and "-np " not in line]


def eventually(true, within_s):
    ends_at = time.monotonic() + within_s
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.05)
    return true()


def heed_interrupts():
    """Reset SIGINT, which background jobs of a shell, and so their children, ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("command, number, status", [("accuracy", signal.SIGTERM, 143), ("verify", signal.SIGINT, 130)])
def test_nothing_is_left_after_a_signal(command, number, status, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if find_mpi() is None:
        pytest.skip("there is no mpirun")
    job_id = f"{command}-{os.getpid()}-{number}"
    child = subprocess.Popen([sys.executable, "-m", "hvdtrain", *COMMANDS[command]], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                             env=runner._env(job_id, {"TMPDIR": str(tmp_path)}), preexec_fn=heed_interrupts)
    try:
        assert eventually(lambda: len(ranks(job_id)) == 2, 60), child.communicate(timeout=1)
        time.sleep(1.0)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hvdtrain-")], "its temporary folder"
        child.send_signal(number)
        said, _ = child.communicate(timeout=30)
        assert child.returncode == status, said
        assert eventually(lambda: not runner.processes(job_id), 3), runner.processes(job_id)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("hvdtrain-")]
    finally:
        runner.end(job_id)
        child.kill()
        child.wait()
