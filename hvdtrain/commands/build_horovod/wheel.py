"""Building a wheel (fetch, check, unpack, edit, compile) and the user's cache of wheels, $XDG_CACHE_HOME/hvdtrain."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.cluster.machine.software import Cuda, search_path
from hvdtrain.commands.build_horovod.child_log import SILENT_S, Display, logged
from hvdtrain.commands.build_horovod.plan import HOROVOD_VERSION, SDIST_SHA256, BuildPlan, apply_edits
from hvdtrain.core import user_cache
from hvdtrain.core.errors import UserError

DOWNLOAD_TIMEOUT_S = 600.0
COMPILE_TIMEOUT_S = 7200.0
_BUILD_NEEDS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "yaml", "cffi")
_MEMORY_PER_JOB = 2 << 30  # bytes; the TensorFlow sources peak near 2.4 GB, the others far below


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def default_jobs() -> int:
    """Return the number of compilers to run at once: one per processor, fewer where memory is short."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(cpus, 1 + memory // _MEMORY_PER_JOB))


def check_build_needs() -> None:
    """Raise `UserError` where a Python package that Horovod's setup.py imports is not installed."""
    missing = [name for name in _BUILD_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"got no {', '.join(missing)} in this environment", "what Horovod's setup.py imports",
                        'run pip install "hvdtrain[horovod]"')


def child_env(plan: BuildPlan) -> dict[str, str]:
    """Return this process's environment with the plan's over it, without other HOROVOD_* or language settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "LC_", "MAKEFLAGS"))}
    first = os.path.dirname(plan.facts.mpi.mpicxx) if plan.facts.mpi and plan.facts.mpi.mpicxx else ""
    env |= {"PATH": os.pathsep.join(filter(None, [first, search_path()])), "LC_ALL": "C",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return env | {k: v for k, v in plan.env.items() if v != ""}


def fetch_source(env: dict[str, str], log: Path) -> Path:
    """Return Horovod's source package, from the cache or through pip; `UserError` for another digest."""
    name = SOURCE
    kept = root() / "source" / name
    if kept.exists() and sha256_of(kept) == SDIST_SHA256:
        return kept
    with workspace() as work:
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation",
                "--no-cache-dir", "--no-binary", "horovod", "-d", str(work), f"horovod=={HOROVOD_VERSION}"]
        logged("fetching the source", argv, log, env, DOWNLOAD_TIMEOUT_S,
               Display("fetching the source", after_s=SILENT_S))
        got = sha256_of(work / name)
        if got != SDIST_SHA256:
            raise UserError(f"got a {name} whose SHA-256 is {got}", SDIST_SHA256,
                            "fetch it from a package index that you trust")
        os.replace(work / name, kept)
    return kept


def unpack(archive: Path, into: Path) -> Path:
    """Unpack a source package, refusing members outside ``into``; return its single top folder."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            target = (into / member.name).resolve()
            link = (target.parent / member.linkname).resolve() if member.issym() else target
            if not (target.is_relative_to(into.resolve()) and link.is_relative_to(into.resolve())):
                raise UserError(f"got {archive.name} with the member {member.name!r}",
                                "paths inside the package", "do not use this file")
            if not (member.isfile() or member.isdir() or member.issym()):
                raise UserError(f"got {archive.name} with the special member {member.name!r}",
                                "files and folders only", "do not use this file")
        tar.extractall(into)
    return next(p for p in into.iterdir() if p.is_dir())


def build(plan: BuildPlan, log: Path, jobs: int, display: Display) -> Path:
    """Compile the wheel of ``plan`` into the cache; the caller holds the key's lock. Errors: `ChildFailed`."""
    env = child_env(plan)
    log.write_text(f"# {plan.title()}\n" + "".join(f"# {k}={v}\n" for k, v in sorted(plan.env.items())))
    source = fetch_source(env, log)
    with workspace() as work:
        (work / "source").mkdir()
        tree = unpack(source, work / "source")
        apply_edits(tree)
        if plan.cuda:
            env |= stage(plan.facts.cuda, work / "toolkit")
        env |= {"MAKEFLAGS": f"-j{jobs}", "TMPDIR": str(work)}
        out = work / "wheel"
        out.mkdir()
        logged("the build", [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps",
                             "--no-cache-dir", "--no-index", "-w", str(out), str(tree)],
               log, env, COMPILE_TIMEOUT_S, display, cwd=work)
        return place(plan.key, out)


def install(wheel: Path, log: Path, env: dict[str, str]) -> None:
    """Install the wheel into this environment, replacing any Horovod that is there, and nothing else."""
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall",
            "--no-cache-dir", str(wheel)]
    logged("installing the wheel", argv, log, env, DOWNLOAD_TIMEOUT_S,
           Display("installing the wheel", after_s=SILENT_S))


