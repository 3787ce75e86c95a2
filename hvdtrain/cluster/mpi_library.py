"""Which MPI library this process runs, in words; imports none."""

from __future__ import annotations

import sys


def running() -> str | None:
    """Return the name and version of the MPI library that this process has started; None without MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return None if mpi is None else first_line(mpi.Get_library_version())


def first_line(library: str) -> str:
    """Return what a library's own version text begins with, up to Open MPI's list of builders; "unknown": nothing."""
    lines = library.replace("\0", "").strip().splitlines()  # C leaves zeros
    return lines[0].split(", package")[0].strip().replace("Open MPI v", "Open MPI ") if lines else "unknown"
