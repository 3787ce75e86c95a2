"""Failures of jobs: one message, the right exit status, an end within seconds, and no process left."""

import re
import sys

import pytest
from runner import mpirun, run

GUARDED = """
import os, sys, time
from hvdtrain.cluster import boot
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.errors import PeerFailed, UserError

facts = launch_facts(os.environ)

def main():
    rank = facts.rank
    if {early}:
        raise UserError("batch is -1", "1 or more", "set batch")
    control = boot.start_control(facts, {timeout_s})
    control.barrier("start")
{body}
    control.barrier("end")
    return 0

sys.exit(run_guarded(main, facts))
"""

HOOKED = """
import os, time
from hvdtrain.cluster import boot
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.errors import UserError

facts = launch_facts(os.environ)
install_hooks(facts)
control = boot.start_control(facts, 60)
rank = control.rank
control.barrier("start")
{body}
control.barrier("end")
"""


def guarded(body, early="False", timeout_s=60):
    """Return a script around run_guarded."""
    return GUARDED.format(body="\n".join("    " + line for line in body.splitlines()), early=early, timeout_s=timeout_s)


def check_crash(job, rank, text, status=1):
    """Check for one traceback, which names ``rank`` and its host once, a nonzero status, and no process left."""
    assert job.returncode == status, job
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert re.findall(r"rank (\d+) on host \S+ failed and ends the job", job.stderr) == [str(rank)], job.stderr
    assert text in job.stderr
    assert not job.orphans


def check_mistake(job, text):
    """Check for one message, no traceback, status 2 of every rank, and no process left."""
    assert job.returncode == 2, job
    assert job.text.count(text) == 1, job.text
    assert "Traceback" not in job.text, job.text
    assert not job.orphans


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_raises_ends_the_job(script, rank):
    job = mpirun(3, [script(guarded(f"if rank == {rank}: raise ValueError('bad weights')"))])
    check_crash(job, rank, "ValueError: bad weights")
    assert job.seconds < 30, "it waited for the control plane"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_script_without_guard_that_raises_ends_the_job(script, rank):
    check_crash(mpirun(3, [script(HOOKED.format(body=f"if rank == {rank}: raise ValueError('bad weights')"))]), rank,
                "ValueError: bad weights")


def test_all_ranks_raise_and_one_speaks(script):
    check_crash(mpirun(3, [script(guarded("raise ValueError('everywhere')"))]), 0, "everywhere")


def test_the_origin_speaks_before_its_echo(script):
    body = "if rank == 2: raise ValueError('the origin')\nraise PeerFailed('another rank has ended')"
    job = mpirun(3, [script(guarded(body))])
    check_crash(job, 2, "the origin")
    assert "another rank has ended" not in job.stderr


def test_ranks_that_compute_are_ended_too(script):
    job = mpirun(2, [script(guarded("if rank == 1: raise ValueError('x')\nwhile True: pass"))])
    check_crash(job, 1, "ValueError: x")
    assert job.seconds < 30


def test_a_crash_before_the_control_plane(script):
    text = guarded("pass").replace("    rank = facts.rank",
                                   "    rank = facts.rank\n    if rank == 1: raise ValueError('early')")
    check_crash(mpirun(2, [script(text)]), 1, "ValueError: early")


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_mistake_on_every_rank_before_mpi(script, ranks):
    check_mistake(mpirun(ranks, [script(guarded("pass", early="True"))]), "batch is -1; expected 1 or more. Set batch.")


def test_a_mistake_on_one_rank_before_mpi(script):
    job = mpirun(3, [script(guarded("pass", early="rank == 1"))])
    check_mistake(job, "batch is -1")
    assert job.stderr.count("rank 1 on host ") == 1


def test_a_mistake_on_every_rank(script):
    check_mistake(mpirun(3, [script(guarded("raise UserError('no such model', 'mlp', 'name it')"))]), "no such model")