def stage(cuda: Cuda, into: Path) -> dict[str, str]:
    """Link toolkit and NCCL under ``into``; return the environment that points every finder there."""
    home, nccl = into / "cuda", into / "nccl"
    home.mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        source = Path(cuda.home, name)
        if source.exists():
            (home / name).symlink_to(source)
    libs = [Path(cuda.home, d) for d in ("lib64", "lib", "targets/x86_64-linux/lib")]
    link_libraries([d for d in libs if d.is_dir()], home / "lib64")
    (home / "lib").symlink_to("lib64")
    nccl.mkdir()
    (nccl / "include").symlink_to(Path(cuda.nccl_home, "include"))
    places = [Path(cuda.nccl_home, d) for d in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    link_libraries([d for d in places if d.is_dir()], nccl / "lib", only="libnccl")
    env = {
        "CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home), "CUDAToolkit_ROOT": str(home),
        "CUDACXX": str(home / "bin" / "nvcc"), "HOROVOD_NCCL_HOME": str(nccl),
        "LIBRARY_PATH": os.pathsep.join([str(home / "lib64"), str(nccl / "lib")]),
    }
    cccl = home / "include" / "cccl"  # CUDA 13 moved the headers that cuda_fp16.h includes
    return env | ({"CPLUS_INCLUDE_PATH": str(cccl)} if cccl.is_dir() else {})


def link_libraries(sources: list[Path], into: Path, only: str = "lib") -> None:
    """Link each library that starts with ``only`` into ``into``, also under its name without a version number."""
    into.mkdir(parents=True)
    for library in (f for d in sources for f in sorted(d.iterdir()) if f.name.startswith(only)):
        for name in {library.name, re.sub(r"\.so\.[\d.]+$", ".so", library.name)}:
            if not (into / name).is_symlink():
                (into / name).symlink_to(library)


LOCK_TIMEOUT_S = 3600.0

SOURCE = f"horovod-{HOROVOD_VERSION}.tar.gz"
"""Horovod's source package, in the folder ``source``."""


def root() -> Path:
    """Return the cache folder, made where it is missing; `UserError` where it cannot be written."""
    path = user_cache()
    try:
        for name in ("wheels", "logs", "source"):
            (path / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"got a cache folder that cannot be made ({error})", "a writable folder",
                        "set XDG_CACHE_HOME to one") from error
    return path


def find(key: str) -> Path | None:
    """Return the cached wheel of ``key``, or None."""
    wheels = sorted((root() / "wheels" / key).glob("horovod-*.whl"))
    return wheels[0] if wheels else None


def place(key: str, built: Path) -> Path:
    """Move the folder ``built`` (on the cache's own file system) in as ``key``, replacing an older one."""
    home, old = root() / "wheels" / key, built.with_name(built.name + ".old")
    if home.exists():
        home.rename(old)
    built.rename(home)
    shutil.rmtree(old, ignore_errors=True)
    found = find(key)
    assert found is not None, f"{home} holds no wheel"
    return found


def take_over(folder: Path, key: str) -> Path | None:
    """Copy Horovod from the wheelhouse ``folder`` into the cache; return ``key``'s wheel or None. `UserError`."""
    if not folder.is_dir():
        raise UserError(f"got the wheelhouse {folder}, which does not exist", "a folder that make wheelhouse filled",
                        "correct WHEELHOUSE=DIR, or fill it on a host with network access: make wheelhouse "
                        "WHEELHOUSE=DIR")
    kept = root() / "source" / SOURCE
    if not kept.exists() and (folder / "horovod" / SOURCE).exists():
        copy(folder / "horovod" / SOURCE, kept)
    found = sorted((folder / "horovod" / key).glob("horovod-*.whl"))
    if found and find(key) is None:
        with workspace() as work:
            copy(found[0], work / "wheel" / found[0].name)
            place(key, work / "wheel")
    return find(key)


def copy(source: Path, target: Path) -> Path:
    """Copy a file whole or not at all; return ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, part)
    return part.replace(target)


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a folder to build in, on the cache's own file system (``place`` is one rename); remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root()) as path:
        yield Path(path)


@contextmanager
def lock(key: str, waiting=lambda: None, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold ``key`` against other builds of the same user; call ``waiting`` once if another one holds it.

    The kernel's lock ends with the process. Errors: `UserError` after ``timeout_s``.
    """
    path, deadline = root() / "wheels" / f".{key}.lock", time.monotonic() + timeout_s
    with path.open("w") as handle:
        said = False
        while not _try_lock(handle.fileno()):
            if not said:
                waiting()
                said = True
            if time.monotonic() > deadline:
                raise UserError(f"got no lock on {path} in {timeout_s:.0f} s", "the end of the other build",
                                "find the other `python -m hvdtrain build` and end it")
            time.sleep(0.2)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
