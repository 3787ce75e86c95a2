"""What the system tells about processes of this host: their state, processor time, parents and environment.

Reads /proc, changes nothing. Standard library only: the small process beside the ranks imports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")

LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "orted", "prterun", "prte", "prted",
                       "hydra_pmi_proxy", "hydra_bstrap_pro", "srun", "slurmstepd", "horovodrun"})
"""Programs, by the 15 letters that the system keeps of a name, above which a rank's ancestors are not its job's."""
DEPTH = 8
"""How far up a launcher is looked for."""


@dataclass(frozen=True)
class Stat:
    """A process: its name, the letter of its state, its parent, the seconds it computed, and when it began (ticks)."""

    name: str
    state: str
    parent: int
    cpu_s: float
    began: int


def stat(pid: int) -> Stat | None:
    """Return what is known of a process; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    begin, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 1:].split()
    if len(fields) < 20:
        return None
    return Stat(text[begin + 1:end].decode(errors="replace"), fields[0].decode(), int(fields[1]),
                (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]))


def launchers(pid: int) -> list[int]:
    """Return the ancestors of a rank up to its launcher, which none of them outlives; without one, its parent.

    [] where the rank's parent is the first process already, so that its end cannot be seen.
    """
    chain: list[int] = []
    at = stat(pid)
    while at is not None and at.parent > 1 and len(chain) < DEPTH:
        chain.append(at.parent)
        at = stat(at.parent)
        if at is not None and at.name in LAUNCHERS:
            return chain
    return chain[:1]


def kin(marks: dict[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (process, environment) of this user's processes whose environment holds ``marks``."""
    own = os.geteuid()
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != own:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = set(file.read().split(b"\0"))
            if wanted and wanted <= entries:
                pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
                yield int(name), {key: value for key, _, value in pairs}


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for signal ``number``, which else would end it."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next(line for line in file if line.startswith(b"SigCgt:"))
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def segments(pid: int) -> set[str]:
    """Return the shared-memory files of Open MPI that a process maps; one that is killed may leave them behind."""
    found = set()
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                path = line.rstrip("\n").partition("/dev/shm/")[2]
                if "segment" in path and not path.endswith("(deleted)"):
                    found.add(f"/dev/shm/{path}")
    return found
