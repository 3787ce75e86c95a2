"""Software that a build depends on, found on this machine: Python, frameworks, MPI, CUDA, compiler flags.

Probes read files, package metadata and ``--version`` outputs; no framework is imported, no MPI job started.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

PROBE_TIMEOUT_S = 20.0
_DISTS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
}
_CUDA_LIBRARY = {"torch": "lib/libtorch_cuda.so", "tensorflow": "include/third_party/gpus"}
_ARCH_FLAGS = {"f16c": "-mf16c", "avx": "-mavx", "fma": "-mfma"}


@dataclass(frozen=True)
class Framework:
    """An installed framework; ``dist``: its distribution; ``cuda``: built with CUDA."""

    name: str
    dist: str
    version: str
    cuda: bool = False


@dataclass(frozen=True)
class Mpi:
    """An MPI: ``flavour`` is openmpi, mpich, intel or unknown; ``lib_dir`` holds the libmpi that mpicxx links."""

    flavour: str
    version: str
    mpirun: str
    mpicxx: str = ""
    lib_dir: str = ""


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with NCCL: ``home`` holds bin/nvcc; "" stands for a part that was not found."""

    home: str = ""
    version: str = ""
    nccl_home: str = ""
    nccl_version: str = ""


@dataclass(frozen=True)
class BuildFacts:
    """Everything that ``plan`` needs; two machines with equal facts can share one wheel.

    ``capabilities`` are the compute capabilities of the GPUs present ("90" for 9.0), empty without a GPU.
    ``arch_flags`` are the compiler flags among -mf16c -mavx -mfma that this processor has.
    """

    python_tag: str
    platform: str
    prefix: str
    site_dir: str
    frameworks: tuple[Framework, ...] = ()
    mpi: Mpi | None = None
    capabilities: tuple[str, ...] = ()
    cuda: Cuda = field(default_factory=Cuda)
    arch_flags: tuple[str, ...] = ()
    libc: str = ""


def detect(only: tuple[str, ...] | None = None, capabilities: tuple[str, ...] = ()) -> BuildFacts:
    """Return the facts of this interpreter and machine; ``only`` restricts the frameworks to those names.

    ``capabilities``: of GPUs that are not here and shall be built for; () for those that are.
    """
    found = tuple(f for f in map(find_framework, _DISTS) if f is not None)
    gpus = capabilities or find_capabilities()
    return BuildFacts(python_tag=f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}",
                      platform=sysconfig.get_platform().replace("-", "_").replace(".", "_"), prefix=sys.prefix,
                      site_dir=sysconfig.get_paths()["platlib"],
                      frameworks=tuple(f for f in found if only is None or f.name in only), mpi=find_mpi(),
                      capabilities=gpus, cuda=find_cuda() if gpus else Cuda(),
                      arch_flags=arch_flags(read("/proc/cpuinfo")), libc="-".join(platform.libc_ver()))


def output_of(argv: list[str]) -> str:
    """Return the standard output and error of a short command, "" where it is missing, fails or takes too long."""
    return answer_of(argv)[0]


def answer_of(argv: list[str]) -> tuple[str, str]:
    """Return (what a short command prints, "") or ("", why there is nothing); nothing of it is left running."""
    try:
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        return "", f"cannot be started: {error.strerror}"
    with child:
        try:
            out, err = child.communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "", f"did not answer within {PROBE_TIMEOUT_S:g} s"
        except UnicodeDecodeError:
            return "", "printed something that is not text"
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # it may be a script whose own child hangs
    return (out + err, "") if child.returncode == 0 else ("", f"ended with exit status {child.returncode}")


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_framework(name: str) -> Framework | None:
    """Return the distribution that provides ``torch`` or ``tensorflow``, without importing it; None without one."""
    for dist in _DISTS[name]:
        version = version_of(dist)
        spec = importlib.util.find_spec(name) if version else None
        if version is None or spec is None or not spec.origin:
            continue
        root = Path(spec.origin).parent
        return Framework(name, dist, version, cuda=_has_cuda(name, dist, root))
    return None


def _has_cuda(name: str, dist: str, root: Path) -> bool:
    if name == "torch":
        return (root / _CUDA_LIBRARY["torch"]).exists()
    return dist != "tensorflow-cpu" and bool(output_of(["nvidia-smi", "-L"]))


