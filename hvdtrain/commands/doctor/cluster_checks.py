"""Checks of ``doctor --cluster``, over the facts of all hosts, and the rows that it adds to the table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.commands.doctor.checks import by_value
from hvdtrain.commands.doctor.facts import NOTE, SLOWS, STOPS, Facts, Problem, known, merge
from hvdtrain.core.errors import count
from hvdtrain.core.units import format_bytes

OPEN_FILES = 4096
"""Below it, MPI over TCP with hundreds of ranks, or data workers with many shards, run out of files."""

PROCESSES = 4096
"""Below it, ranks with a thread per core and data workers run out of threads."""

RESERVED = 0.1
"""Share of memory in the pool of huge pages from which the pool is worth a note."""

CLOCK_ERROR_S = 0.1

Found = Iterator[Problem]


def diagnose(hosts: Sequence[Facts]) -> list[Problem]:
    """Return the problems of these hosts, worst first; none for hosts without these facts."""
    found: list[Problem] = []
    for host in hosts:
        if known(host.get("cluster")):
            for check in (pmi, ntp, huge_pages, limits, firewalls):
                found += check(host, host["cluster"])
    found += gpus(hosts)
    return merge(found)


def pmi(host: Facts, facts: dict[str, Any]) -> Found:
    """Check that srun offers a PMI type of the MPI at hand."""
    offered, wanted = facts["srun"], facts["pmi"]
    if not known(offered) or not known(wanted):
        return
    if not any(name == want or name.startswith(f"{want}_") for name in offered for want in wanted):
        yield Problem(STOPS, (host["host"],), f"srun has the PMI types {', '.join(offered) or 'none'}, and the MPI "
                      f"here needs {' or '.join(wanted)}: under srun each rank would be a job of its own",
                      "start with mpirun inside the allocation (launch --launcher openmpi4, openmpi5 or mpich), or "
                      f"have Slurm built with {wanted[0]}")


def ntp(host: Facts, facts: dict[str, Any]) -> Found:
    """Check that a program disciplines the clock."""
    found = facts["ntp"]
    if known(found) and not found["synchronized"]:
        yield Problem(NOTE, (host["host"],), "no NTP program disciplines the clock: times of logs drift apart between "
                      "hosts", "run systemctl enable --now chronyd, then chronyc makestep")
    elif known(found) and found["error_s"] > CLOCK_ERROR_S:
        yield Problem(NOTE, (host["host"],), f"NTP bounds the error of the clock by {found['error_s']:.2f} s",
                      "run chronyc sources -v, and choose a server that is nearer")


def huge_pages(host: Facts, facts: dict[str, Any]) -> Found:
    """Check that huge pages neither lack nor take memory away."""
    found = facts["huge_pages"]
    if not known(found):
        return
    if found["free_bytes"] > RESERVED * found["total_bytes"]:
        yield Problem(SLOWS, (host["host"],), f"{format_bytes(found['free_bytes'])} of memory are reserved as huge "
                      "pages and unused: no rank can use them",
                      "run sysctl -w vm.nr_hugepages=0, or reboot without them")
    if found["transparent"] == "never":
        yield Problem(NOTE, (host["host"],), "transparent huge pages are switched off: large buffers cost more page "
                      "faults", "run echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")


def limits(host: Facts, facts: dict[str, Any]) -> Found:
    """Check the limits of a user's processes."""
    found = facts["limits"]
    if not known(found):
        return
    files, processes, locked = (found[name] for name in ("open files", "processes", "locked memory"))
    where = "in /etc/security/limits.conf; under Slurm in the unit of slurmd (systemctl edit slurmd)"
    if facts["infiniband"] and known(facts["infiniband"]) and locked is not None:
        yield Problem(STOPS, (host["host"],), f"locked memory is limited to {format_bytes(locked)} with InfiniBand "
                      f"({', '.join(facts['infiniband'])}): its buffers cannot be registered",
                      f"set memlock unlimited {where}: LimitMEMLOCK=infinity")
    if files is not None and files < OPEN_FILES:
        yield Problem(NOTE, (host["host"],), f"a process may open {count(files, 'file')}: many ranks over TCP or many "
                      "shards need more", f"run ulimit -n 65536 before the launch, or set nofile {where}: "
                      "LimitNOFILE=65536")
    if processes is not None and processes < PROCESSES:
        yield Problem(SLOWS, (host["host"],), f"a user may run {processes} threads and processes: ranks and data "
                      "workers fail to start",
                      f"run ulimit -u 65536 before the launch, or set nproc {where}: LimitNPROC=65536")


def firewalls(host: Facts, facts: dict[str, Any]) -> Found:
    """Check that this host opens connections to all others."""
    for row in facts["ports"] if known(facts["ports"]) else []:
        yield Problem(STOPS, (host["host"], row["host"]), f"{host['host']} cannot connect to a free port of "
                      f"{row['host']} ({row['address']}): {row['why'].lower()}; MPI connects to such ports",
                      f"on {row['host']} allow the hosts of the job: sudo firewall-cmd --zone=trusted --add-source="
                      "NETWORK --permanent && sudo firewall-cmd --reload, or sudo ufw allow from NETWORK")


def gpus(hosts: Sequence[Facts]) -> Found:
    """Check that all hosts have as many GPUs, and one driver."""
    seen = {h["host"]: h["gpu"] for h in hosts if known(h["gpu"]) and "devices" in h["gpu"]}
    numbers: dict[str, object] = {h["host"]: len(seen[h["host"]]["devices"]) if h["host"] in seen else 0
                                  for h in hosts if h["host"] in seen or h["gpu"] is None}
    if len(set(numbers.values())) > 1:
        yield Problem(NOTE, tuple(numbers), f"the number of GPUs differs: {by_value(numbers)}",
                      "give each host its own slots: -H HOST:GPUS, one rank for each GPU")
    drivers: dict[str, object] = {name: found["driver"] for name, found in seen.items()}
    if len(set(drivers.values())) > 1:
        yield Problem(SLOWS, tuple(drivers), f"the GPU driver differs: {by_value(drivers)}",
                      "install the same driver on all hosts; NCCL is tested with one driver in a job")


def row(facts: dict[str, Any], name: str) -> str:
    """Return a fact as the table shows it; "" where there is nothing to show."""
    value = facts[name]
    if isinstance(value, str) or not value:
        return str(value or "")
    if name == "ntp":
        return (f"synchronized, error at most {1e3 * value['error_s']:.0f} ms" if value["synchronized"]
                else "not synchronized")
    if name == "huge_pages":
        return f"transparent {value['transparent'] or 'unknown'}, {format_bytes(value['reserved_bytes'])} reserved"
    if name == "limits":
        return ", ".join(f"{key} {'unlimited' if limit is None else limit}" for key, limit in value.items())
    if name == "ports":
        return ", ".join(f"{one['host']} ({one['address']}): {one['why']}" for one in value)
    return ", ".join(value)


ROWS = (("srun types", "srun"), ("MPI needs", "pmi"), ("NTP", "ntp"), ("huge pages", "huge_pages"),
        ("user limits", "limits"), ("InfiniBand", "infiniband"), ("blocked", "ports"))
"""(title, fact)."""
