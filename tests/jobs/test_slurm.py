"""The batch script, ``launch`` and srun in a real Slurm of two nodes on this machine."""

import json
import re
import sys

import pytest

from tests.jobs.runner import ROOT, Job, run

SLURM = str(ROOT / "benchmarks" / "one_machine_slurm.sh")
UNAVAILABLE = 77

RANK = """#!/bin/sh
echo "start ${SLURM_ARRAY_TASK_ID:-none} ${SLURM_RESTART_COUNT:-0} $*" >>@LOG@
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
[ "$SLURM_ARRAY_TASK_ID" != 1 ] || exit 75
trap 'echo "saved ${SLURM_ARRAY_TASK_ID:-none}" >>@LOG@; exit 75' TERM USR2
i=0
while [ $i -lt 300 ] && [ ! -e @GO@ ]; do sleep 0.1; i=$((i + 1)); done
"""
"""Takes the place of Python in the batch script: saves and ends with 75 on a signal, ends with 0 after a requeue."""


def in_slurm(script: str, timeout_s: float = 90.0, **env: str) -> Job:
    """Run a bash script in the Slurm; skip the test where Slurm cannot run."""
    job = run([SLURM, "bash", "-c", script], timeout_s, env, settle_s=5.0)
    if job.returncode == UNAVAILABLE:
        pytest.skip(job.stderr.strip().splitlines()[-1])
    assert not job.orphans
    return job


@pytest.fixture
def rank(tmp_path):
    """Return the program of a rank; its log is tmp_path/log, and tmp_path/go ends it with 0."""
    path = tmp_path / "rank"
    path.write_text(RANK.replace("@LOG@", str(tmp_path / "log")).replace("@GO@", str(tmp_path / "go")))
    path.chmod(0o755)
    text = (ROOT / "mpi_scripts" / "run.sbatch").read_text()
    text = re.sub(r"--ntasks-per-node=4", "--ntasks-per-node=1", text.replace("--nodes=2", "--nodes=1"))
    (tmp_path / "run.sbatch").write_text(text.replace("--cpus-per-task=8", "--cpus-per-task=1"))
    return path


DRAIN = "for i in {1..300}; do [[ $(squeue -h) ]] || break; sleep 0.1; done; [[ ! $(squeue -h) ]]"


def test_an_array_requeues_one_task_and_preemption_and_scancel_do_what_they_should(tmp_path, rank):
    """Task 1 of an array ends with 75 while tasks 0 and 2 run; then a job of a higher partition preempts another.

    The task with the largest number has the array's own id, so that its requeue by SLURM_JOB_ID would stop all.
    """
    job = in_slurm(f"""cd {tmp_path}; export PYTHON={rank} MPI=none
        sbatch --array=0-1 -t 5 -o /dev/null run.sbatch || exit 1
        for i in {{1..200}}; do grep -q 'start 1 1' log 2>/dev/null && break; sleep 0.1; done
        touch go; {DRAIN} || exit 2; rm go; mv log array
        sbatch -t 5 -o /dev/null run.sbatch; sbatch -t 5 -o cancelled run.sbatch
        for i in {{1..100}}; do [[ $(grep -c start log) == 2 ]] && break; sleep 0.1; done
        scancel 4; sbatch -p high -N2 -n8 -t 1 -o /dev/null --wrap true
        {DRAIN} || exit 3""", CPUS="4")
    assert job.returncode == 0, job.text
    array = [line.split()[:3] for line in (tmp_path / "array").read_text().splitlines()]
    assert sorted(array) == [["start", "0", "0"], ["start", "1", "0"], ["start", "1", "1"]], "task 0 was left alone"
    outs = re.findall(r"--out (\S+)", (tmp_path / "array").read_text())
    assert {out.rpartition("/")[2] for out in outs} == {"slurm-1_0", "slurm-1_1"}, "a folder for each task"
    log = [line.split()[:3] for line in (tmp_path / "log").read_text().splitlines()]
    assert log.count(["saved", "none"]) == 2, "preempted and cancelled"
    assert log.count(["start", "none", "1"]) == 1, "the preempted job came back, the cancelled one did not"


def test_launch_uses_all_components_of_a_heterogeneous_job_and_knows_its_time_limit(tmp_path):
    """Train on three ranks of two components; then srun without PMIx, which MPI itself would not survive."""
    python = sys.executable
    job = in_slurm(f"""cd {ROOT}
        salloc -Q -t 5 -N1 -n1 : -t 5 -p two -N1 -n2 {python} -m hvdtrain launch --restarts 0 -- train \\
            --model torch_models.cnn:build --epochs 1 --out {tmp_path}/out || exit 1
        srun -Q -t 3 -N1 -n1 {python} -c 'import time
from hvdtrain.cluster.liveness.causes import ends_at
print("left", ends_at(0.0) - time.time(), ends_at(60.0) - time.time())' || exit 2
        srun -Q -N2 -n2 --mpi=pmi2 {python} -m hvdtrain train --model torch_models.cnn:build""")
    assert job.returncode == 2, job.text
    history = [json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines()]
    assert [(one["cause"], one["ranks"]) for one in history] == [("done", 3)]
    assert "Sorry!" not in job.text
    found = re.search(r"left (\S+) (\S+)", job.text)
    assert found is not None and 100 < float(found[1]) <= 181 and float(found[2]) <= 60.5
    assert job.text.count("srun with --mpi=pmi2, and mpi4py uses Open MPI") == 1
    assert "MPI_ERRORS_ARE_FATAL" not in job.text
