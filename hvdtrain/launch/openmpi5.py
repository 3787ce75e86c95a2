"""mpirun of Open MPI 5, whose daemons and mapping are PRRTE's: one launch as its command line. Pure.

PRRTE takes any ``--mca`` or ``--prtemca`` name, also a wrong one, and then ignores it: each name here was seen working.
"""

from __future__ import annotations

from hvdtrain.launch import openmpi
from hvdtrain.launch.spec import LaunchSpec

OBJECTS = {"none": "none", "core": "core", "socket": "package", "numa": "numa"}
"""A socket is a package since PRRTE."""


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """See `openmpi.command`."""
    return openmpi.command(spec, OBJECTS, ["--prtemca", "plm_ssh_agent"],
                           [["--prtemca", "prte_if_include"], ["--mca", "btl_tcp_if_include"]])
