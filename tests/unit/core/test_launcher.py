"""Readings of each launcher's variables."""

import pytest

from hvdtrain.core.launcher import SOLO, LaunchFacts, _tasks_per_node, launch_facts

OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "n"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7",
        "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("env, facts", [
    ({}, SOLO),
    (OMPI, LaunchFacts("mpi", 3, 4, 1, 2, "Open MPI mpirun")),
    (HYDRA, LaunchFacts("mpi", 1, 2, 1, 2, "MPICH mpiexec")),
    (SRUN, LaunchFacts("mpi", 5, 7, 1, 3, "srun")),
    (GLOO, LaunchFacts("gloo", 1, 2, 1, 2, "horovodrun --gloo")),
    ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "n"}, LaunchFacts("mpi", 2, 0, -1, 0, "a PMIx launcher")),
    (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7"}, LaunchFacts("mpi", 5, 7, 1, 3, "srun")),
], ids=["none", "openmpi", "mpich", "srun", "gloo", "pmix", "srun pmi2"])
def test_launchers(env, facts):
    assert launch_facts(env) == facts


def test_one_rank_under_mpirun_is_mpi():
    env = OMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert launch_facts(env).kind == "mpi"


def test_mpirun_inside_a_slurm_step_is_mpirun():
    """mpirun starts its daemons by srun, whose variables the ranks inherit."""
    assert launch_facts(SRUN | OMPI).launcher == "Open MPI mpirun"
    assert launch_facts(SRUN | HYDRA).launcher == "MPICH mpiexec"


@pytest.mark.parametrize("env", [
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},                                                    # salloc
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},                               # batch script
    SRUN | {"SLURM_STEP_ID": "4294967290"},                                                        # interactive step
    SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},                                   # batch step
    SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},                                     # srun --pty bash
    {"PMIX_RANK": "0", "PMIX_NAMESPACE": "n", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},
    {"HOROVOD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_RANK": "0"},
], ids=range(9))
def test_one_process_is_solo(env):
    assert launch_facts(env) == SOLO


def test_tasks_per_node():
    assert _tasks_per_node("4(x2),3") == [4, 4, 3]
    assert _tasks_per_node("2") == [2]
    assert _tasks_per_node("") == [] and _tasks_per_node("a(x2)") == []
