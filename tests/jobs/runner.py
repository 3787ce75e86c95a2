"""Runs a whole MPI job as a child, for tests in which the job must die.

Owns `mpirun` and the hunt for what a job leaves behind. Every process of a job carries its id in the environment.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB_ID = "TEST_JOB_OF_HVDTRAIN"
"""Not HVDTRAIN_...: such names are keys of the configuration."""
LAUNCHER_NAMES = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_")


@dataclass(frozen=True)
class Job:
    """Result of a job. ``orphans``: command lines of processes that outlived the launcher by `settle_s`."""

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    orphans: list[str]

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.stdout}\n{self.stderr}"


def mpirun(ranks: int, argv: list[str], timeout_s: float = 60.0, env: dict[str, str] | None = None,
           settle_s: float = 2.0, program: Sequence[str] = (sys.executable,)) -> Job:
    """Run ``program argv...`` on ``ranks`` ranks; ``returncode`` is None if it had to be ended after ``timeout_s``."""
    launcher = shutil.which("mpirun", path=_path())
    assert launcher, "mpirun was not found beside this interpreter or on PATH"
    return run([launcher, *_flags(launcher), "-np", str(ranks), *program, *argv], timeout_s, env, settle_s)


def run(command: list[str], timeout_s: float = 60.0, env: dict[str, str] | None = None, settle_s: float = 2.0) -> Job:
    """Run a command in a session of its own and account for all its processes."""
    job_id = uuid.uuid4().hex
    started = time.monotonic()
    child = subprocess.Popen(command, env=_env(job_id, env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    code: int | None
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
        code, seconds = child.returncode, time.monotonic() - started
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - started
        end(job_id)
        child.kill()
        stdout, stderr = child.communicate()
        code = None
    ends_at = time.monotonic() + settle_s
    while processes(job_id) and time.monotonic() < ends_at:
        time.sleep(0.05)
    orphans = list(processes(job_id).values())
    end(job_id)
    return Job(code, stdout, stderr, seconds, orphans)


def processes(job_id: str) -> dict[int, str]:
    """Process id and command line of every process of the job."""
    mark, found = f"{JOB_ID}={job_id}".encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def end(job_id: str) -> None:
    """Kill what is left of the job."""
    for pid in processes(job_id):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _env(job_id: str, extra: dict[str, str]) -> dict[str, str]:
    """Return this environment without what another launcher left in it, with what a small machine needs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_NAMES)}
    env |= {JOB_ID: job_id, "PATH": _path(), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | extra


@functools.lru_cache
def _flags(launcher: str) -> list[str]:
    """More ranks than cores and no binding, said as each MPI wants it."""
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30).stdout
    return ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said or "OpenRTE" in said else []


def _path() -> str:
    """PATH with the environment's own folder first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
