"""Launchers: one pure file for each, with ``command(spec) -> (argv, environment to set)``
(`hvdtrain.core.protocols.Launcher`).

Owns their registry; starts nothing (`hvdtrain.commands.launch.cli` does).
"""

from __future__ import annotations

from hvdtrain.cluster.launchers import horovodrun, intelmpi, mpich, openmpi, slurm
from hvdtrain.cluster.launchers.spec import HostSlots, LauncherProgram, LaunchSpec
from hvdtrain.core.protocols import Launcher

LAUNCHERS: dict[str, Launcher] = {
    "openmpi4": openmpi.FOUR,
    "openmpi5": openmpi.FIVE,
    "mpich": mpich,
    "intelmpi": intelmpi,
    "horovodrun": horovodrun,
    "srun": slurm,
}

__all__ = ["LAUNCHERS", "HostSlots", "LaunchSpec", "LauncherProgram"]
