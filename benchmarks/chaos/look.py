"""State of a job, seen from outside: its ranks' processes, what they note for their supervisor, its checkpoints.

Asks nobody: what is killed at any moment cannot answer. Linux's /proc only.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.liveness import causes
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.processes import processes

TRAIN = ("-m", "hvdtrain", "train")
_STEP = re.compile(r"step-(\d+)")
_TEMP = ".hvdtrain-tmp-"


@dataclass(frozen=True)
class Rank:
    """A rank's process. ``born``: its start in the system's ticks, so that a number used again is another process.

    ``folder``: of its attempt.
    """

    pid: int
    rank: int
    parent: int
    born: int
    folder: Path = Path()


def ranks(mark: str) -> list[Rank]:
    """Return the living processes of the job ``mark`` that are ranks of a training, by rank; not what they started."""
    found = [rank for rank in map(_rank, processes(mark)) if rank is not None]
    own = {rank.pid for rank in found}
    return sorted((rank for rank in found if rank.parent not in own), key=lambda rank: (rank.rank, rank.pid))


def alive(rank: Rank) -> bool:
    """Return whether it is there and no zombie."""
    facts = _stat(rank.pid)
    return facts is not None and facts[2] == rank.born and facts[0] not in "ZX"


class Eye:
    """Reads how many steps an attempt has finished, from what its rank 0 notes in the attempt's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def step(self) -> int:
        """Return it; -1 before the first step of this attempt is finished."""
        return causes.read_progress(self._folder)[0]


def newest(out: Path) -> int:
    """Return the highest step of a checkpoint that has its name; -1 without one."""
    with contextlib.suppress(OSError):
        names = os.listdir(RunDirectory(out).checkpoints)
        return max((int(m[1]) for m in map(_STEP.fullmatch, names) if m), default=-1)
    return -1


def saving(out: Path) -> bool:
    """Return whether a checkpoint is being written: its temporary directory is there."""
    with contextlib.suppress(OSError):
        return any(name.startswith(_TEMP) for name in os.listdir(RunDirectory(out).checkpoints))
    return False


def completed(out: Path) -> dict | None:
    """Return the record of a run that has ended well; None without one."""
    return RunDirectory(out).completed


def _rank(pid: int) -> Rank | None:
    facts = _stat(pid)
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        env = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if facts is None or tuple(words[1:4]) != TRAIN:
        return None
    own = dict(pair.split("=", 1) for pair in env if "=" in pair)
    if causes.DIRECTORY not in own:
        return None
    return Rank(pid, max(0, launch_facts(own).rank), facts[1], facts[2], Path(own[causes.DIRECTORY]))


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state's letter, parent, start in ticks) of a process; None where it is not there."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return words[0].decode(), int(words[1]), int(words[19])
    except (OSError, IndexError, ValueError):
        return None
