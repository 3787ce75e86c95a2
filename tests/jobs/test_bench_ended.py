"""`benchmarks accuracy`, `benchmarks step` and `verify`, which train in jobs: nothing is left after a signal."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import time
import uuid

import psutil
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


@contextlib.contextmanager
def started(words, tmp_path):
    """Start ``python -m WORDS`` in a session of its own; yield (the process, the id of its job); end what is left."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if find_mpi() is None:
        pytest.skip("there is no mpirun")
    job_id = uuid.uuid4().hex
    child = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, start_new_session=True,
                             env=runner._env(job_id, {"TMPDIR": str(tmp_path)}), preexec_fn=heed_interrupts)
    try:
        yield child, job_id
    finally:
        runner.end(job_id)
        child.kill()
        child.wait()


@pytest.mark.parametrize("command, number, status", [("accuracy", signal.SIGTERM, 143), ("verify", signal.SIGINT, 130)])
def test_nothing_is_left_after_a_signal(command, number, status, tmp_path):
    with started(["hvdtrain", *COMMANDS[command]], tmp_path) as (child, job_id):
        assert eventually(lambda: len(ranks(job_id)) == 2, 60), output(child)
        time.sleep(1.0)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hvdtrain-")], "its temporary folder"
        child.send_signal(number)
        said, _ = child.communicate(timeout=30)
        assert child.returncode == status, said
        assert eventually(lambda: not runner.processes(job_id), 3), runner.processes(job_id)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("hvdtrain-")]


def suspended(job_id, contender):
    """Return whether a rank of this contender is suspended, while the other contender takes its turn."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(psutil.Process(pid).status() == psutil.STATUS_STOPPED
                   for pid, line in runner.processes(job_id).items() if f"--contender {contender} " in line)
    return False


def output(child):
    """End ``child`` and return what it has printed."""
    child.kill()
    return child.communicate(timeout=10)[0]


def test_suspended_contenders_of_a_race_end_with_it(tmp_path):
    """mpirun and its ranks, suspended or not, end with `benchmarks step`."""
    race = ["benchmarks", "step", "--workload", "tiny", "--timeout", "90", "--rounds", "100000", "--contenders",
            "ddp,hvdtrain-mpi"]
    with started(race, tmp_path) as (child, job_id):
        assert eventually(lambda: suspended(job_id, "hvdtrain-mpi"), 90), output(child)
        child.send_signal(signal.SIGTERM)
        said, _ = child.communicate(timeout=60)
        assert child.returncode == 143, said
        assert eventually(lambda: not runner.processes(job_id), 5), runner.processes(job_id)
