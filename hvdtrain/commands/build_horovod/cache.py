"""The user's cache of built wheels: where it is, one lock per key, and folders that appear whole or not
at all.

Owns $XDG_CACHE_HOME/hvdtrain. Does not build.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.commands.build_horovod.plan import HOROVOD_VERSION
from hvdtrain.core.errors import UserError

LOCK_TIMEOUT_S = 3600.0

SOURCE = f"horovod-{HOROVOD_VERSION}.tar.gz"
"""Horovod's source package, in the folder ``source``."""


def root() -> Path:
    """The cache folder, made where it is missing; UserError where it cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base, "hvdtrain")
    try:
        for name in ("wheels", "logs", "source"):
            (path / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"got a cache folder that cannot be made ({error})", "a writable folder",
                        "set XDG_CACHE_HOME to one") from error
    return path


def find(key: str) -> Path | None:
    """The cached wheel of ``key``, or None."""
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
    """Copy what the wheelhouse ``folder`` has of Horovod in where it is missing; the wheel of ``key``, or None.

    UserError where there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"got the wheelhouse {folder}, which is not there", "a folder that make wheelhouse filled",
                        "correct WHEELHOUSE=DIR, or fill it where there is a network: make wheelhouse WHEELHOUSE=DIR")
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
    """Copy a file whole or not at all; returns ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, part)
    return part.replace(target)


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder to build in, on the cache's own file system (``place`` is one rename); removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root()) as path:
        yield Path(path)


@contextmanager
def lock(key: str, waiting=lambda: None, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold ``key`` against other builds of the same user; calls ``waiting`` once if another one holds it.

    The lock is the kernel's: it ends with the process, however that ends. UserError after ``timeout_s``.
    """
    path, deadline = root() / "wheels" / f".{key}.lock", time.monotonic() + timeout_s
    with path.open("w") as handle:
        said = False
        while not _try_lock(handle.fileno()):
            if not said:
                waiting()
                said = True
            if time.monotonic() > deadline:
                raise UserError(f"got no lock on {path} in {timeout_s:.0f} s", "the other build to end",
                                "look for another `python -m hvdtrain build` and end it")
            time.sleep(0.2)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