def test_a_mistake_on_one_rank(script):
    job = mpirun(3, [script(guarded("if rank == 2: raise UserError('cannot read /data', 'a file', 'copy it')"))])
    check_mistake(job, "cannot read /data")
    assert job.stderr.count("rank 2 on host ") == 1


def test_a_mistake_that_was_agreed(script):
    body = """def read():
    if rank == 1: raise UserError('cannot read /data', 'a file', 'copy it')
agreed(control, read, 'reading the data')"""
    job = mpirun(3, [script(guarded(body))])
    check_mistake(job, "cannot read /data")
    assert job.stderr.count("rank 1 on host ") == 1


def test_a_mistake_in_a_script_without_guard(script):
    check_mistake(mpirun(3, [script(HOOKED.format(body="raise UserError('no such model', 'mlp', 'name it')"))]),
                  "no such model")


def test_a_wait_that_runs_out_names_itself(script):
    job = mpirun(2, [script(guarded("if rank == 1: time.sleep(60)", timeout_s=1.0))])
    check_crash(job, 0, "WaitTimeout: rank 0 on host ")
    assert "barrier 'end'" in job.stderr and "1 s" in job.stderr
    assert job.seconds < 30


def test_a_deadline_ends_the_job(script):
    body = """from hvdtrain.cluster.deadline import deadline
with deadline(1.0, 'allreduce grad.0'):
    time.sleep(60)"""
    job = mpirun(2, [script(guarded(body))])
    assert job.returncode == 70, job
    assert "allreduce grad.0 did not end within 1 s" in job.stderr and "File " in job.stderr
    assert not job.orphans and job.seconds < 30


@pytest.mark.parametrize("leavers", ["True", "rank == 1"])
def test_sys_exit_does_not_hang(script, leavers):
    job = mpirun(3, [script(guarded(f"if {leavers}: sys.exit(7)"))])
    assert job.returncode == 7, job
    assert not job.orphans and job.seconds < 30


TRAINS = """
import sys
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.cluster import boot

class Data:
    count = 0
    def __len__(self):
        return 40
    def fetch(self, indices_n):
        self.count += 1
        if self.count == {at} and boot.current_control().rank in {leavers}:
            sys.exit({status})
        return np.zeros((len(indices_n), 12)), np.zeros(len(indices_n), np.int64)

Trainer(Config(global_batch=8, out={out!r}, progress="off", control_timeout_s=20.0)).fit(Model((12, 16, 5)), Data())
"""


@pytest.mark.parametrize("leavers, at, status", [((0, 1), 1, "0"), ((1,), 1, "0"), ((1,), 3, "'no data'")])
def test_sys_exit_in_a_users_data_ends_the_job_with_one_message(script, tmp_path, leavers, at, status):
    job = mpirun(2, [script(TRAINS.format(leavers=leavers, at=at, status=status, out=str(tmp_path / "run")))])
    assert job.returncode == 1, job
    said = re.findall(r"rank (\d) on host \S+: Data.fetch \(\S*job.py, line \d+\) ended the program with "
                      "(?:status 0|status 1 and the message 'no data') in the middle of a run", job.stderr)
    assert said == [str(leavers[0])] and "Traceback" not in job.text, job.stderr
    assert not job.orphans and not (tmp_path / "run" / "completed.json").exists()


def test_an_interrupted_rank(script):
    job = mpirun(2, [script(guarded("if rank == 1: raise KeyboardInterrupt"))])
    assert job.returncode == 130, job
    assert "rank 1 on host " in job.stderr and "Traceback" not in job.stderr and not job.orphans


def test_a_job_that_succeeds(script):
    job = mpirun(3, [script(guarded("assert control.gather(rank) == [0, 1, 2]"))])
    assert (job.returncode, job.orphans) == (0, []), job


def test_one_process_needs_no_mpi(script):
    body = "assert 'mpi4py' not in sys.modules\nraise UserError('x is 1', '2', 'set x')"
    job = run([sys.executable, script(guarded(body))])
    check_mistake(job, "x is 1; expected 2. Set x.")
