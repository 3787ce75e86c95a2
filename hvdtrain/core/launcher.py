"""Read rank, size and launcher of this process from environment variables.

Knows the variables of mpirun, mpiexec, srun and horovodrun. Starts nothing: `hvdtrain.cluster.boot` does. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers its batch, interactive and external steps from near the top of 32 bits; they are no parallel launch."""


@dataclass(frozen=True)
class LaunchFacts:
    """This process's place in the job, as the launcher tells it.

    ``kind``: "solo" (one process, no MPI), "mpi" (MPI starts the control plane) or "gloo" (horovodrun --gloo).
    ``size``, ``local_rank`` and ``local_size`` are 0, -1 and 0 where the launcher does not say.
    """

    kind: Literal["solo", "mpi", "gloo"]
    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


SOLO = LaunchFacts("solo", 0, 1, 0, 1, "none")


def launch_facts(env: Mapping[str, str]) -> LaunchFacts:
    """Return the facts in ``env``; the innermost launcher wins (mpirun inside a Slurm allocation is mpirun).

    A single process inside an allocation (``salloc``, a batch script, a notebook) is solo.
    """
    for read in (_gloo, _open_mpi, _hydra, _slurm, _pmix):
        facts = read(env)
        if facts is not None:
            return facts
    return SOLO


def torchrun_size(env: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun or accelerate started, which are no ranks here; 0 without them."""
    return _number(env, "WORLD_SIZE", 0) if "TORCHELASTIC_RUN_ID" in env else 0


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else default


def _gloo(env: Mapping[str, str]) -> LaunchFacts | None:
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in env:
        return None
    return _four(env, "HOROVOD_", "gloo", "horovodrun --gloo")


def _open_mpi(env: Mapping[str, str]) -> LaunchFacts | None:
    """Read what Open MPI's mpirun sets (4.x and 5.x; horovodrun --mpi calls it)."""
    return _four(env, "OMPI_COMM_WORLD_", "mpi", "Open MPI mpirun")


def _four(env: Mapping[str, str], prefix: str, kind: Literal["mpi", "gloo"], launcher: str) -> LaunchFacts | None:
    """Read rank, size, local rank and local size by these names behind ``prefix``."""
    rank, size = _number(env, f"{prefix}RANK", -1), _number(env, f"{prefix}SIZE", 0)
    if rank < 0 or size < 1:
        return None
    return LaunchFacts(kind, rank, size, _number(env, f"{prefix}LOCAL_RANK", -1),
                       _number(env, f"{prefix}LOCAL_SIZE", 0), launcher)


def _hydra(env: Mapping[str, str]) -> LaunchFacts | None:
    """Read what MPICH's (and Intel MPI's) mpiexec sets, or srun --mpi=pmi2."""
    rank, size = _number(env, "PMI_RANK", -1), _number(env, "PMI_SIZE", 0)
    if rank < 0 or size < 1:
        return None
    local_rank, local_size = _number(env, "MPI_LOCALRANKID", -1), _number(env, "MPI_LOCALNRANKS", 0)
    slurm = _slurm(env) if local_rank < 0 else None
    if slurm is not None:
        return LaunchFacts("mpi", rank, size, slurm.local_rank, slurm.local_size, "srun")
    return LaunchFacts("mpi", rank, size, local_rank, local_size, "MPICH mpiexec")


def _slurm(env: Mapping[str, str]) -> LaunchFacts | None:
    step = _number(env, "SLURM_STEP_ID", -1)
    if not 0 <= step < SLURM_FIRST_SPECIAL_STEP:
        return None
    rank = _number(env, "SLURM_PROCID", -1)
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 0))
    if rank < 0 or size < 2:
        return None
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
    node = _number(env, "SLURM_NODEID", -1)
    local_size = per_node[node] if 0 <= node < len(per_node) else 0
    return LaunchFacts("mpi", rank, size, _number(env, "SLURM_LOCALID", -1), local_size, "srun")


def _pmix(env: Mapping[str, str]) -> LaunchFacts | None:
    """Read a PMIx launcher that tells a rank and no more (prterun)."""
    rank = _number(env, "PMIX_RANK", -1)
    if rank < 0 or "PMIX_NAMESPACE" not in env or "SLURM_JOB_ID" in env:
        return None
    return LaunchFacts("mpi", rank, 0, -1, 0, "a PMIx launcher")


def _tasks_per_node(text: str) -> list[int]:
    """Unfold Slurm's ``4(x2),3`` to [4, 4, 3]; [] where it cannot be read."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
