"""Make files once that a data set needs beside its data (tokens, indexes), and keep them for later runs.

Owns the folder, the lock and the division of the work among processes. What is in such a file is left to its maker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.core.errors import UserError

WAIT_S = 1800.0  # longest wait for another process that makes the same file
_LOOK_S = 0.05


def user_cache(kind: str) -> Path:
    """Return $XDG_CACHE_HOME/hvdtrain/``kind``, or that of ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "hvdtrain", kind)


def folder_of(beside: Path, hidden: str, kind: str, cache: str, name: str,
              good: Callable[[Path], bool] = Path.exists) -> Path:
    """Return the folder of the file ``name``: ``cache``, else ``hidden`` in the folder ``beside``, else `user_cache`.

    ``beside`` is taken where it is writable or holds a ``good`` file already.
    """
    if cache:
        folder = Path(cache).expanduser()
        with contextlib.suppress(OSError):  # writing there will raise
            folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = beside / hidden
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK) or good(folder / name):
            return folder
    folder = user_cache(kind)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def alone(lock: Path, done: Callable[[], bool], doing: str, wait: bool = True) -> Iterator[bool]:
    """Hold ``lock`` for the body, or continue as soon as ``done()``; yields whether the body is to make the file.

    Without locks of the file system each process makes its own file. ``wait`` False: yield False at once where another
    process holds the lock. Errors: `UserError` after `WAIT_S`; ``doing``: of the other process, such as "tokenizing".
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        held = _locked(descriptor, lock, done, doing, wait)
        yield held is not False
        if held:
            with contextlib.suppress(OSError):
                lock.unlink()
    finally:
        os.close(descriptor)


def _locked(descriptor: int, lock: Path, done: Callable[[], bool], doing: str, wait: bool) -> bool | None:
    """Return True with the lock held, False where another process makes or made the file, None without locks."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return None
        if not wait or done():
            return False
        if time.monotonic() > until:
            raise UserError(f"another process has been {doing} for more than {WAIT_S:.0f} s, with {lock}",
                            "the end of that process", "end that process, or set data.args.cache to another folder")
        time.sleep(_LOOK_S)


def make_all(targets: list[Path], good: Callable[[int], bool], make: Callable[[int], None], doing: str) -> None:
    """Make each of ``targets`` that is not ``good(i)`` by ``make(i)``, divided among the processes that want them.

    A process first makes what no other one is making, then waits for the others. Errors: `UserError` as of `alone`.
    """
    start = os.getpid() % max(1, len(targets))
    left = [i for i in [*range(start, len(targets)), *range(start)] if not good(i)]
    for wait in (False, True):
        for i in left:
            lock = targets[i].with_name(f"{targets[i].name}.lock")
            with alone(lock, lambda: good(i), doing, wait) as mine:
                if mine and not good(i):
                    make(i)
        left = [i for i in left if not good(i)]
    if left:
        raise UserError(f"{targets[left[0]]} cannot be read right after it was written", "a file system that keeps "
                        "what is written", "set data.args.cache to a folder on another file system")
