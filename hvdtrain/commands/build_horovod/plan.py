"""Build plan from the facts of a machine: environment, cache key, run path and the edits of Horovod's source. Pure."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cluster.machine.software import BuildFacts, Mpi
from hvdtrain.core.errors import UserError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_ENV_NAME = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}


@dataclass(frozen=True)
class BuildPlan:
    """``env``: the compiler's, over the caller's cleaned one. ``key``: of the cache. ``notes``: for the user."""

    facts: BuildFacts
    env: dict[str, str]
    key: str
    cuda: bool
    notes: tuple[str, ...] = ()

    @property
    def frameworks(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.facts.frameworks)

    @property
    def mpi(self) -> Mpi | None:
        """Return the MPI that is built in, or None for Gloo alone."""
        return self.facts.mpi if self.env["HOROVOD_WITH_MPI"] == "1" else None

    def title(self) -> str:
        """Return one line: what is built against what."""
        mpi = f"{self.mpi.flavour} {self.mpi.version}" if self.mpi else "no MPI (Gloo)"
        wire = f"NCCL {self.facts.cuda.nccl_version}, CUDA {self.facts.cuda.version}" if self.cuda else "CPU"
        names = ", ".join(f"{f.dist} {f.version}" for f in self.facts.frameworks)
        return f"horovod {HOROVOD_VERSION} for {self.facts.python_tag}, {names}, {mpi}, {wire}"


def plan(facts: BuildFacts, cpu_only: bool = False) -> BuildPlan:
    """Decide how to build Horovod for ``facts``; ``cpu_only`` leaves CUDA and NCCL out.

    Errors: `UserError` where there is no framework, or where a part of a GPU build is missing.
    """
    if not facts.frameworks:
        raise UserError("found no framework in this environment", "torch or tensorflow",
                        'run pip install "hvdtrain[torch]" or "hvdtrain[tensorflow]"')
    cuda, notes = _gpu_build(facts, cpu_only)
    mpi = facts.mpi is not None and bool(facts.mpi.mpicxx)
    if not mpi:
        notes += ("no MPI with a compiler (mpicxx) was found: Horovod is built with Gloo only",)
    env = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_WITH_MPI": "1" if mpi else ""}
    if not mpi:
        env["HOROVOD_WITHOUT_MPI"] = "1"
    names = {framework.name for framework in facts.frameworks}
    for name, word in _ENV_NAME.items():
        env[f"HOROVOD_WITH{'' if name in names else 'OUT'}_{word}"] = "1"
    env["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(facts.arch_flags)
    env["HVDTRAIN_RPATH"] = ";".join(run_path(facts, mpi, cuda))
    # CMake 4 refuses the old policy level of the Gloo that is bundled with Horovod unless it is told a floor.
    env["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    if cuda:
        env |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED",
                "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(facts.capabilities)}
    return BuildPlan(facts, env, cache_key(facts, env, mpi, cuda), cuda, notes)


def _gpu_build(facts: BuildFacts, cpu_only: bool) -> tuple[bool, tuple[str, ...]]:
    """Return whether to build with CUDA and NCCL, and notes for the user."""
    with_cuda = [f for f in facts.frameworks if f.cuda]
    if not facts.capabilities or cpu_only:
        return False, ()
    if not with_cuda:
        return False, ("this host has a GPU, but the frameworks are CPU builds, and so is this Horovod",)
    if len(with_cuda) < len(facts.frameworks):
        cpu = next(f for f in facts.frameworks if not f.cuda)
        raise UserError(f"got {with_cuda[0].dist} with CUDA and {cpu.dist} {cpu.version} without",
                        "both with CUDA or both without, since both use one Horovod",
                        "install the CUDA build of both, pass --frameworks with one name, or --cpu")
    parts = (("nvcc", facts.cuda.home), ("NCCL", facts.cuda.nccl_home))
    missing = " and no ".join(what for what, where in parts if not where)
    if missing:
        raise UserError(f"got a GPU (compute capability {', '.join(facts.capabilities)}) but no {missing}",
                        "a CUDA toolkit, and NCCL with its header",
                        "run pip install -r requirements/cuda-build.txt (NCCL comes with torch), or pass --cpu")
    return True, ()


def run_path(facts: BuildFacts, mpi: bool, cuda: bool) -> list[str]:
    """Return the folders that the built libraries search for libmpi and libnccl.

    Relative to themselves inside the environment: a cached wheel is installed into other environments too.
    """
    dirs = [facts.mpi.lib_dir] if mpi and facts.mpi and facts.mpi.lib_dir else []
    if cuda:
        dirs += [os.path.join(facts.cuda.nccl_home, "lib")]
    here = os.path.join(facts.site_dir, "horovod", "torch")  # horovod/tensorflow lies equally deep
    inside = facts.prefix.rstrip(os.sep) + os.sep
    return ["$ORIGIN/" + os.path.relpath(d, here) if (d + os.sep).startswith(inside) else d for d in dirs]


def cache_key(facts: BuildFacts, env: dict[str, str], mpi: bool, cuda: bool) -> str:
    """Return a folder name that is equal exactly when a wheel may be reused: readable parts, then a digest."""
    parts = [f"horovod-{HOROVOD_VERSION}", facts.python_tag]
    parts += [f"{f.dist}-{f.version}" for f in facts.frameworks]
    parts += [f"{facts.mpi.flavour}-{facts.mpi.version}" if mpi and facts.mpi else "gloo"]
    if cuda:
        capabilities = "-".join(facts.capabilities)
        parts += [f"cuda-{facts.cuda.version}-nccl-{facts.cuda.nccl_version}-sm-{capabilities}"]
    whole = json.dumps([parts, env, facts.platform, facts.libc, SDIST_SHA256, PATCH_LEVEL], sort_keys=True)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:10]
    return re.sub(r"[^A-Za-z0-9.+_-]", "-", "_".join([*parts, digest]))


PATCH_LEVEL = 1
"""Part of the cache key: raise it when an edit changes, so that no old wheel is used."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old`` with ``new``, once, in ``path`` (relative to the unpacked source); ``why`` is for the reader."""

    path: str
    old: str
    new: str
    why: str


