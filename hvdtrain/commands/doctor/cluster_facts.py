"""Facts that matter between hosts of a cluster: PMI types of srun, clock discipline, huge pages, limits, open ports.

Owns the looking for ``doctor --cluster``; `hvdtrain.commands.doctor.cluster_checks` judges.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import selectors
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cluster.machine.software import answer_of, find_mpirun
from hvdtrain.commands.doctor.facts import attempt

STA_UNSYNC = 0x40
"""Status bit of adjtimex(2): no program disciplines the clock."""

CONNECT_S = 3.0
"""Longest wait for connections to all other hosts; a firewall that drops packets never answers."""

LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC,
          "locked memory": resource.RLIMIT_MEMLOCK}


def find(env: Mapping[str, str], root: str = "/") -> dict[str, Any]:
    """Return the facts of this host: srun, pmi, ntp, huge_pages, limits, infiniband; "unknown: ..." for a failure."""
    return {"srun": attempt(lambda: srun_types(env)), "pmi": attempt(mpi_types), "ntp": attempt(clock_discipline),
            "huge_pages": attempt(lambda: huge_pages(root)), "limits": attempt(user_limits),
            "infiniband": attempt(lambda: sorted(os.listdir(f"{root}/sys/class/infiniband"))
                                  if os.path.isdir(f"{root}/sys/class/infiniband") else []),
            "ports": None}


def srun_types(env: Mapping[str, str]) -> list[str] | None:
    """Return the types that ``srun --mpi=list`` names; None without srun. Errors: OSError for one without an answer."""
    path = shutil.which("srun", path=env.get("PATH"))
    if path is None:
        return None
    text, why = answer_of([path, "--mpi=list"])
    if not text:
        raise OSError(f"srun --mpi=list {why}")
    return sorted(set(re.findall(r"\b(none|openmpi|pmi2|pmix(?:_v\d+)?|cray_shasta)\b", text)))


def mpi_types() -> list[str] | None:
    """Return the types by which the MPI of mpirun can start under srun; None where that is not known."""
    path = find_mpirun()
    if path is None:
        return None
    text = answer_of([path, "--version"])[0]
    if "Open MPI" not in text and "OpenRTE" not in text:
        return ["pmi2"] if re.search("HYDRA|Intel|MPICH", text) else None
    built = answer_of([str(Path(path).with_name("ompi_info")), "--parsable", "--all"])[0]
    return ["pmix", "pmi2"] if "mca:pmix:s2:" in built else ["pmix"]


class _Timex(ctypes.Structure):
    """struct timex of Linux; the rest of its 208 bytes is not read."""

    _fields_ = [("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
                ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
                ("rest", ctypes.c_char * 256)]


def clock_discipline() -> dict[str, Any]:
    """Return {"synchronized", "error_s"}: whether a program such as chrony disciplines the clock, and its error bound.

    From the kernel, which every such program tells. Errors: OSError.
    """
    found = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return {"synchronized": not found.status & STA_UNSYNC, "error_s": found.maxerror / 1e6}


def huge_pages(root: str = "/") -> dict[str, Any]:
    """Return {"transparent", "reserved_bytes", "free_bytes", "total_bytes"}: of the pool, and of all memory."""
    rows = dict(re.findall(r"^(\w+):\s+(\d+)", Path(root, "proc/meminfo").read_text(), re.M))
    each = int(rows.get("Hugepagesize", 0)) << 10
    at = Path(root, "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", at.read_text()) if at.exists() else None
    return {"transparent": chosen[1] if chosen else "", "reserved_bytes": each * int(rows.get("HugePages_Total", 0)),
            "free_bytes": each * int(rows.get("HugePages_Free", 0)), "total_bytes": int(rows["MemTotal"]) << 10}


def user_limits() -> dict[str, int | None]:
    """Return the soft limits of this process by name; None for no limit."""
    soft = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


class OpenPort:
    """A TCP port of this host on all its addresses, until `close`. The kernel accepts; nothing is read or sent."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=4096)  # noqa: S104 - other hosts must reach it
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def connect(targets: Iterable[tuple[str, str, int]], within_s: float = CONNECT_S) -> list[dict[str, str]]:
    """Try to connect to all (host, address, port) at once; return {"host", "address", "why"} of those that failed."""
    failed: list[dict[str, str]] = []
    with selectors.DefaultSelector() as waiting:
        for host, address, port in targets:
            trial = socket.socket()
            trial.setblocking(False)
            code = trial.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                waiting.register(trial, selectors.EVENT_WRITE, (host, address))
                continue
            trial.close()
            if code:
                failed.append({"host": host, "address": address, "why": os.strerror(code)})
        ends_at = time.monotonic() + within_s
        while waiting.get_map() and (left := ends_at - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if code:
                    failed.append({"host": key.data[0], "address": key.data[1], "why": os.strerror(code)})
                _close(waiting, key)
        for key in list(waiting.get_map().values()):
            failed.append({"host": key.data[0], "address": key.data[1], "why": f"no answer within {within_s:g} s"})
            _close(waiting, key)
    return failed


def targets(own: Sequence[str],
            offers: Iterable[tuple[str, int, Sequence[tuple[str, str]]]]) -> list[tuple[str, str, int]]:
    """Return (host, address, port) in this host's networks ``own``, of ``offers`` (host, port, pairs). Pure."""
    return [(name, address, port) for name, port, pairs in offers for address, network in pairs if network in own]


def _close(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    waiting.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]
