"""From what the user wants and what is here to one `LaunchSpec`: every decision of a launch but its flags.

Owns those decisions: the hosts and ranks, the environment, ssh or not, when cores are short. Looks at nothing by itself
(`hvdtrain.cluster.launchers.detect` does) and writes no command line (the launchers do). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.cluster.launchers import environment, slurm
from hvdtrain.cluster.launchers.hosts import MOST_RANKS, bounded, is_address, place
from hvdtrain.cluster.launchers.spec import Host, LaunchSpec, Tool
from hvdtrain.cluster.launchers.ssh import chosen, unread
from hvdtrain.core.errors import UserError, count

LOOPBACK = ("localhost", "127.0.0.1")
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
ADDRESSES_SINCE = (5, 0, 11)
"""The Open MPI 5 seen taking addresses in ``-H``; 5.0.8 was seen refusing them."""

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; ``program`` is what each rank runs, ``ranks`` 0 where no number is named."""

    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
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
    """What a launch needs to know of the machine it starts from.

    ``names`` are this host's own, ``cores`` those that this process may use, ``search_path`` is PATH with this
    interpreter's folder first.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = LOOPBACK
    cores: int = 1
    is_root: bool = False
    search_path: str = ""
    inside: str = ""

    @property
    def in_slurm(self) -> bool:
        """Whether this is a Slurm allocation."""
        return "SLURM_JOB_ID" in self.env


def prepare(wishes: Wishes, here: Here, tool: Tool) -> tuple[LaunchSpec, list[str]]:
    """Decide one launch: (spec, notes for the user). `UserError` for wishes that cannot be met anywhere."""
    check(wishes)
    if here.inside:
        raise UserError(f"this is a process of a job already, started by {here.inside}", "one launch, outside of it",
                        "take the outer launcher away, or the inner one")
    notes: list[str] = []
    hosts = bounded(_hosts(wishes, here))
    ranks = sum(host.slots for host in hosts) if hosts else wishes.ranks
    names, values = environment.parse_env(wishes.env, here.env)
    if wishes.interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if name not in here.env:
                values.setdefault(name, wishes.interface)
    if tool.launcher == "horovodrun" and here.search_path != here.env.get("PATH"):
        values.setdefault("PATH", here.search_path)  # it starts the first mpirun there
    more = slurm.PASSED if tool.launcher == "srun" else ()
    passed = sorted({*environment.passed({**here.env, **values}, more), *names})
    remote = any(host.name not in here.names for host in hosts)
    ssh = wishes.ssh or _unread_agent(tool, here, remote, notes)
    _this_host_first(tool, hosts, here, notes)
    spec = LaunchSpec(
        tool=tool, program=wishes.program, hosts=hosts, ranks=ranks, env_names=tuple(passed),
        env_values=tuple(sorted(values.items())), ssh=ssh, remote=remote,
        over_ssh=remote and not here.in_slurm and not chosen(tool.launcher, here.env),
        interface=wishes.interface, bind=wishes.bind, cores_per_rank=wishes.cores_per_rank,
        oversubscribe=wishes.oversubscribe or _cores_short(hosts, wishes, here, notes), as_root=here.is_root,
        root_allowed=wishes.allow_root, root_in_environment=all(here.env.get(v) == "1" for v in ROOT_VARIABLES),
        mpi_args=wishes.mpi_args)
    if tool.flavour == "openmpi" and (5,) <= tool.numbers < ADDRESSES_SINCE and any(is_address(h.name) for h in hosts):
        notes.append(f"Open MPI {tool.version} may refuse addresses in a host list (5.0.8 does): use names")
    return spec, notes


def names_this_host_only(hosts: tuple[Host, ...]) -> bool:
    """Whether the list is of loopback names, which mean this host to every launcher but Slurm's."""
    return bool(hosts) and all(host.name in LOOPBACK for host in hosts)


def check(wishes: Wishes) -> None:
    """`UserError` for wishes that no launcher on any machine can meet."""
    program = wishes.program
    if not program or program[0][:1] in ("", "-") or ":" in program or any("\0" in word for word in program):
        raise UserError(f"the program is {list(program)}", "words without a lone colon, which divides programs for "
                        "mpirun, the first being a program", "correct what stands after --")
    if wishes.interface and not _INTERFACE.fullmatch(wishes.interface):
        raise UserError(f"--iface is {wishes.interface!r}", "the name of one network interface, such as eth0",
                        "see ip address; for a network in CIDR form use --mpi-args")
    if wishes.cores_per_rank < 1 or wishes.ranks < 0:
        raise UserError(f"-np is {wishes.ranks} and --cores-per-rank {wishes.cores_per_rank}", "1 or more",
                        "correct them")
    if wishes.ranks > MOST_RANKS:
        raise UserError(f"-np is {wishes.ranks}", f"at most {MOST_RANKS}", "correct it")
    if wishes.cores_per_rank > 1 and wishes.bind != "core":
        raise UserError(f"--cores-per-rank is {wishes.cores_per_rank} with --bind {wishes.bind}", "--bind core",
                        "add --bind core: only then a rank has cores of its own")


def _unread_agent(tool: Tool, here: Here, remote: bool, notes: list[str]) -> tuple[str, ...]:
    """The ssh command in a variable that the launcher does not read, with a note; () without one."""
    name, words = unread(tool.launcher, here.env) if remote and not here.in_slurm else ("", ())
    if name:
        notes.append(f"Open MPI {tool.version or 5} does not read {name}: it is taken as --ssh")
    return words


def _this_host_first(tool: Tool, hosts: tuple[Host, ...], here: Here, notes: list[str]) -> None:
    """A note where Open MPI 4.1 will not keep the order of the hosts."""
    if tool.flavour == "openmpi" and tool.launcher in ("openmpi4", "horovodrun") and tool.numbers[:1] in ((), (4,)):
        ours = [host.name for host in hosts if host.name in here.names]
        if ours and hosts[0].name not in here.names:
            notes.append(f"Open MPI 4 gives the first ranks to this host, {ours[0]}, though {hosts[0].name} is named "
                         "first: name this host first, or start from another")


def _hosts(wishes: Wishes, here: Here) -> tuple[Host, ...]:
    """Where the ranks go; () leaves it to the allocation."""
    if wishes.hosts:
        total = sum(host.slots for host in wishes.hosts)
        return place(wishes.hosts, wishes.ranks or total, wishes.oversubscribe)
    if here.in_slurm:
        return ()
    if not wishes.ranks:
        raise UserError("no hosts and no number of ranks are named", "-H fast:4,old:2, --hostfile FILE or -np 2",
                        "say where to run; -np alone runs on this host")
    return (Host("localhost", wishes.ranks),)


def _cores_short(hosts: tuple[Host, ...], wishes: Wishes, here: Here, notes: list[str]) -> bool:
    """Whether this host's ranks outnumber its cores, with a note; other hosts' cores are not known."""
    ranks = sum(host.slots for host in hosts if host.name in here.names)
    if ranks * wishes.cores_per_rank <= here.cores:
        return False
    if wishes.bind == "core":
        raise UserError(f"--bind core with {ranks} ranks of {wishes.cores_per_rank} cores on this host, which has "
                        f"{here.cores}", "a core of its own for every rank", "take fewer ranks, or --bind none")
    notes.append(f"{ranks} ranks share the {count(here.cores, 'core')} of this host")
    return True
