"""The harm itself: signals, a full disk, a changed bit. Each says whether it hit, in facts that were looked at.

A signal goes to processes of the own job alone, known by their mark and their start, never by a name or a number alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.chaos import look
from benchmarks.chaos.look import Rank

GONE_WITHIN_S = 10.0
"""Bound for the end of a process that was killed, and of the ranks of a supervisor that was."""

FILE_LIMIT_BYTES = 512
"""Room that a file of a limited process may take: no checkpoint fits."""


def kill(rank: Rank) -> bool:
    """Send SIGKILL to a rank; whether it lived until then and is gone by it."""
    if not look.alive(rank):
        return False
    try:
        os.kill(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return gone([rank])


def kill_process(pid: int, victims: Sequence[Rank]) -> bool:
    """Send SIGKILL to a launcher or supervisor; whether a rank lived until then and all are gone by it."""
    if not any(map(look.alive, victims)):
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return gone(victims)


def gone(victims: Sequence[Rank]) -> bool:
    """Return whether all have ended within `GONE_WITHIN_S`."""
    ends = time.monotonic() + GONE_WITHIN_S
    while any(map(look.alive, victims)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.005)
    return True


def freeze(victims: Sequence[Rank]) -> bool:
    """Send SIGSTOP; whether all of them lived."""
    lived = [rank for rank in victims if look.alive(rank)]
    for rank in lived:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGSTOP)
    return bool(lived) and len(lived) == len(victims)


def flip(out: Path, draw: random.Random) -> str:
    """Change one bit of the newest checkpoint; return its directory's name, "" where there is none."""
    step = look.newest(out)
    directory = out / "checkpoints" / f"step-{step:08d}"
    try:
        files = sorted((path.stat().st_size, path) for path in directory.iterdir() if path.stat().st_size)
    except OSError:
        return ""
    if not files:
        return ""
    (size, path), = draw.choices(files, weights=[size for size, _ in files])
    at, bit = draw.randrange(size), 1 << draw.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    return directory.name


class Disk(Protocol):
    """A disk that can be full for a while. ``words``: what it is."""

    words: str

    def fill(self, victims: Sequence[Rank]) -> bool:
        """Leave no room for a checkpoint; whether that could be done."""
        ...

    def free(self, victims: Sequence[Rank]) -> None:
        """Give the room back."""
        ...


class FilledDisk:
    """A file system of our own, small enough to be filled by one file beside the run."""

    def __init__(self, root: Path) -> None:
        self._file = root / ".filler"
        self.words = f"a file system of its own at {root}, filled to its last block"

    def fill(self, victims: Sequence[Rank]) -> bool:
        """Write until there is no room."""
        with self._file.open("wb") as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        os.write(file.fileno(), b"\0" * size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        return False
        return True

    def free(self, victims: Sequence[Rank]) -> None:
        """Remove what filled it."""
        self._file.unlink(missing_ok=True)


class LimitedFiles:
    """No file system to be filled: the kernel cuts the ranks' files short, as it does where a quota is used up."""

    words = "a limit on the size of the ranks' files (RLIMIT_FSIZE), since no file system can be mounted here"

    def fill(self, victims: Sequence[Rank]) -> bool:
        """Limit every rank's files."""
        return self._limit(victims, FILE_LIMIT_BYTES)

    def free(self, victims: Sequence[Rank]) -> None:
        """Lift the limit."""
        self._limit(victims, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(victims: Sequence[Rank], soft: int) -> bool:
        done = bool(victims)
        for rank in victims:
            try:
                _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (soft, hard))
            except (OSError, ValueError):
                done = False
        return done
