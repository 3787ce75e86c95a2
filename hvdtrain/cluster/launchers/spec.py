"""Specification of a launch: hosts and slots, launcher, environment variables, ssh command, and how the user's words
for them are parsed.

Pure; reads no environment, resolves no name, runs nothing.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.core.errors import UserError, count

BINDINGS = ("none", "core", "socket", "numa")
"""Values of ``--bind``."""


@dataclass(frozen=True)
class HostSlots:
    """A host and the number of ranks on it."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class LauncherProgram:
    """A launcher that was found.

    ``launcher`` is a name of `hvdtrain.cluster.launchers.LAUNCHERS`, ``path`` its own program (mpirun, srun,
    horovodrun); ``flavour`` and ``version`` are the MPI's ("openmpi" "5.0.11", "mpich" "4.3.2", "intel" "2021.14"; ""
    where unknown), ``mpirun`` its mpirun.
    """

    launcher: str
    path: str
    flavour: str = ""
    version: str = ""
    mpirun: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version's leading numbers, to compare: (5, 0, 11); () where the version is not known."""
        found: list[int] = []
        for part in self.version.split("."):
            if not part.isdigit():
                break
            found.append(int(part))
        return tuple(found)


@dataclass(frozen=True)
class LaunchSpec:
    """Specification of a launch; a launcher raises `UserError` for what it cannot do of it.

    ``program`` is what each rank runs. ``hosts`` hold exactly ``ranks`` slots, in the order of the ranks (but Open MPI
    4.1 takes this host first); no hosts: the allocation's own, with ``ranks`` 0 for as many as it says. ``env_names``
    are passed to every rank from the launcher's environment, into which ``env_values`` are put first. ``ssh``: words of
    the user's ssh command, () for the launcher's own way; ``over_ssh``: it will be ssh; ``remote``: there is another
    host than this; ``components``: parts of a heterogeneous Slurm job, else 1.
    """

    tool: LauncherProgram
    program: tuple[str, ...]
    hosts: tuple[HostSlots, ...] = ()
    ranks: int = 0
    env_names: tuple[str, ...] = ()
    env_values: tuple[tuple[str, str], ...] = ()
    ssh: tuple[str, ...] = ()
    over_ssh: bool = False
    remote: bool = False
    interface: str = ""
    bind: str = "none"
    cores_per_rank: int = 1
    oversubscribe: bool = False
    as_root: bool = False
    root_allowed: bool = False
    root_in_environment: bool = False
    mpi_args: tuple[str, ...] = ()
    components: int = 1


MOST_SLOTS = 4096
"""More on one host is a slip of the keyboard."""

MOST_RANKS = 1 << 20
"""More in one job is too."""

_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_SHAPE = "a host name or IPv4 address, optionally with :slots, as in fast:4"


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Parse ``-H``: ``name:slots`` with commas, 1 slot by default, names added up; also sets (``gpu[01-64]``)."""
    # A comma within brackets belongs to a node set.
    return merged(host for part in re.split(r",(?![^\[\]]*\])", text) for host in _entries(part, "-H"))


def parse_hostfile(text: str, where: str) -> tuple[HostSlots, ...]:
    """Parse a host file: a host per line as ``name slots=4`` (Open MPI), ``name:4`` (MPICH) or ``name`` (one slot).

    ``#`` begins a comment. Open MPI's ``max_slots=`` and ``max-slots=`` are ignored. A name given twice adds its slots,
    as in a scheduler's file with a line per slot.
    """
    found: list[HostSlots] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            found += _line(words, f"{where}, line {number}")
    if not found:
        raise UserError(f"{where} names no host", "a line such as: fast slots=4", "write one line per host")
    return merged(found)


def merged(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    """Merge hosts of one name, in the order of first mention; `UserError` for more than `MOST_SLOTS` on one."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return bounded(tuple(HostSlots(name, n) for name, n in slots.items()))


