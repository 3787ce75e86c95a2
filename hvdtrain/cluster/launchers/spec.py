"""What a launch is, as data: hosts, the launcher that was found, and the whole of one launch.

Owns the three records that the launchers read. Parses nothing, looks at nothing, runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

BINDINGS = ("none", "core", "socket", "numa")
"""What ``--bind`` may be."""


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it is for."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Tool:
    """A launcher that was found.

    ``launcher`` is a name of `hvdtrain.cluster.launchers.LAUNCHERS`, ``path`` its own program (mpirun, srun,
    horovodrun); ``flavour`` and ``version`` tell the MPI ("openmpi" "5.0.11", "mpich" "4.3.2", "intel" "2021.14"; ""
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
    """One launch. What a launcher cannot do of it, it refuses with `UserError`.

    ``program`` is what each rank runs. ``hosts`` hold exactly ``ranks`` slots, in the order of the ranks (but Open MPI
    4.1 takes this host first); no hosts: the allocation's own, with ``ranks`` 0 for as many as it says. ``env_names``
    are passed to every rank from the launcher's environment, into which ``env_values`` are put first. ``ssh`` are the
    words of the user's ssh command, () for the launcher's own way; ``over_ssh`` says that it will be ssh; ``remote``
    that there is another host than this.
    """

    tool: Tool
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
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
