"""The facts of one host, as one process finds them: plain data that JSON can carry.

Owns the looking and the names of the facts; judges nothing (``checks`` does). Never raises: a fact that cannot be had
is the text "unknown: " and why. Frameworks, MPI and the GPU driver are asked in processes of their own (``probes``).

A host's facts, by key:
    host, boot        its name; an id that is new at each start of its kernel
    addresses         what its own name resolves to, as texts
    python, system, hvdtrain, executable, mpi4py, horovod    versions and a path; None where not installed
    torch, tensorflow None where not installed, else the answers of `probes`: version, cuda, arch, nccl, devices,
                      horovod_built; error and at where something failed, and then distribution, pip's name of it
    horovod_mpi       by framework, the file names of the MPI libraries that its part of Horovod wants
    mpirun            flavour, version and path of the launcher found here, error where it tells none; None without one
    mpi               library, libmpi: what mpi4py uses
    mpi_moves         ucx, cuda: what the Open MPI found here was built with; None where it is another, or does not tell
    gpu               driver, cuda, devices (name, capability, memory_bytes); None without a GPU
    visible           CUDA_VISIBLE_DEVICES, None where it is not set
    interfaces        name, address, network, up, mbit_s of each address of version 4
    cores, memory_bytes, shm_bytes   what this process may use; memory available; free in /dev/shm
    shm_total         bytes of /dev/shm, used or not
    affinity, limits  cores that this process may run on; cores and memory_bytes that control groups allow
    container         kind, by (what tells of it), namespaced (in a user namespace of its own); None outside of one
    peers             whether processes here reach each other: cma, files ("ok", or why not), between ("processes" or
                      "ranks"), ptrace_scope, single_copy_off (by Open MPI's setting)
    root, root_allowed               runs as root; the two variables that allow it
    launcher          kind, name, size, series (of Open MPI, "" for others); and after MPI's start world, its own count
                      of processes
    ranks             the ranks on this host; slots: how many a run will have here
    clock             offset_s from rank 0's host, within_s; None for a host alone
    cluster           of `cluster_facts.find`, with ``doctor --cluster``; else None
    links             the pairs with later hosts, as `network_checks.link_row` has them; None for a host alone
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import mmap
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.cluster.devices import VISIBLE, count_gpus
from hvdtrain.cluster.horovod import horovod_libraries, horovod_reason
from hvdtrain.cluster.launchers.prepare import ROOT_VARIABLES
from hvdtrain.cluster.machine.memory import left_alive_bytes
from hvdtrain.cluster.machine.software import answer_of, find_framework, find_mpi, find_mpirun, version_of
from hvdtrain.cluster.machine.usage import cpu_quota, memory_limits
from hvdtrain.cluster.topology import affinity
from hvdtrain.commands.doctor import peers, probes
from hvdtrain.core import __version__
from hvdtrain.core.launcher import launch_facts

FRAMEWORKS = ("torch", "tensorflow")

SINGLE_COPY = "btl_vader_single_copy_mechanism"
"""Open MPI 4.1's setting of how it copies large messages within a host."""

UNKNOWN = "unknown: "

PROBE_S = 90.0
"""How long the packages may take to load; a cold file system over a network takes tens of seconds."""

Facts = dict[str, Any]


def known(value: Any) -> bool:
    """Return whether a fact is known and not None."""
    return value is not None and not (isinstance(value, str) and value.startswith(UNKNOWN))


def attempt(look: Callable[[], Any]) -> Any:
    """Return what ``look`` returns, or "unknown: " and the reason."""
    try:
        return look()
    except Exception as error:  # whatever goes wrong with one fact must not hide the others
        text = str(error).strip().splitlines()
        return f"{UNKNOWN}{type(error).__name__}: {text[0][:200]}" if text else UNKNOWN + type(error).__name__


def collect(env: Mapping[str, str], timeout_s: float = PROBE_S) -> Facts:
    """Return the facts of this host as a run would find them in ``env``; takes at most ``timeout_s`` and a little."""
    packages = attempt(lambda: probes.run_all(_programs(env), env, timeout_s))
    looked = packages if isinstance(packages, dict) else {}
    found: Facts = {name: attempt(look) for name, look in _looks(env).items()}
    for name in FRAMEWORKS:
        found[name] = looked.get(name, packages if isinstance(packages, str) and _installed(name) else None)
        if isinstance(found[name], dict) and "error" in found[name]:
            found[name] = distribution(name) | found[name]
    found["horovod_mpi"] = {name: attempt(partial(horovod_mpi, name)) for name in FRAMEWORKS
                            if known(found[name])}
    found["mpi"] = looked.get("mpi4py")
    found["gpu"] = looked.get("gpu")
    return found | {"ranks": [0], "slots": 1, "clock": None, "links": None, "cluster": None}


