"""mpirun of Open MPI 4.1 (and 4.0) and of Open MPI 5: one launch as its command line. Pure.

Daemons and mapping of Open MPI 5 are PRRTE's, which takes any ``--mca`` or ``--prtemca`` name, also a wrong one, and
then ignores it: each name here was seen working.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.cluster.launchers.spec import LaunchSpec, agent_words
from hvdtrain.core.errors import UserError

SPLITS = " \t\n:\"'\\"
"""Characters at which Open MPI takes a launch agent apart (a colon separates alternatives)."""


@dataclass(frozen=True)
class OpenMpi:
    """Options of one generation of Open MPI.

    ``flag``: of its daemons' settings; ``agent``, ``interfaces``: of ssh and of networks; ``socket``: its word for one.
    """

    flag: str
    agent: str
    interfaces: str
    socket: str

    def command(self, spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
        agent = " ".join(agent_words(spec, SPLITS))
        words = [spec.tool.path, *root(spec)]
        if spec.ranks:
            words += ["-np", str(spec.ranks)]
        if spec.hosts:
            words += ["-H", ",".join(map(str, spec.hosts))]
        # Without --stdin none a rank 0 that reads its input to the end waits for ever.
        words += [*self.binding(spec), "--stdin", "none"]
        if agent:
            words += [self.flag, self.agent, agent]
        if spec.interface:
            words += [*self.networks(spec.interface), "--mca", "btl_tcp_if_include", spec.interface]
        # Values stay in mpirun's own environment: any character survives, none is in ps.
        words += [word for name in spec.env_names for word in ("-x", name)]
        return [*words, *spec.mpi_args, *spec.program], dict(spec.env_values)

    def binding(self, spec: LaunchSpec) -> list[str]:
        """Return the options of mapping and binding: without them two ranks get one core each, shared by their threads.

        Ranks fill a host before the next one (by slot), in every binding; the hosts go in the order of ``-H``, but for
        4.1, which takes this host first wherever it stands.
        """
        by = f"slot:PE={spec.cores_per_rank}" if spec.bind == "core" else "slot"
        to = self.socket if spec.bind == "socket" else spec.bind
        return ["--map-by", by, "--bind-to", to, *(["--oversubscribe"] if spec.oversubscribe else [])]

    def networks(self, names: str) -> list[str]:
        """Return the option that keeps the daemons to some interfaces or networks, with commas between."""
        return [self.flag, self.interfaces, names]


FOUR = OpenMpi("--mca", "plm_rsh_agent", "oob_tcp_if_include", "socket")
FIVE = OpenMpi("--prtemca", "plm_ssh_agent", "prte_if_include", "package")


def root(spec: LaunchSpec) -> list[str]:
    """Return the root override, where the user gave it; `UserError` for root without it."""
    if not spec.as_root or spec.root_in_environment:
        return []
    if not spec.root_allowed:
        raise UserError("this is root, and Open MPI refuses to run as root",
                        "an ordinary user, or --allow-run-as-root, or the variables OMPI_ALLOW_RUN_AS_ROOT=1 and "
                        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                        "in a container pass --allow-run-as-root; elsewhere use an ordinary user, "
                        "since root can damage the host")
    return ["--allow-run-as-root"]