EDITS = (
    Edit("CMakeLists.txt",
         "set(CMAKE_CXX_STANDARD 14)\n",
         "set(CMAKE_CXX_STANDARD 17)\n"
         'set(CMAKE_INSTALL_RPATH "$ENV{HVDTRAIN_RPATH}")\n'
         "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n",
         "the frameworks' headers are C++17; and the run path must not name the environment of the build"),
    Edit("horovod/torch/CMakeLists.txt",
         "set(CMAKE_CXX_STANDARD 14)\n",
         "set(CMAKE_CXX_STANDARD 17)\n",
         "PyTorch's headers are C++17"),
    Edit("horovod/tensorflow/CMakeLists.txt",
         'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
         "",
         "TensorFlow no longer ships the XLA headers that this file includes"),
)


def apply_edits(source_dir: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Apply every edit to ``source_dir``, or none; `UserError` where one does not apply exactly once."""
    texts = {path: _read(source_dir / path) for path in {e.path for e in edits}}
    for edit in edits:
        times = texts[edit.path].count(edit.old)
        if times != 1:
            raise UserError(f"got {edit.path} with {times} occurrences of {edit.old.strip()!r}",
                            "exactly one, as in Horovod 0.28.1",
                            "build from the unmodified source package; this edit no longer applies")
        texts[edit.path] = texts[edit.path].replace(edit.old, edit.new)
    for path, text in texts.items():
        (source_dir / path).write_text(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"got a source without {path.name} ({error.strerror}: {path})",
                        "the source package of Horovod 0.28.1",
                        "delete the cached source and try again") from error
