"""Launching a job: a pure plan (`prepare`), one pure file per launcher, and one file that looks around (`detect`).

Owns the registry of launchers. Each has a ``command(spec) -> (argv, environment to set)``, the protocol
`hvdtrain.core.protocols.Launcher`. Nothing here starts anything: `hvdtrain.commands.launch.cli` does.
"""

from __future__ import annotations

from hvdtrain.cluster.launchers import horovodrun, intelmpi, mpich, openmpi, slurm
from hvdtrain.cluster.launchers.spec import Host, LaunchSpec, Tool
from hvdtrain.core.protocols import Launcher

LAUNCHERS: dict[str, Launcher] = {
    "openmpi4": openmpi.FOUR,
    "openmpi5": openmpi.FIVE,
    "mpich": mpich,
    "intelmpi": intelmpi,
    "horovodrun": horovodrun,
    "srun": slurm,
}

__all__ = ["LAUNCHERS", "Host", "LaunchSpec", "Tool"]
