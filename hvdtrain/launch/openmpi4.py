"""mpirun of Open MPI 4.1 (and 4.0): one launch as its command line. Pure."""

from __future__ import annotations

from hvdtrain.launch import openmpi
from hvdtrain.launch.spec import LaunchSpec

OBJECTS = {"none": "none", "core": "core", "socket": "socket", "numa": "numa"}


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """See `openmpi.command`."""
    return openmpi.command(spec, OBJECTS, ["--mca", "plm_rsh_agent"],
                           [["--mca", "oob_tcp_if_include"], ["--mca", "btl_tcp_if_include"]])
