"""mpiexec of MPICH (hydra): one launch as its command line. Pure. Intel MPI's hydra has a file of its own."""

from __future__ import annotations

from hvdtrain.cluster.launchers.spec import LaunchSpec, agent_words

LAST = "LAST_OF_THE_ENVIRONMENT"
"""Not passed to the ranks. hydra 4.3.2 keeps a listed variable from other hosts where it is the last one in mpiexec's
environment: so this one, which is on no list, has to be the last.
"""

SPLITS = " \t\n\"'\\"
"""Characters at which hydra takes the arguments of ssh apart."""


def ssh_or_rsh(program: str) -> str:
    """Return hydra's name for a remote shell: a scheduler's own takes no options of ssh, which "ssh" would add."""
    return "rsh" if program.rpartition("/")[2] in ("pbs_tmrsh", "blaunch") else "ssh"


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """End the environment with `LAST`. More ranks than cores need no flag; root none either."""
    env = dict(spec.env_values)
    words = [spec.tool.path]
    if spec.ranks:
        words += ["-n", str(spec.ranks)]
    if spec.hosts:
        words += ["-hosts", ",".join(map(str, spec.hosts))]
    words += ["-bind-to", f"core:{spec.cores_per_rank}" if spec.bind == "core" else spec.bind]
    ssh = agent_words(spec, SPLITS)
    if ssh:
        words += ["-launcher", ssh_or_rsh(ssh[0]), "-launcher-exec", ssh[0]]
    if ssh[1:]:
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(ssh[1:])  # there is no option for it
    if spec.interface:
        words += ["-iface", spec.interface]
    env[LAST] = "1"
    return [*words, *environment(spec), *spec.mpi_args, *spec.program], env


def environment(spec: LaunchSpec) -> list[str]:
    """Return the names to pass, instead of hydra's default: all."""
    return ["-genvlist", ",".join(spec.env_names)] if spec.env_names else ["-genvnone"]
