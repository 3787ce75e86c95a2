"""A small file system for the runs, which can be filled without harm to anybody; where that is not possible, why.

It is mounted in a mount namespace of this process' own, so nobody else sees it and it goes with the process; what is to
stay is copied out at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.inject import Disk, FilledDisk, LimitedFiles

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare(2)


@contextlib.contextmanager
def disk(runs: Path, wanted: bool, n_bytes: int) -> Iterator[Disk]:
    """Make ``runs`` a file system of ``n_bytes`` where that is ``wanted`` and possible; else files are to be limited.

    What lies in it when the body ends is copied to where ``runs`` was before.
    """
    if not wanted or not _mounted(runs, n_bytes):
        yield LimitedFiles()
        return
    try:
        yield FilledDisk(runs)
    finally:
        kept = runs.with_name(f"{runs.name}.kept")
        shutil.copytree(runs, kept, dirs_exist_ok=True)
        _run("umount", "--lazy", str(runs))
        shutil.copytree(kept, runs, dirs_exist_ok=True)
        shutil.rmtree(kept)


def _mounted(runs: Path, n_bytes: int) -> bool:
    """Return whether a tmpfs is there now; for root alone, where namespaces are allowed."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        return False
    return _run("mount", "--make-rprivate", "/") and _run(
        "mount", "-t", "tmpfs", "-o", f"size={n_bytes},mode=0700", "hvdtrain-chaos", str(runs))


def _run(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