def _programs(env: Mapping[str, str]) -> dict[str, str]:
    texts = {name: probes.program(name, horovod_reason(name) is None) for name in FRAMEWORKS if _installed(name)}
    if _installed("mpi4py"):
        texts["mpi4py"] = probes.program("mpi4py")
    if count_gpus() or shutil.which("nvidia-smi", path=env.get("PATH")):
        texts["gpu"] = probes.program("gpu")
    return texts


def _looks(env: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    return {
        "host": socket.gethostname,
        "boot": boot_id,
        "addresses": lambda: sorted({str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None)}),
        "python": platform.python_version,
        "system": lambda: " ".join([platform.system(), platform.machine(), *platform.libc_ver()]),
        "hvdtrain": lambda: __version__,
        "executable": lambda: sys.executable,
        "mpi4py": lambda: version_of("mpi4py"),
        "horovod": lambda: version_of("horovod"),
        "mpirun": _mpirun,
        "mpi_moves": _mpi_moves,
        "visible": lambda: env.get(VISIBLE),
        "interfaces": interfaces,
        "cores": lambda: min(len(affinity()), cpu_quota(), limits()["cores"] or float("inf")),
        "affinity": lambda: len(affinity()),
        "limits": limits,
        "container": lambda: find_container(env),
        "peers": lambda: neighbours(env, "processes", peers.between_processes()),
        "memory_bytes": left_alive_bytes,
        "shm_bytes": lambda: shutil.disk_usage("/dev/shm").free,
        "shm_total": lambda: shutil.disk_usage("/dev/shm").total,
        "root": lambda: os.geteuid() == 0,
        "root_allowed": lambda: all(env.get(name) == "1" for name in ROOT_VARIABLES),
        "launcher": lambda: launcher(env),
    }


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def distribution(name: str) -> dict[str, str]:
    """Return version and distribution of a framework as pip has them; {} without any."""
    found = attempt(lambda: find_framework(name))
    return {} if isinstance(found, str) or found is None else {"version": found.version, "distribution": found.dist}


def _mpirun() -> dict[str, str] | None:
    path = find_mpirun()
    if path is None:
        return None
    text, why = answer_of([path, "--version"])
    found = find_mpi(text)
    if found is None:
        return {"flavour": "", "version": "", "path": path, "error": why or "reports no known MPI"}
    return {"flavour": found.flavour, "version": found.version, "path": found.mpirun}


def _mpi_moves() -> dict[str, bool] | None:
    """Return whether the Open MPI of mpirun was built with UCX, and with CUDA; None where that is not known."""
    path = find_mpirun()
    text = answer_of([str(Path(path).with_name("ompi_info")), "--parsable", "--all"])[0] if path else ""
    if "mca:pml:" not in text:
        return None
    return {"ucx": "mca:pml:ucx:" in text, "cuda": "mpi_built_with_cuda_support:value:true" in text}


