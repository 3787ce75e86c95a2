"""Slower processors for chosen ranks, for benches and tests: cpu control groups of our own, each with a quota.

Owns the groups: where they can be made (Linux cgroups, version 1 or 2), their quotas, and that none is left. Starts no
process: one enters by `enter` or is put in, and what it starts later goes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import UserError

PREFIX = "hvdtrain-throttle-"
"""What the name of every group begins with."""

PERIOD_US = 10_000
"""Time a quota is for. Short, so that a group is not run at full speed and then not at all within one step."""

LEAST_QUOTA_US = 1_000
"""The kernel takes no smaller one; a rank so slow gets a longer period."""

LONGEST_PERIOD_US = 1_000_000
REMOVE_S = 2.0


@dataclass(frozen=True)
class Home:
    """Place for new control groups. ``parent``: the folder of the new groups; ``own``: of the group we are in."""

    version: int
    parent: Path
    own: Path


class Throttle:
    """A context in which there is one group for each of ``speeds``; afterwards, whatever happens, there is none.

    ``speeds``: above 0; s gives the group ``s * threads`` cores' worth of time, 1 and more no limit. ``paths``: the
    groups' folders, by place. Errors: `UserError` where groups cannot be made.
    """

    def __init__(self, speeds: Sequence[float], threads: int = 1, home: Home | None = None) -> None:
        self.speeds, self.threads = list(speeds), threads
        self.paths: list[Path] = []
        self._home = home
        self._locks: list[int] = []

    def __enter__(self) -> Throttle:
        self._home = self._home or _home()
        try:
            sweep(self._home)
            for at, speed in enumerate(self.speeds):
                self._make(at)
                self.set(at, speed)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _refused(f"{error.filename or self._home.parent}: {error.strerror}") from None
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def set(self, at: int, speed: float) -> None:
        """Give the group at ``at`` another speed, at once."""
        assert self._home is not None and speed > 0
        self.speeds[at] = speed
        _write(self.paths[at], self._home.version, quota(speed, self.threads))

    def put(self, at: int, pids: Iterable[int]) -> None:
        """Move processes with their threads and the children they have into a group."""
        import psutil

        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(pid).children(recursive=True)
                for one in (pid, *(child.pid for child in family)):
                    with contextlib.suppress(ProcessLookupError):
                        (self.paths[at] / "cgroup.procs").write_text(str(one))

    def close(self) -> None:
        """Move everybody back to where we are, and remove the groups; may be called more than once."""
        left = [path for path in self.paths if not _removed(path, self._home.own if self._home else path.parent)]
        for descriptor in self._locks:
            os.close(descriptor)
        self.paths, self._locks = [], []
        for path in left:
            warnings.warn(f"the control group {path} could not be removed", stacklevel=2)

    def _make(self, at: int) -> None:
        """Return a group with a lock on its folder, by which `sweep` sees that its owner lives."""
        assert self._home is not None
        path = self._home.parent / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}-{at}"
        path.mkdir()
        self.paths.append(path)
        import fcntl  # not on every system; what has control groups has it

        self._locks.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        fcntl.flock(self._locks[-1], fcntl.LOCK_SH)


def available() -> str:
    """Why processors cannot be throttled here, "" where they can: found by doing it."""
    try:
        with Throttle([0.5]):
            return ""
    except UserError as error:
        return error.got


def enter(path: str | os.PathLike[str]) -> None:
    """Move this process, with its threads, into a group; `UserError` where there is none on this host."""
    try:
        descriptor = os.open(Path(path, "cgroup.procs"), os.O_WRONLY)  # and never made: a plain folder is no group
        try:
            os.write(descriptor, b"0")  # 0: who writes, whatever its number is in the namespace
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"the control group {path} cannot be entered: {error.strerror}",
                        "a group on the host of the rank", "throttle ranks of this machine only") from None


def quota(speed: float, threads: int) -> tuple[int, int] | None:
    """(microseconds of processor time, in a period of microseconds) for a speed; None: no limit. Pure."""
    if speed >= 1:
        return None
    cores = speed * threads
    period_us = PERIOD_US
    while round(cores * period_us) < LEAST_QUOTA_US and period_us < LONGEST_PERIOD_US:
        period_us *= 10
    return max(LEAST_QUOTA_US, round(cores * period_us)), period_us


def locate(mountinfo: str, cgroup: str) -> tuple[int, Path] | None:
    """(version, folder of this process' group) of the cpu controller; None where there is none. Pure.

    From the texts of /proc/self/mountinfo and /proc/self/cgroup. Version 1 goes first: where it has the controller,
    version 2 has not.
    """
    own = (line.split(":", 2) for line in cgroup.splitlines() if line.count(":") > 1)
    paths = {name: path for _, names, path in own for name in names.split(",")}
    found = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, point = _unescaped(fields[3]), Path(_unescaped(fields[4]))
        if kind[0] == "cgroup" and "cpu" in kind[2].split(",") and "cpu" in paths:
            found[1] = _under(point, root, paths["cpu"])
        elif kind[0] == "cgroup2" and "" in paths:
            found[2] = _under(point, root, paths[""])
    return next(((version, found[version]) for version in (1, 2) if version in found), None)


def sweep(home: Home) -> list[Path]:
    """Remove the groups of those that were killed before they could: empty ones that nobody holds a lock on."""
    import fcntl

    removed = []
    for path in home.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, or another sweeps it too
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rmdir()
                removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _home() -> Home:
    """Find the place for new control groups; `UserError` without one."""
    try:
        texts = [Path("/proc/self", name).read_text() for name in ("mountinfo", "cgroup")]
    except OSError:
        raise _refused("there is no /proc/self/cgroup") from None
    found = locate(*texts)
    if found is None:
        raise _refused("there is no cpu control group")
    version, own = found
    if version == 1:
        return Home(1, own, own)
    for parent in (own, own.parent):  # children have the controller only where it was handed down to them
        with contextlib.suppress(OSError):
            if "cpu" in (parent / "cgroup.subtree_control").read_text().split():
                return Home(2, parent, own)
    raise _refused(f"the cpu controller is not handed down in {own}")


def _refused(reason: str) -> UserError:
    return UserError(reason, "cpu control groups that this user may make (root)", "run as root, or emulate the speeds")


def _write(path: Path, version: int, limit: tuple[int, int] | None) -> None:
    """Set a group's limit. In version 1 it goes through no limit, since it takes no odd pair between two writes."""
    if version == 2:
        most, period_us = limit or ("max", PERIOD_US)
        (path / "cpu.max").write_text(f"{most} {period_us}")
        return
    (path / "cpu.cfs_quota_us").write_text("-1")
    if limit:
        (path / "cpu.cfs_period_us").write_text(str(limit[1]))
        (path / "cpu.cfs_quota_us").write_text(str(limit[0]))


def _removed(path: Path, back: Path) -> bool:
    """Return whether a group is gone, its processes moved to ``back``; one that is forking is tried again."""
    ends_at = time.monotonic() + REMOVE_S
    while True:
        for pid in _members(path):
            with contextlib.suppress(OSError):
                (back / "cgroup.procs").write_text(pid)
        try:
            path.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > ends_at:
                return False
            time.sleep(0.02)


def _members(path: Path) -> list[str]:
    try:
        return (path / "cgroup.procs").read_text().split()
    except OSError:
        return []


def _under(point: Path, root: str, path: str) -> Path:
    """Return the folder of group ``path`` below ``root``, which is mounted at ``point``; else the mount itself."""
    inner = path.lstrip("/") if root == "/" else path[len(root):].lstrip("/") if path.startswith(root) else ""
    return point if inner.startswith("..") else point / inner


def _unescaped(field: str) -> str:
    """Return a path as the kernel lists it, with its octal escapes undone."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field)
