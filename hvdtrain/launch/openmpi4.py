"""mpirun of Open MPI 4.1 (and 4.0): one launch as its command line. Pure."""

from __future__ import annotations

from hvdtrain.launch import openmpi
from hvdtrain.launch.spec import LaunchSpec

OBJECTS = {"none": "none", "core": "core", "socket": "socket", "numa": "numa"}


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """(argv, environment to set). `UserError` for root unasked, and for ssh words that mpirun would take apart."""
    agent = openmpi.agent(spec)
    words = [spec.tool.path, *openmpi.root(spec), *openmpi.placement(spec), *openmpi.binding(spec, OBJECTS),
             "--stdin", "none"]
    if agent:
        words += ["--mca", "plm_rsh_agent", agent]
    if spec.interface:
        words += ["--mca", "oob_tcp_if_include", spec.interface, "--mca", "btl_tcp_if_include", spec.interface]
    return [*words, *openmpi.environment(spec), *spec.mpi_args, *spec.program], dict(spec.env_values)
