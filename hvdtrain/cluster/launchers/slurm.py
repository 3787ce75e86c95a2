"""srun inside a Slurm allocation: one launch as its command line. Pure."""

from __future__ import annotations

from hvdtrain.cluster.launchers.spec import LaunchSpec
from hvdtrain.core.errors import UserError

PASSED = ("HOME", "USER", "LOGNAME", "OMPI_MCA_*", "PMIX_MCA_*")
"""Passed besides `hvdtrain.cluster.launchers.spec.PASSED`: no ssh login sets the first, no mpirun passes the others."""

PLUGINS = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}
"""Slurm's plugin for each MPI's library. Where the MPI is unknown, Slurm's own default is left alone."""

CPU_BIND = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    if spec.ssh:
        raise UserError("srun starts ranks through Slurm's daemons, without ssh", "no --ssh",
                        "omit it, or use --launcher openmpi4, openmpi5 or mpich")
    words = [spec.tool.path, *_placement(spec)]
    if spec.components > 1:
        if spec.ranks:
            raise UserError(f"hosts or -np in a heterogeneous job of {spec.components} components",
                            "the ranks of each component as sbatch or salloc requested them",
                            "omit -H, --hostfile and -np")
        words.append(f"--het-group=0-{spec.components - 1}")  # without it srun uses the first component alone
    if spec.tool.flavour in PLUGINS:
        words.append(f"--mpi={PLUGINS[spec.tool.flavour]}")
    words.append(f"--cpu-bind={CPU_BIND[spec.bind]}")
    if spec.bind == "core":
        words.append(f"--cpus-per-task={spec.cores_per_rank}")
    if spec.oversubscribe:
        words.append("--overcommit")
    env, names = dict(spec.env_values), set(spec.env_names)
    if spec.interface and spec.tool.flavour == "openmpi":
        env["OMPI_MCA_btl_tcp_if_include"] = spec.interface
        names.add("OMPI_MCA_btl_tcp_if_include")
    # Without kill-on-bad-exit the other ranks would wait for the one that failed until the allocation ends.
    words += ["--kill-on-bad-exit=1", "--input=none", f"--export={','.join(sorted(names)) or 'NONE'}"]
    return [*words, *spec.mpi_args, *spec.program], env


def _placement(spec: LaunchSpec) -> list[str]:
    """Return every rank's node, in the order of ranks: the one layout that Slurm keeps exactly.

    ``--ntasks-per-node`` is only a limit: 4 ranks on 2 nodes with 2 each were seen as 3 and 1.
    """
    words = [f"--ntasks={spec.ranks}"] if spec.ranks else []
    if not spec.hosts:
        return words
    names = ",".join(host.name for host in spec.hosts for _ in range(host.slots))
    return [*words, f"--nodes={len(spec.hosts)}", "--distribution=arbitrary", f"--nodelist={names}"]
