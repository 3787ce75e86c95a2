"""Environments and answers of Slurm (recorded), PBS and LSF (written by hand): hosts, ids and time limits."""

import time

import pytest

from hvdtrain.cluster import allocation
from hvdtrain.cluster.allocation import (
    Allocation,
    allocation_of,
    lsf_left_s,
    pbs_end,
    scheduler_ends_at,
    slurm_left_s,
)
from hvdtrain.cluster.liveness.causes import ENDS_AT, ends_at

PBS = {"PBS_JOBID": "1234.server", "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": "4", "PATH": "", "PBS_EXEC": "/none"}
LSF = {"LSB_JOBID": "77", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "a 4 b 2", "LSB_DJOB_NUMPROC": "6", "PATH": ""}
QSTAT = """Job Id: 1234.server
    Job_Name = train
    job_state = R
    Resource_List.ncpus = 8
    Resource_List.walltime = 04:30:00
    resources_used.walltime = 00:01:00
    stime = Fri Nov 27 02:14:26 2026
"""


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Take this process out of any scheduler's job, and forget earlier answers."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME", "PBS_JOBID", "LSB_JOBID", ENDS_AT):
        monkeypatch.delenv(name, raising=False)
    allocation._asked.cache_clear()
    yield
    allocation._asked.cache_clear()


def test_allocations_of_three_schedulers(tmp_path):
    assert allocation_of({}) is None
    assert allocation_of({"SLURM_JOB_ID": "7"}) == Allocation("Slurm", "7")
    assert allocation_of({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}) == Allocation("Slurm", "7", components=2)
    (tmp_path / "nodes").write_text("a.cluster\na.cluster\nb.cluster\n")
    env = PBS | {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert allocation_of(env) == Allocation("PBS", "1234.server", (("a.cluster", 2), ("b.cluster", 1)))
    assert allocation_of(PBS).hosts == ()
    assert allocation_of(LSF) == Allocation("LSF", "77", (("a", 4), ("b", 2)))
    array = {**LSF, "LSB_JOBINDEX": "3", "LSB_MCPU_HOSTS": "", "LSB_DJOB_HOSTFILE": str(tmp_path / "nodes")}
    assert allocation_of(array) == Allocation("LSF", "77[3]", (("a.cluster", 2), ("b.cluster", 1)))


def test_the_schedulers_remote_shell_is_found(tmp_path):
    for name in ("bin/pbs_tmrsh", "blaunch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert allocation_of(PBS | {"PBS_EXEC": str(tmp_path)}).agent == str(tmp_path / "bin/pbs_tmrsh")
    assert allocation_of(LSF | {"PATH": str(tmp_path)}).agent == str(tmp_path / "blaunch")


@pytest.mark.parametrize("text, seconds", [
    ("59:59\n", 3599), ("1:00:00", 3600), ("2-03:00:01", 183601), ("0:00", 0), ("UNLIMITED", 0), ("INVALID", 0),
    ("N/A", 0), ("", 0)])
def test_time_left_in_slurm(text, seconds):
    assert slurm_left_s(text) == seconds


@pytest.mark.parametrize("text, seconds", [("1:30 L\n", 5340), ("0:00 L", 1), ("0:05 X", 240), ("1:30 E", 0), ("-", 0)])
def test_time_left_in_lsf(text, seconds):
    assert lsf_left_s(text) == seconds


def test_the_end_of_a_job_of_pbs():
    begun = time.mktime((2026, 11, 27, 2, 14, 26, 0, 0, -1))
    assert pbs_end(QSTAT) == begun + 4.5 * 3600
    assert pbs_end(QSTAT.replace("walltime = 04:30:00", "ncpus = 1")) == 0.0
    assert pbs_end(QSTAT.replace("stime", "qtime")) == 0.0


@pytest.mark.parametrize("program, env, text, at_least", [
    ("squeue", {"SLURM_JOB_ID": "7"}, "30:00", 1800), ("qstat", PBS, QSTAT, 0), ("bjobs", LSF, "0:31 L", 1800)])
def test_the_limit_is_asked_once_by_rank_0_and_the_earlier_one_counts(tmp_path, monkeypatch, program, env, text,
                                                                      at_least):
    (tmp_path / program).write_text(f"#!/bin/sh\necho \"$@\" >>{tmp_path}/calls\ncat <<'E'\n{text}\nE\n")
    (tmp_path / program).chmod(0o755)
    for name, value in {**env, "PATH": f"{tmp_path}:/bin:/usr/bin"}.items():
        monkeypatch.setenv(name, value)
    found = scheduler_ends_at()
    assert found == pbs_end(QSTAT) if program == "qstat" else at_least <= found - time.time() + 1 <= at_least + 62
    assert ends_at(0.0) == found
    assert ends_at(1.0) < found or program == "qstat"
    assert (tmp_path / "calls").read_text().split()[-1] == allocation_of(env).job
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert ends_at(0.0) == 0.0, "rank 0 decides"
    monkeypatch.setenv(ENDS_AT, "5")
    assert ends_at(0.0) == 5.0, "the supervisor knows"


def test_slurm_23_says_the_end_itself(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1795745667")
    assert scheduler_ends_at() == 1795745667.0