def bounded(hosts: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
    """Return ``hosts``; `UserError` where one, or all together, are for more ranks than anybody means."""
    for host in hosts:
        if host.slots > MOST_SLOTS:
            raise UserError(f"{host.name} is for {count(host.slots, 'rank')}", f"at most {MOST_SLOTS} on one host",
                            "correct its slots or -np")
    total = sum(host.slots for host in hosts)
    if total > MOST_RANKS:
        raise UserError(f"the hosts are for {count(total, 'rank')}", f"at most {MOST_RANKS}",
                        "correct the slots or -np")
    return hosts


def is_address(name: str) -> bool:
    """Return whether a host is named by its IPv4 address."""
    return _ADDRESS.fullmatch(name) is not None


def place(hosts: Sequence[HostSlots], ranks: int, oversubscribe: bool) -> tuple[HostSlots, ...]:
    """Put exactly ``ranks`` ranks on the hosts: in order while slots last, beyond that in proportion to the slots.

    Hosts left without a rank are left out. `UserError` where the slots do not suffice and ``oversubscribe`` is not set.
    """
    total = sum(host.slots for host in hosts)
    if ranks > total:
        if not oversubscribe:
            raise UserError(f"-np asks for {count(ranks, 'rank')} and the hosts have {count(total, 'slot')}",
                            f"-np {total} or less",
                            "raise the slots of a host, or pass --oversubscribe")
        # Largest remainder; of equal remainders the first host's.
        shares = [ranks * host.slots // total for host in hosts]
        order = sorted(range(len(hosts)), key=lambda i: (-(ranks * hosts[i].slots % total), i))
        for i in order[:ranks - sum(shares)]:
            shares[i] += 1
        return tuple(HostSlots(host.name, n) for host, n in zip(hosts, shares))
    placed, left = [], ranks
    for host in hosts:
        here = min(host.slots, left)
        left -= here
        if here:
            placed.append(HostSlots(host.name, here))
    return tuple(placed)


def _line(words: list[str], where: str) -> tuple[HostSlots, ...]:
    host, *rest = words
    slots = None
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key == "slots" and slots is not None:
            raise UserError(f"{where} gives the slots of {host} twice", "slots=N once", "remove one of the two")
        if equals and key == "slots":
            slots = _slots(value, where)
        elif not (equals and key in ("max_slots", "max-slots") and value.isdigit()):
            raise UserError(f"{where} has the word {word!r}", "name slots=4, name:4 or name", "correct the line")
    entries = _entries(host, where)
    if slots is None:
        return entries
    if ":" in host:
        raise UserError(f"{where} gives the slots of {entries[0].name} twice", "either name:4 or name slots=4",
                        "remove one of the two")
    return tuple(HostSlots(entry.name, slots) for entry in entries)


_NODE_SET = re.compile(r"(?!\[)[A-Za-z0-9._-]*(?:\[[0-9,/-]+\][A-Za-z0-9._-]*)+(?::[^:]*)?")
"""Names with ranges of numbers in brackets and, after a colon, slots. Groups (@name) and wildcards are not taken."""


def _entries(text: str, where: str) -> tuple[HostSlots, ...]:
    """Parse one ``name``, ``name:slots``, or a node set in place of the name, with these slots on each node."""
    text = text.strip()
    if "[" not in text or not _NODE_SET.fullmatch(text):
        return (_entry(text, where),)
    name, colon, slots = text.partition(":")
    ranges = [re.findall(r"(\d+)-(\d+)", inside) for inside in re.findall(r"\[(.*?)\]", name)]
    size = math.prod(sum(max(1, int(last) - int(first) + 1) for first, last in found) or 1 for found in ranges)
    if size > MOST_RANKS:  # before ClusterShell unfolds it
        raise UserError(f"{where} has {text!r}, a set of about {size} nodes", f"at most {MOST_RANKS}", "correct it")
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
    try:
        nodes = list(NodeSet(name, resolver=RESOLVER_NOGROUP))
    except (NodeSetException, ValueError) as error:
        raise UserError(f"{where} has {text!r}: {error}", "a node set such as gpu[01-64]:4", "correct it") from None
    return tuple(_entry(node + colon + slots, where) for node in nodes)


def _entry(text: str, where: str) -> HostSlots:
    """Parse one ``name`` or ``name:slots``."""
    text = text.strip()
    name, colon, slots = text.partition(":")
    if "@" in text:
        raise UserError(f"{where} has {text!r}", "a host without a user",
                        "name the user in ~/.ssh/config (Host, User), or pass --ssh \"ssh -l USER\"")
    if text.count(":") > 1 or "[" in text:
        raise UserError(f"{where} has {text!r}, an IPv6 address or several colons", _SHAPE,
                        "give the address a name in /etc/hosts or ~/.ssh/config, and use that")
    if not _HOST_NAME.fullmatch(name):
        raise UserError(f"{where} has {text!r}", _SHAPE,
                        "list names only; ssh options belong in --ssh or ~/.ssh/config")
    if is_address(name) and any(int(part) > 255 for part in name.split(".")):
        raise UserError(f"{where} has the address {name!r}", "four numbers of 0 to 255", "correct it")
    return HostSlots(name, _slots(slots, where) if colon else 1)


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise UserError(f"{where} has {text!r} slots", f"a number of 1 to {MOST_SLOTS}",
                        "correct it, or remove the host")
    return int(text)


PASSED = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS",
    "HVDTRAIN_*", "HVDLAUNCH_*", "HOROVOD_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "MPICH_*", "I_MPI_*",
)
"""Names that every rank gets where they are set; ``*`` ends a prefix.

Not among them, because each host has its own: CUDA_VISIBLE_DEVICES, HOME, TMPDIR. Open MPI's mpirun passes OMPI_* by
itself.
"""

_OF_ANOTHER_JOB = re.compile(
    r"HOROVOD_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|HOSTNAME|CONTROLLER|CPU_OPERATIONS|GLOO_\w+|ELASTIC\w*|\w*SECRET\w*)"
    r"|I_MPI_HYDRA_\w+")
"""What horovodrun or a launcher set for the processes of its own job."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def valid_name(name: str) -> bool:
    """Return whether every shell and launcher takes ``name`` for a variable's."""
    return _VARIABLE.fullmatch(name) is not None


def laid_over(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Lay ``own`` over ``env``, last and in its order: `hvdtrain.cluster.launchers.mpich.LAST` must be last."""
    return {**{name: value for name, value in env.items() if name not in own}, **own}


def passed(env: Mapping[str, str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names in ``env`` that are on the list, or in ``more`` (of the same form), sorted."""
    rules = (*PASSED, *more)
    exact = {rule for rule in rules if not rule.endswith("*")}
    prefixes = tuple(rule[:-1] for rule in rules if rule.endswith("*"))
    return tuple(sorted(name for name in env if (name in exact or name.startswith(prefixes))
                        and valid_name(name) and not _OF_ANOTHER_JOB.fullmatch(name)))


def parse_env(words: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Parse the ``--env`` words: (names to pass, values to set). NAME alone must be set in ``env``."""
    names, values = [], {}
    for word in words:
        name, equals, value = word.partition("=")
        if not valid_name(name):
            raise UserError(f"--env {word!r} does not begin with a variable's name",
                            "NAME or NAME=VALUE, with letters, digits and _ in NAME", "correct --env")
        if equals and ("\0" in value or "\n" in value):
            raise UserError(f"the value of --env {name} has a line break", "one line",
                            "write the value to a file and pass the file's name")
        if equals:
            values[name] = value
        elif name not in env:
            raise UserError(f"--env {name} names a variable that is not set here", "one that is",
                            f"pass --env {name}=VALUE, or export the variable first")
        names.append(name)
    return tuple(names), values


DEFAULT_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30")
"""Host keys are checked as ever. BatchMode: a password prompt among launchers' output is a hang that nobody sees."""

_HYDRA = ("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC")

AGENT_VARIABLES: dict[str, tuple[str, ...]] = {
    "openmpi4": ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_rsh_agent", "OMPI_MCA_pls_rsh_agent"),
    "openmpi5": ("PRTE_MCA_plm_ssh_agent",),
    "mpich": _HYDRA,
    "intelmpi": (*_HYDRA, "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
}
"""By launcher: where one of these is set, the user has chosen already, and the default stays out of the way."""

UNREAD = ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent")
"""Names of an agent that Open MPI 5 does not read (5.0.11 was seen not to): launch reads them for it."""


def parse_ssh(text: str) -> tuple[str, ...]:
    """Split ``--ssh`` into words as a shell would, without a shell."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--ssh {text!r} has {str(error).lower()}", "a command such as: ssh -p 2222",
                        "close the quotes") from None
    if not words or words[0].startswith("-"):
        raise UserError(f"--ssh {text!r} names no program", "a command such as: ssh -p 2222",
                        "begin with the program's name")
    return words


def chosen(launcher: str, env: Mapping[str, str]) -> bool:
    """Return whether a variable that this launcher reads names the way to other hosts."""
    return any(name in env for name in AGENT_VARIABLES.get(launcher, ()))


def unread(launcher: str, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return (name, words) of the agent that ``env`` names where the launcher does not look; ("", ()) without one."""
    if launcher != "openmpi5" or chosen(launcher, env):
        return "", ()
    name = next((name for name in UNREAD if env.get(name, "").strip()), "")
    return name, tuple(env.get(name, "").split())


def agent_words(spec: LaunchSpec, splits: str) -> tuple[str, ...]:
    """Return the words of the ssh command, () for the launcher's own; `UserError` for characters of ``splits``."""
    words = spec.ssh or (DEFAULT_SSH if spec.over_ssh else ())
    for word in words:
        if not word or any(c in splits or not c.isprintable() for c in word):
            raise UserError(f"the ssh command has the argument {word!r}, which {spec.tool.launcher} would split",
                            "arguments without blanks, quotes, backslashes" + (" and colons" if ":" in splits else ""),
                            "put the option into ~/.ssh/config, or name your own script that calls ssh")
    return words
