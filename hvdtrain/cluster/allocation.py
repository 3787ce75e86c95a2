"""Job of a batch scheduler that this process is in (Slurm, PBS Pro and OpenPBS, LSF): its hosts and its time limit.

Reads environment variables and node files and runs the scheduler's own query command. Command lines of launches are
left to `hvdtrain.cluster.launchers`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.cluster.machine.software import answer_of

MOST_BYTES = 1 << 20
"""Of a node file; the rest is not read."""


@dataclass(frozen=True)
class Allocation:
    """Job of a scheduler, or interactive allocation.

    ``hosts``: names with their slots, in order; () in Slurm, whose srun places the ranks. ``components``: number of
    parts of a heterogeneous Slurm job, else 1. ``agent``: the scheduler's program that replaces ssh, "" for ssh itself.
    """

    scheduler: Literal["Slurm", "PBS", "LSF"]
    job: str
    hosts: tuple[tuple[str, int], ...] = ()
    components: int = 1
    agent: str = ""


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """Return the job that ``env`` names, None outside of one. Reads the node file, runs nothing."""
    if "SLURM_JOB_ID" in env:
        size = env.get("SLURM_HET_SIZE", "1")
        return Allocation("Slurm", env["SLURM_JOB_ID"], components=int(size) if size.isdigit() else 1)
    if "PBS_JOBID" in env:
        agent = shutil.which("pbs_tmrsh", path=os.pathsep.join((os.path.join(env.get("PBS_EXEC", "/opt/pbs"), "bin"),
                                                                env.get("PATH", ""))))
        return Allocation("PBS", env["PBS_JOBID"], _lines(env.get("PBS_NODEFILE", "")), agent=agent or "")
    if "LSB_JOBID" in env:
        index = env.get("LSB_JOBINDEX", "0")
        job = env["LSB_JOBID"] + (f"[{index}]" if index not in ("", "0") else "")
        agent = shutil.which("blaunch", path=env.get("PATH", ""))
        return Allocation("LSF", job, _lsf_hosts(env), agent=agent or "")
    return None


def _lines(path: str) -> tuple[tuple[str, int], ...]:
    """Return the hosts of a node file with a line per slot; () where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            words = file.read(MOST_BYTES).decode(errors="replace").split()
    except OSError:
        return ()
    return tuple(Counter(words).items())


def _lsf_hosts(env: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return LSF's hosts: from ``LSB_MCPU_HOSTS`` ("a 4 b 2"), else from its node file."""
    words = env.get("LSB_MCPU_HOSTS", "").split()
    if words and len(words) % 2 == 0 and all(number.isdigit() for number in words[1::2]):
        found: Counter[str] = Counter()
        for name, number in zip(words[::2], words[1::2]):
            found[name] += int(number)
        return tuple(found.items())
    return _lines(env.get("LSB_DJOB_HOSTFILE", ""))


def scheduler_ends_at() -> float:
    """Return when the scheduler ends this process's job, in unix seconds; 0 without a limit, or an unknown one.

    Asks the scheduler once per process, within `hvdtrain.cluster.machine.software.PROBE_TIMEOUT_S`.
    """
    found = allocation_of(os.environ)
    if found is None:
        return 0.0
    if found.scheduler == "Slurm":
        with contextlib.suppress(ValueError):  # Slurm 23.02 and later
            return float(os.environ.get("SLURM_JOB_END_TIME", ""))
    return _asked(found.scheduler, found.job)


QUERIES = {"Slurm": ("squeue", "--noheader", "--format=%L", "--jobs"), "PBS": ("qstat", "-f"),
           "LSF": ("bjobs", "-noheader", "-o", "time_left")}
"""Command of each scheduler that reports a job's remaining time; the job's id follows."""


@functools.cache
def _asked(scheduler: str, job: str) -> float:
    text, _ = answer_of([*QUERIES[scheduler], job])
    if scheduler == "PBS":
        return pbs_end(text)
    left_s = {"Slurm": slurm_left_s, "LSF": lsf_left_s}[scheduler](text)
    return time.time() + left_s if left_s else 0.0


def slurm_left_s(text: str) -> float:
    """Return the seconds in squeue's ``%L``, such as "1-02:03:04", "59:59" or "UNLIMITED"; 0 for no limit. Pure."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", (text.split() or [""])[0])
    if found is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def lsf_left_s(text: str) -> float:
    """Return the seconds in bjobs' ``time_left`` ("1:30 L"); 0: no limit, or an estimate (E). Pure."""
    found = re.fullmatch(r"(\d+):(\d+)\s*[LX]", text.strip())
    return max(1.0, (int(found[1]) * 60 + int(found[2]) - 1) * 60.0) if found else 0.0


def pbs_end(text: str) -> float:
    """Return the end of a job from ``qstat -f``: its start plus its walltime; 0 without either. Pure."""
    limit = re.search(r"^\s*Resource_List\.walltime = (\d+):(\d+):(\d+)\s*$", text, re.MULTILINE)
    start = re.search(r"^\s*stime = (.+?)\s*$", text, re.MULTILINE)
    if limit is None or start is None:
        return 0.0
    try:
        begun = time.mktime(time.strptime(start[1], "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return 0.0
    hours, minutes, seconds = (int(part) for part in limit.groups())
    return begun + (hours * 60 + minutes) * 60 + seconds
