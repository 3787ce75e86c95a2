"""horovodrun over MPI: one launch as its command line. Pure.

horovodrun 0.28.1 writes an mpirun line and hands it to a shell with most of its own options unquoted. So every option
that gets there is quoted here, and `UserError` names what it gets wrong:

- its own binding flags have one dash, which Open MPI 5.0.10 and later refuse: ``--binding-args`` says them with two;
- ``--ssh-port`` and ``--ssh-identity-file`` become flags that Open MPI 5 ignores;
- for other hosts without ``--network-interfaces`` it starts services that take pickles, and shows their key in ``ps``;
- it always tells Open MPI that root is fine.
"""

from __future__ import annotations

import os
import re
import shlex

from hvdtrain.cluster.launchers import openmpi
from hvdtrain.cluster.launchers.spec import LaunchSpec
from hvdtrain.core.errors import UserError

_KEY_FILE = re.compile(r"[A-Za-z0-9_./~+][A-Za-z0-9_./~+-]*")


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    if spec.tool.flavour not in ("openmpi", ""):
        raise UserError(f"mpirun here is {spec.tool.flavour} {spec.tool.version}, which horovodrun 0.28.1 "
                        "does not support well", "Open MPI", "use --launcher mpich or --launcher intelmpi")
    if not spec.hosts:
        raise UserError("horovodrun has no hosts", "-H or --hostfile",
                        "name the hosts; horovodrun reads no Slurm allocation")
    if spec.remote and not spec.interface:
        raise UserError("horovodrun on other hosts without an interface looks for one with services "
                        "that unpickle data from any sender", "--iface NAME, the same on all hosts",
                        "see ip address for the name")
    openmpi.root(spec)  # refuses; the flag itself horovodrun always gives
    five = spec.tool.numbers[:1] >= (5,)
    binding = (openmpi.FIVE if five else openmpi.FOUR).binding(spec)
    words = [spec.tool.path, "--mpi", "-np", str(spec.ranks), "-H", ",".join(map(str, spec.hosts)),
             f"--binding-args={shlex.join(binding)}", *_ssh(spec, five)]
    if spec.interface:
        words += ["--network-interfaces", spec.interface]
    more = ["--stdin", "none", *_prefix(spec), *spec.mpi_args]
    return [*words, f"--mpi-args={shlex.join(more)}", *spec.program], dict(spec.env_values)


def _prefix(spec: LaunchSpec) -> list[str]:
    """Return the option with Open MPI's folder on the other hosts: horovodrun calls mpirun without its path."""
    folder = os.path.dirname(os.path.dirname(spec.tool.mpirun))
    return ["--prefix", folder] if spec.remote and folder else []


def _ssh(spec: LaunchSpec, five: bool) -> list[str]:
    """Return ``ssh -p PORT -i FILE`` as horovodrun's options, which has none for anything else."""
    if not spec.ssh:
        return []
    if five:
        raise UserError("horovodrun passes ssh options in a way that Open MPI 5 ignores", "no --ssh here",
                        "use --launcher openmpi5, or put the options into ~/.ssh/config")
    found: dict[str, str] = {}
    program, *rest = spec.ssh
    while rest[:1] in (["-p"], ["-i"]) and len(rest) > 1:
        found[rest[0]] = rest[1]
        rest = rest[2:]
    if program != "ssh" or rest or not re.fullmatch(r"[0-9]{1,5}", found.get("-p", "22")) or \
            not _KEY_FILE.fullmatch(found.get("-i", "key")):
        raise UserError(f"--ssh is {shlex.join(spec.ssh)!r}", "ssh -p PORT -i FILE: horovodrun has no other option",
                        "use --launcher openmpi4, or put the options into ~/.ssh/config")
    names = {"-p": "--ssh-port", "-i": "--ssh-identity-file"}
    return [word for flag, value in found.items() for word in (names[flag], value)]
