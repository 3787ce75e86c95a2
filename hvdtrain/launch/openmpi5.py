"""mpirun of Open MPI 5, whose daemons and mapping are PRRTE's: one launch as its command line. Pure.

PRRTE takes any ``--mca`` or ``--prtemca`` name, also a wrong one, and then ignores it: each name here was seen working.
"""

from __future__ import annotations

from hvdtrain.launch import openmpi
from hvdtrain.launch.spec import LaunchSpec

OBJECTS = {"none": "none", "core": "core", "socket": "package", "numa": "numa"}
"""A socket is a package since PRRTE."""


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """(argv, environment to set). `UserError` for root unasked, and for ssh words that mpirun would take apart."""
    agent = openmpi.agent(spec)
    # Without --stdin none a rank 0 that reads its input to the end waits for ever.
    words = [spec.tool.path, *openmpi.root(spec), *openmpi.placement(spec), *openmpi.binding(spec, OBJECTS),
             "--stdin", "none"]
    if agent:
        words += ["--prtemca", "plm_ssh_agent", agent]
    if spec.interface:
        words += ["--prtemca", "prte_if_include", spec.interface, "--mca", "btl_tcp_if_include", spec.interface]
    return [*words, *openmpi.environment(spec), *spec.mpi_args, *spec.program], dict(spec.env_values)
