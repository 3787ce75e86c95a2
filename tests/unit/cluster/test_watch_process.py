"""The process beside the ranks, with small programs for ranks: which it names, what it ends, and when it goes itself.

The jobs run side by side: most of their time is waiting.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hvdtrain.cluster.liveness import watch
from hvdtrain.cluster.liveness.watch.system import stat
from hvdtrain.core import ROOT
from hvdtrain.core.launcher import LaunchFacts

BOUND_S = 1.0

RANK = """
import os, signal, sys, time
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.cluster.liveness import pulse, watch

rank = int(os.environ["HOROVOD_RANK"])
if sys.argv[1] == "early" and rank == 1:
    os.write(1, f"{rank} {os.getpid()}\\n".encode())
    os.kill(os.getpid(), signal.SIGSTOP)
watch.start(LaunchFacts("gloo", rank, 2, rank, 2, "horovodrun --gloo"), float(sys.argv[2]))
pulse.at("step_end of Mine", 40 + rank)
os.write(1, f"{rank} {os.getpid()}\\n".encode())
if sys.argv[1] == "leaves":
    sys.exit(3 * rank)
if sys.argv[1] == "wrapped":
    time.sleep(1 + 2 * (1 - rank))
    os.write(1, f"{rank} has saved\\n".encode())
    sys.exit()
while True:
    time.sleep(0.1)
"""

LAUNCHER = """
import os, subprocess, sys
wrap = ["bash", "-c", '"$@"; exit $?', "wrapper"] if sys.argv[2] == "wrapped" else []
ranks = [subprocess.Popen([*wrap, sys.executable, "-c", sys.argv[1], *sys.argv[2:]],
                          env=os.environ | {"HOROVOD_RANK": str(r)}) for r in range(2)]
sys.exit(max(rank.wait() for rank in ranks) and 1)
"""


class Job:
    """Two ranks under a launcher that only waits; its processes are found by their environment."""

    def __init__(self, how: str, bound_s: float = BOUND_S) -> None:
        self.mark = uuid.uuid4().hex
        env = os.environ | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self.mark, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
                            "HOROVOD_SIZE": "2", "PYTHONPATH": str(ROOT.parent)}
        self.launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, how, str(bound_s)], env=env, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        assert self.launcher.stdout is not None
        words = sorted(self.launcher.stdout.readline().split() for _ in range(2))
        self.ranks = [int(pid) for _, pid in words]

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank], number)

    def ended(self, timeout_s: float = 25.0) -> str:
        """Return what the job said, once every process of it is gone, the watcher too."""
        _, said = self.launcher.communicate(timeout=timeout_s)
        assert until(lambda: not self.left()), self.left()
        return said

    def left(self) -> list[int]:
        """Its processes."""
        mark, found = self.mark.encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes() and entry.name != str(os.getpid()):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


def until(true, timeout_s: float = 10.0) -> bool:
    """Wait for it; whether it came."""
    ends_at = time.monotonic() + timeout_s
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.02)
    return bool(true())


def watched(job: Job) -> bool:
    """Return whether a watcher is there beside launcher and ranks."""
    return until(lambda: len(job.left()) == 4)


@pytest.fixture(scope="module")
def jobs():
    """Every kind of job at once, each with what befalls it."""
    names = {"frozen": "runs", "killed": "runs", "orphaned": "runs", "suspended": "runs", "paused": "runs",
             "early": "early", "leaves": "leaves", "wrapped": "wrapped", "unwatched": "runs"}
    made: dict[str, Job] = {}
    try:
        for name, how in names.items():
            made[name] = Job(how, 0.0 if name == "unwatched" else BOUND_S)
        for name in ("frozen", "killed", "orphaned", "suspended", "paused"):
            assert watched(made[name]), name
        made["suspended"].send(signal.SIGSTOP, 0, 1)
        made["frozen"].send(signal.SIGSTOP, 1)
        made["killed"].send(signal.SIGKILL, 0)
        made["orphaned"].launcher.kill()
        made["paused"].send(signal.SIGSTOP, 0)
        time.sleep(BOUND_S / 3)
        made["paused"].send(signal.SIGCONT, 0)
        yield made
    finally:
        for job in made.values():
            job.kill()


@pytest.mark.slow
def test_a_frozen_rank_is_named_with_the_stacks_of_the_other(jobs):
    said = jobs["frozen"].ended()
    assert re.search(r"^hvdtrain: rank 1 on host \S+, stopped by a signal, in step 41, phase 'step_end of Mine' since "
                     r"\d+ s: frozen for 1 s \(heartbeat_timeout_s 1\). The job is stopped.", said), said
    assert said.count("hvdtrain: ") == 1 and said.count("Stacks of rank 0 on host ") == 1 and 'File "<string>"' in said
    assert jobs["frozen"].launcher.returncode != 0


@pytest.mark.slow
def test_a_killed_rank_is_named_though_it_started_the_watcher(jobs):
    said = jobs["killed"].ended()
    assert re.search(r"^hvdtrain: rank 0 on host \S+, ended, in step 40, .*: its process has ended without a me", said)
    assert said.count("hvdtrain: ") == 1 and jobs["killed"].launcher.returncode != 0


def test_ranks_end_with_their_launcher(jobs):
    assert "the launcher of this job has ended" in jobs["orphaned"].ended()


@pytest.mark.slow
def test_a_rank_that_is_frozen_before_it_comes_is_found(jobs):
    said = jobs["early"].ended()
    assert re.search(r"^hvdtrain: rank 1 on host \S+, starting: frozen for \d+ s", said), said
    assert "Stacks of rank 0" in said


def test_the_watcher_goes_without_a_word_with_ranks_that_leave(jobs):
    assert jobs["leaves"].ended() == "" and jobs["leaves"].launcher.returncode == 1


def test_a_rank_outlives_the_wrapper_of_another(jobs):
    job = jobs["wrapped"]
    said, wrong = job.launcher.communicate(timeout=25.0)
    assert "0 has saved" in said and wrong == "" and job.launcher.returncode == 0


@pytest.mark.slow
def test_neither_a_short_pause_nor_a_suspended_job_is_ended(jobs):
    time.sleep(2 * BOUND_S)
    for name in ("paused", "suspended"):
        jobs[name].send(signal.SIGCONT, 0, 1)
        assert len(jobs[name].left()) == 4, name


def test_nobody_watches_where_the_bound_is_zero(jobs):
    assert len(jobs["unwatched"].left()) == 3


def test_the_states_of_a_process():
    own = stat(os.getpid())
    assert own is not None and own.parent == os.getppid() and own.state == "R" and own.cpu_s > 0
    assert stat(2**22 + 1) is None


@pytest.mark.parametrize("size, supervised, joins", [(1, False, 0), (1, True, 1), (2, False, 1)])
def test_a_lone_rank_is_watched_for_a_supervisor_alone(monkeypatch, tmp_path, size, supervised, joins):
    joined = []
    monkeypatch.setattr(watch, "_state", {})
    monkeypatch.setattr(watch, "_join", lambda facts, bound_s: joined.append(bound_s))
    monkeypatch.delenv("HVDLAUNCH_DIR", raising=False)
    if supervised:
        monkeypatch.setenv("HVDLAUNCH_DIR", str(tmp_path))
    watch.start(LaunchFacts("mpi", 0, size, 0, size, "Open MPI mpirun"), 7.0)
    assert joined == [7.0] * joins