def launcher(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the launcher of this process from its environment; None without one."""
    facts = launch_facts(env)
    if facts.kind == "solo":
        return None
    return {"kind": facts.kind, "name": facts.launcher, "size": facts.size, "world": None,
            "series": launcher_series(env)}


def launcher_series(env: Mapping[str, str]) -> str:
    """Return the version of the Open MPI whose mpirun set ``env``: "5.0.11", "4" (from its variables), or ""."""
    version = re.match(r"\d+(\.\d+)*", env.get("OMPI_VERSION", ""))
    if version:
        return version[0]
    return "4" if any(name.startswith("OMPI_MCA_orte_") for name in env) else ""


def neighbours(env: Mapping[str, str], between: str, found: Mapping[str, str]) -> dict[str, Any]:
    """Return the fact ``peers`` from a trial between processes or ranks."""
    off = env.get(f"OMPI_MCA_{SINGLE_COPY}", "") == "none" or "cma" in env.get("OMPI_MCA_smsc", "").lstrip("^").split(
        ",") and env.get("OMPI_MCA_smsc", "").startswith("^")
    return {**found, "between": between, "ptrace_scope": ptrace_scope(), "single_copy_off": off}


def boot_id() -> str:
    """Return an id of this start of the kernel: two hosts of one name differ in it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def horovod_mpi(framework: str) -> list[str]:
    """Return the file names of the MPI libraries that Horovod's library for ``framework`` needs; [] without one."""
    return sorted({name for file in horovod_libraries(framework) or () for name in wanted_mpi(file)})


def wanted_mpi(path: Path) -> list[str]:
    """Return the MPI libraries named in a shared object, such as libmpi.so.40; the strings of its dynamic section."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sorted({m.decode() for m in re.findall(rb"\0(libmpi(?:_abi|cxx)?\.so\.\d+)(?=\0)", data)})


def interfaces() -> list[dict[str, Any]]:
    """Return the version 4 addresses of this host with their networks."""
    import psutil

    states, found = psutil.net_if_stats(), []
    for name, rows in sorted(psutil.net_if_addrs().items()):
        for row in rows:
            if row.family == socket.AF_INET:
                network = ipaddress.ip_network(f"{row.address}/{row.netmask or '255.255.255.255'}", strict=False)
                state = states.get(name)
                found.append({"name": name, "address": row.address, "network": str(network),
                              "up": bool(state and state.isup), "mbit_s": state.speed if state else 0})
    return found


STOPS = "stops"
"""A run would not start, or would end or hang."""
SLOWS = "slows"
"""A run would work, slower or otherwise less well than it could."""
NOTE = "note"
"""Nothing is wrong; there is a setting for it."""

SEVERITIES = (STOPS, SLOWS, NOTE)


@dataclass(frozen=True)
class Problem:
    """``got`` is a clause, ``do`` begins with a verb and holds the command; no full stops. ``hosts``: in order."""

    severity: str
    hosts: tuple[str, ...]
    got: str
    do: str


def merge(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems, worst first, each once with all its hosts."""
    hosts: dict[tuple[str, str, str], dict[str, None]] = {}
    for p in problems:
        hosts.setdefault((p.severity, p.got, p.do), {}).update(dict.fromkeys(p.hosts))
    found = [Problem(severity, tuple(names), got, do) for (severity, got, do), names in hosts.items()]
    return sorted(found, key=lambda p: SEVERITIES.index(p.severity))


def stops(problems: Iterable[Problem]) -> bool:
    """Return whether any of them would stop a run."""
    return any(p.severity == STOPS for p in problems)


UNLIMITED = 1 << 60
"""Version 1 tells no limit as a number near 2 ** 63."""

NAMED = (("APPTAINER_CONTAINER", "Apptainer"), ("SINGULARITY_CONTAINER", "Singularity"),
         ("KUBERNETES_SERVICE_HOST", "Kubernetes"), ("ENROOT_ROOTFS", "enroot"))
FILES = (("run/.containerenv", "Podman"), (".dockerenv", "Docker"))
GROUPS = (("kubepods", "Kubernetes"), ("docker", "Docker"), ("libpod", "Podman"), ("lxc", "LXC"),
          ("containerd", "containerd"))


def find_container(env: Mapping[str, str], root: str = "/") -> dict[str, Any] | None:
    """Return {"kind", "by", "namespaced"} of the container around this process; None outside of one.

    ``namespaced``: in a user namespace of its own, as rootless engines and Apptainer make one.
    """
    found = next(((kind, name) for name, kind in NAMED if env.get(name)), None)
    found = found or next(((kind, f"/{name}") for name, kind in FILES if Path(root, name).exists()), None)
    found = found or next(((kind, "/proc/self/cgroup") for word, kind in GROUPS
                           if re.search(rf"[/\-.]{word}\b", _text(root, "proc/self/cgroup"))), None)
    if found is None and env.get("container"):  # what systemd-nspawn, LXC and Podman tell their first process
        found = (env["container"], "the variable container")
    return None if found is None else {"kind": found[0], "by": found[1], "namespaced": namespaced(root)}


def namespaced(root: str = "/") -> bool:
    """Return whether user ids are mapped: the first namespace maps the whole range onto itself."""
    rows = _text(root, "proc/self/uid_map").split()
    return bool(rows) and rows[:3] != ["0", "0", "4294967295"]


def ptrace_scope(root: str = "/") -> int | None:
    """Return Yama's rule of who may read whose memory, 0 to 3; None without Yama."""
    text = _text(root, "proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text.isdigit() else None


def limits(root: str = "/") -> dict[str, Any]:
    """Return {"cores", "memory_bytes"} that the control groups around this process allow, None without a limit."""
    memory = [limit for limit, _ in memory_limits(f"{root}/sys/fs/cgroup", f"{root}/proc") if limit < UNLIMITED]
    cores = cpu_quota(f"{root}/sys/fs/cgroup", f"{root}/proc")
    return {"cores": None if cores == float("inf") else cores, "memory_bytes": min(memory, default=None)}


def _text(root: str, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(root, name).read_text(errors="replace")
    return ""
