"""The table of facts, the links between hosts and the list of problems, as text.

Owns what is shown and how: a fact that is alike on all hosts is told once. `rows` and `findings` are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.commands.doctor import link_checks, network_checks
from hvdtrain.commands.doctor.facts import FRAMEWORKS, Facts, known
from hvdtrain.commands.doctor.mpi_checks import short
from hvdtrain.commands.doctor.problem import NOTE, SLOWS, STOPS, Problem
from hvdtrain.core.errors import count
from hvdtrain.core.table import facts
from hvdtrain.core.units import format_bytes

WORDS = {STOPS: "would stop a run", SLOWS: "would slow it", NOTE: "to know"}
"""What a severity means, as it is printed."""


def rows(hosts: Sequence[Facts]) -> list[tuple[str, str]]:
    """(fact, value) in order; a value that differs between hosts has a line for each group of them."""
    found = [("hosts", ", ".join(f"{h['host']} ({count(h['slots'], 'rank')})" for h in hosts))]
    for title, key, absent, show in _SHOWN:
        groups: dict[str, list[str]] = {}
        for host in hosts:
            value = show(host, host[key]) if known(host[key]) else str(host[key] or absent)
            groups.setdefault(value, []).append(host["host"])
        if len(groups) > 1:
            value = "\n".join(f"{', '.join(who)}: {value or 'none'}" for value, who in groups.items())
        if value:
            found.append((title, value))
    return found


def findings(problems: Sequence[Problem], hosts: Sequence[Facts]) -> list[str]:
    """Lines for the problems, worst first, each with its remedy below it; unfolded, so that commands can be copied."""
    lines: list[str] = []
    for p in problems:
        where = "" if len(hosts) < 2 else "all hosts: " if len(p.hosts) >= len(hosts) else f"{', '.join(p.hosts)}: "
        lines += [f"{p.severity}: {where}{p.got}.", f"    {p.do[:1].upper()}{p.do[1:]}."]
    counts = [f"{sum(p.severity == s for p in problems)} {WORDS[s]}" for s in (STOPS, SLOWS, NOTE)
              if any(p.severity == s for p in problems)]
    return [*lines, "hvdtrain doctor: " + (", ".join(counts) or "nothing found that would stop or slow a run")]


def text(hosts: Sequence[Facts], problems: Sequence[Problem], plain: bool) -> str:
    """All of it; ``plain``: without a terminal, 64 columns, which leaves room for a launcher's tag before each line.

    Where rich does not load, which the doctor may be asked about, the facts are lines without a box.
    """
    try:
        shown = facts("hvdtrain doctor", rows(hosts), plain)
    except ImportError:
        shown = "\n".join(f"{name}: {line}" for name, value in rows(hosts) for line in value.splitlines())
    return "\n".join([shown, *link_checks.text(hosts), *findings(problems, hosts)])


def _framework(host: Facts, found: Any) -> str:
    parts = [found.get("version", ""), f"CUDA {found['cuda']}" if found.get("cuda") else "",
             f"ROCm {found['hip']}" if found.get("hip") else "",
             f"NCCL {found['nccl']}" if found.get("nccl") else "",
             f"for {' '.join(found['arch'])}" if found.get("arch") else "",
             f"sees {count(len(found['devices']), 'GPU')}" if found.get("devices") else "",
             f"{found['at']}: {found['error']}" if "error" in found else ""]
    return ", ".join(filter(None, parts))


def _horovod(host: Facts, found: Any) -> str:
    parts = []
    for name in FRAMEWORKS:
        if known(host[name]) and "horovod_built" in host[name]:
            wants = host["horovod_mpi"].get(name) or []
            linked = f" ({', '.join(wants)})" if isinstance(wants, list) and wants else ""
            parts.append(f"{name} with {' '.join(host[name]['horovod_built']) or 'nothing'}{linked}")
    return f"{found}: {'; '.join(parts) or 'no framework'}"


def _mpi(host: Facts, found: Any) -> str:
    if "library" not in found:
        return f"{found['at']}: {found['error']}"
    return f"{short(found['library'])} ({', '.join(found['libmpi'])}), mpi4py {found['version']}"


def _mpirun(host: Facts, found: Any) -> str:
    return f"{found['path']}, " + (found["error"] if "error" in found else f"{found['flavour']} {found['version']}")


def _mpi_moves(host: Facts, found: Any) -> str:
    ucx = "UCX where it finds a fast network" if found["ucx"] else "its own transports, not UCX"
    gpus = "could read GPU memory itself; hvdtrain goes over pinned host memory" if found["cuda"] else (
        "cannot read GPU memory itself")
    return f"{ucx}; {gpus}"


def _launcher(host: Facts, found: Any) -> str:
    sees = f", MPI sees {found['world']}" if found["kind"] == "mpi" and found["world"] is not None else ""
    return f"{found['name']}, {count(found['size'], 'process', 'processes')}{sees}"


def _gpu(host: Facts, found: Any) -> str:
    if "devices" not in found:
        return f"{found['at']}: {found['error']}"
    kinds: dict[str, int] = {}
    for d in found["devices"]:
        kind = f"{d['name']} (sm_{d['capability']}, {format_bytes(d['memory_bytes'])})"
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = "" if host["visible"] is None else f", CUDA_VISIBLE_DEVICES={host['visible']}"
    each = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "no device"
    return f"{each}, driver {found['driver']} (CUDA {found['cuda']}){shown}"


def _interfaces(host: Facts, found: Any) -> str:
    return ", ".join(f"{row['name']} {row['address']}/{row['network'].partition('/')[2]}"
                     + (f" {row['mbit_s']} Mbit/s" if row["mbit_s"] else "") + ("" if row["up"] else " (down)")
                     for row in found if row["name"] != "lo") or "loopback only"


def _used(host: Facts, found: Any) -> str:
    return ", ".join(f"{row['name']} ({row['network']})" for row in network_checks.usable(host)) or "none of them"


def _container(host: Facts, found: Any) -> str:
    return f"{found['kind']}, by {found['by']}" + (", user ids are mapped" if found["namespaced"] else "")


def _limits(host: Facts, found: Any) -> str:
    cores, memory = found["cores"], found["memory_bytes"]
    return ", ".join([count(cores, "core") if cores else "no quota of cores",
                      format_bytes(memory) if memory else "no limit of memory"])


def _peers(host: Facts, found: Any) -> str:
    tried = {"CMA": found["cma"], "files in memory": found["files"]}
    off = ", CMA is switched off" if found["single_copy_off"] else ""
    scope = "" if found["ptrace_scope"] is None else f", ptrace_scope {found['ptrace_scope']}"
    return f"{', '.join(f'{name} {word}' for name, word in tried.items())} (between {found['between']}){scope}{off}"


def _clock(host: Facts, found: Any) -> str:
    if 0 in host["ranks"]:
        return "the others' are compared with it"
    return f"{1e3 * found['offset_s']:+.2f} ms from rank 0's, give or take {1e3 * found['within_s']:.2f} ms"


_SHOWN: tuple[tuple[str, str, str, Callable[[Facts, Any], str]], ...] = (
    ("python", "python", "", lambda host, found: f"{found}, {host['executable']}"),
    ("system", "system", "", lambda host, found: str(found)),
    ("hvdtrain", "hvdtrain", "", lambda host, found: str(found)),
    ("torch", "torch", "", _framework),
    ("tensorflow", "tensorflow", "", _framework),
    ("Horovod", "horovod", "not installed", _horovod),
    ("MPI library", "mpi", "mpi4py is not installed", _mpi),
    ("mpirun", "mpirun", "none", _mpirun),
    ("MPI moves by", "mpi_moves", "unknown: it does not tell", _mpi_moves),
    ("started by", "launcher", "", _launcher),
    ("GPUs", "gpu", "none", _gpu),
    ("own name is", "addresses", "", lambda host, found: ", ".join(found)),
    ("interfaces", "interfaces", "", _interfaces),
    ("between hosts", "interfaces", "", _used),
    ("container", "container", "none", _container),
    ("limits", "limits", "", _limits),
    ("neighbours", "peers", "", _peers),
    ("cores", "cores", "", lambda host, found: f"{found:g}"),
    ("memory", "memory_bytes", "", lambda host, found: format_bytes(found)),
    ("/dev/shm", "shm_bytes", "",
     lambda host, found: f"{format_bytes(found)} free" + (f" of {format_bytes(host['shm_total'])}" if known(
         host["shm_total"]) else "")),
    ("clock", "clock", "", _clock))
"""(title, fact, what is shown where it is None, how it is shown where it is known); an unknown one shows why."""