def search_path() -> str:
    """Return PATH with this interpreter's own folder first: a virtual environment need not be activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def find_mpirun() -> str | None:
    """Return the mpirun that comes first: beside this interpreter, else on PATH; None without one."""
    return shutil.which("mpirun", path=search_path()) or shutil.which("mpiexec", path=search_path())


def find_mpi(told: str | None = None) -> Mpi | None:
    """Return the MPI of `find_mpirun`; None without a known one. ``told``: its version text, None: ask for it."""
    mpirun = find_mpirun()
    if mpirun is None:
        return None
    flavour, version = parse_mpi_version(output_of([mpirun, "--version"]) if told is None else told)
    if flavour == "unknown":
        return None
    beside = os.pathsep.join([os.path.dirname(mpirun), search_path()])
    mpicxx = shutil.which("mpicxx", path=beside) or shutil.which("mpic++", path=beside) or ""
    lib_dir = parse_lib_dir(output_of([mpicxx, "-show"])) if mpicxx else ""
    return Mpi(flavour, version, mpirun, mpicxx, lib_dir)


def parse_mpi_version(text: str) -> tuple[str, str]:
    """Return (flavour, version) from what ``mpirun --version`` prints; ("unknown", "") where that is unknown."""
    for flavour, pattern in (
        ("openmpi", r"\(Open MPI\)\s+([\w.]+)"),
        ("openmpi", r"\(OpenRTE\)\s+([\w.]+)"),
        ("intel", r"Intel\(R\) MPI Library.*?Version\s+([\w.]+(?: Update \d+)?)"),
        ("mpich", r"HYDRA build details:\s+Version:\s+([\w.]+)"),
        ("mpich", r"MPICH Version:\s+([\w.]+)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return flavour, match.group(1).replace(" ", "-")
    return "unknown", ""


def parse_lib_dir(show: str) -> str:
    """Return the first folder that a compiler wrapper's ``-show`` line links from ("" where it names none)."""
    match = re.search(r"(?:^|\s)-L\s*(\S+)", show)
    return os.path.normpath(match.group(1).strip("'\"")) if match else ""


def find_capabilities() -> tuple[str, ...]:
    """Return compute capabilities of the NVIDIA GPUs here, smallest first, each once; empty without a GPU."""
    return parse_capabilities(output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]))


def parse_capabilities(text: str) -> tuple[str, ...]:
    """Return ("80", "90") from the lines "9.0" and "8.0" that nvidia-smi prints."""
    found = {m.group(1) + m.group(2) for m in re.finditer(r"(?m)^\s*(\d+)\.(\d)\s*$", text)}
    return tuple(sorted(found, key=int))


def find_cuda() -> Cuda:
    """Return the CUDA toolkit (environment, nvcc on PATH, wheels, /usr/local/cuda) and NCCL with its headers."""
    homes = [os.environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc", path=search_path())
    homes += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    homes += [str(p) for p in sorted(_nvidia_dir().glob("cu[0-9]*"), reverse=True)]
    homes += ["/usr/local/cuda"]
    home = next((h for h in homes if h and Path(h, "bin", "nvcc").exists()), "")
    version = parse_nvcc_version(output_of([os.path.join(home, "bin", "nvcc"), "--version"])) if home else ""
    nccl_home = next((h for h in _nccl_homes(home) if Path(h, "include", "nccl.h").exists()), "")
    header = read(os.path.join(nccl_home, "include", "nccl.h"))
    return Cuda(home, version, nccl_home, parse_nccl_version(header))


def _nccl_homes(cuda_home: str) -> list[str]:
    """List the places of NCCL: the environment, the wheel beside torch or TensorFlow, the toolkit, the system."""
    named = os.environ.get("HOROVOD_NCCL_HOME", "")
    return [h for h in (named, str(_nvidia_dir() / "nccl"), cuda_home, "/usr/local", "/usr") if h]


def _nvidia_dir() -> Path:
    return Path(sysconfig.get_paths()["purelib"], "nvidia")


def parse_nvcc_version(text: str) -> str:
    """Return "13.0" from nvcc's "release 13.0, V13.0.88"."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match.group(1) if match else ""


def parse_nccl_version(header: str) -> str:
    """Return "2.29.7" from the defines of nccl.h."""
    parts = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(p.group(1) for p in parts if p) if all(parts) else ""


def arch_flags(cpuinfo: str) -> tuple[str, ...]:
    """Return the flags among -mf16c -mavx -mfma that every processor listed in /proc/cpuinfo has."""
    lines = [set(line.split(":", 1)[1].split()) for line in cpuinfo.splitlines() if line.startswith("flags")]
    common = set.intersection(*lines) if lines else set()
    return tuple(flag for name, flag in _ARCH_FLAGS.items() if name in common)


def read(path: str) -> str:
    """Return the text of a file, "" where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def running() -> str | None:
    """Return the name and version of the MPI library that this process has started; None without MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return None if mpi is None else first_line(mpi.Get_library_version())


def first_line(library: str) -> str:
    """Return the begin of a library's version text, up to Open MPI's list of builders; "unknown": empty."""
    lines = library.replace("\0", "").strip().splitlines()  # C leaves zeros
    return lines[0].split(", package")[0].strip().replace("Open MPI v", "Open MPI ") if lines else "unknown"
