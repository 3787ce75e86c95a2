"""mpirun of Intel MPI, whose hydra has other options than MPICH's: one launch as its command line. Pure.

Written from Intel's developer reference (2021.14); Intel MPI was not at hand to run it.
"""

from __future__ import annotations

from hvdtrain.cluster.launchers.mpich import SPLITS, environment, ssh_or_rsh
from hvdtrain.cluster.launchers.spec import LaunchSpec, agent_words

DOMAINS = {"socket": "socket", "numa": "numa"}


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """Write hosts with different slots as argument sets, joined by colons: ``-hosts`` knows one number for all."""
    env = dict(spec.env_values) | _pinning(spec)
    words = [spec.tool.path]
    ssh = agent_words(spec, SPLITS)
    if ssh:
        words += ["-bootstrap", ssh_or_rsh(ssh[0]), "-bootstrap-exec", ssh[0]]
    if ssh[1:]:
        words += ["-bootstrap-exec-args", " ".join(ssh[1:])]
    if spec.interface:
        words += ["-iface", spec.interface]
    words += [*environment(spec), *spec.mpi_args]
    slots = {host.slots for host in spec.hosts}
    if len(slots) > 1:
        sets = [["-n", str(host.slots), "-host", host.name, *spec.program] for host in spec.hosts]
        return words + sets[0] + [word for one in sets[1:] for word in (":", *one)], env
    if spec.ranks:
        words += ["-n", str(spec.ranks)]
    if spec.hosts:
        words += ["-ppn", str(spec.hosts[0].slots), "-hosts", ",".join(host.name for host in spec.hosts)]
    return [*words, *spec.program], env


def _pinning(spec: LaunchSpec) -> dict[str, str]:
    if spec.bind == "none":
        return {"I_MPI_PIN": "0"}
    domain = str(spec.cores_per_rank) if spec.bind == "core" else DOMAINS[spec.bind]
    return {"I_MPI_PIN": "1", "I_MPI_PIN_DOMAIN": domain}
