"""Horovod for the check where a compiler, nvcc and NCCL are at hand: built in an environment of its own.

Owns what is looked for, and the limit. The machine's own Python is not written to: a virtual environment in the
temporary folder sees its packages. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import children
import machine as machines
import wheelhouse

LEAST_S = 120.0
"""Below this no build is begun."""

_NCCL = """
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
for folder in spec.submodule_search_locations if spec else ():
    home = pathlib.Path(folder, "nccl")
    if (home / "include" / "nccl.h").exists():
        print(home)
        break
"""

_SEE = """
import pathlib, subprocess, sys, sysconfig
ask = "import site, sys; print(chr(10).join(p for p in sys.path if p.endswith('-packages')))"
seen = subprocess.run([sys.argv[1], "-c", ask], capture_output=True, text=True, timeout=20, check=True).stdout
pathlib.Path(sysconfig.get_paths()["purelib"], "seen.pth").write_text(seen)
"""
"""Lets a virtual environment see the packages of another interpreter, which may be one of an environment itself."""


def lacking(here: machines.Machine, wheels: Path | None) -> str:
    """Return what a build of Horovod with NCCL takes and is not here, in words, or ""."""
    if "gpu" in here.lacks:
        return "no GPU to build it for"
    missing = [name for name in ("g++", "cmake", "make") if shutil.which(name) is None]
    cuda = next((home for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
                 if home and Path(home, "bin", "nvcc").exists()), "")
    missing += [] if cuda or shutil.which("nvcc") else ["nvcc"]
    missing += [] if nccl_home(here) else ["NCCL with its header"]
    missing += [] if wheels and any(wheels.glob("horovod-*.tar.gz")) else ["Horovod's source in WHEELS="]
    return f"no {' and no '.join(missing)}" if missing else ""


def nccl_home(here: machines.Machine) -> str:
    """Return where NCCL's header and library are: beside PyTorch, in the toolkit or in the system; "" for nowhere."""
    beside = machines.answer([here.python, "-c", _NCCL], machines.LOOK_S, here.env)[0].strip()
    return beside or next((home for home in ("/usr/local/cuda", "/usr/local", "/usr")
                           if Path(home, "include", "nccl.h").exists()), "")


def build(here: machines.Machine, wheels: Path | None, aside: Path, out: Path, limit_s: float) -> None:
    """Build Horovod and have the rows run with it, or say in ``here.lacks`` why there is none."""
    why = lacking(here, wheels)
    if not why and "mpi" in here.lacks:
        why = here.lacks["mpi"]
    if not why and limit_s < LEAST_S:
        why = f"{limit_s:.0f} s are left, too few to build it"
    if why:
        here.lacks["horovod"] = f"Horovod is not installed, and not built: {why}"
        return
    home, log = aside / "horovod", out / "logs" / "build.log"
    log.unlink(missing_ok=True)
    assert wheels is not None
    python = home / "bin" / "python"
    env = here.env | {"HOROVOD_NCCL_HOME": nccl_home(here), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels),
                      "XDG_CACHE_HOME": str(aside / "cache")}
    have = wheelhouse.found(wheels, tuple(here.facts["version"][:2]), here.facts["machine"])
    for name in map(wheelhouse.normal, (*wheelhouse.HOROVOD, "pycparser")):
        if name in have and wheelhouse.MODULE_OF[name] not in here.facts["modules"]:
            wheelhouse.unpack(have[name], aside / "packages")
    _show_mpi(here, env)
    for argv in ([here.python, "-m", "venv", "--without-pip", str(home)],
                 [str(python), "-c", _SEE, here.python],
                 [str(python), "-m", "hvdtrain", "build", "--frameworks", "torch", "--no-verify"]):
        ended = children.run(argv, log, limit_s, env, aside)
        limit_s -= ended.seconds
        if ended.code != 0:
            took = "took too long" if ended.code is None else f"failed with exit status {ended.code}"
            here.lacks["horovod"] = f"building Horovod {took}; {' '.join(ended.last_lines(1))[:200]}"
            return
    _show_mpi(here, here.env)
    here.facts["python"] = str(python)
    here.facts["modules"] = [*here.facts["modules"], "horovod"]
    here.lacks.pop("horovod")
    machines.find_horovod(here)


def _show_mpi(here: machines.Machine, env: dict[str, str]) -> None:
    """Have another environment's interpreter find the MPI that may lie in the environment of the first."""
    home = Path(here.mpirun[0]).parent
    env["PATH"] = os.pathsep.join([str(home), env.get("PATH", os.defpath)])
    library = home.parent / "lib" / "libmpi.so.40"
    if library.exists():
        env.setdefault("MPI4PY_LIBMPI", str(library))
