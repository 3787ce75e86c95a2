"""Write files that survive a crash: write, fsync, rename, under hidden names until then.

A crash may leave hidden siblings: ``.hvdtrain-tmp-*`` is rubbish; ``.hvdtrain-aside-*`` is an old, whole directory,
moved aside while a new one took its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint.manifest import FileEntry
from hvdtrain.core.units import format_bytes

CHUNK_BYTES = 4 * 2**20
FOREIGN_STALE_AFTER_S = 24 * 3600.0
"""Age at which a hidden directory of another host, whose processes cannot be seen, counts as left over."""

_HIDDEN = re.compile(r"\.hvdtrain-(tmp|aside)-([A-Za-z0-9.]+)-(\d{1,10})-([0-9a-f]{8})(?:-(.+))?", re.ASCII)
_DIRECTORY_FSYNC_UNKNOWN = (errno.EINVAL, errno.ENOTSUP)


@dataclass(frozen=True)
class Leftover:
    """A hidden directory: ``kind`` "tmp" or "aside", its maker, and the name that an aside one had."""

    path: Path
    kind: str
    host: str
    pid: int
    target: str


def write_durably(path: Path, pieces: Iterable[memoryview]) -> FileEntry:
    """Create ``path``, write ``pieces``, fsync; return size and SHA-256. OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK_BYTES):
                chunk = piece[start : start + CHUNK_BYTES]
                digest.update(chunk)
                write_all(descriptor, chunk)
            size_bytes += len(piece)
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)  # network filesystems report a full disk here, so this error counts
    return FileEntry(size_bytes, digest.hexdigest())


def write_or_link(path: Path, pieces: Iterable[memoryview], earlier: Path) -> FileEntry:
    """Do as `write_durably`; where the file ``earlier`` holds the same bytes, make ``path`` a hard link to it. OSError.

    Nothing is written up to the first byte that differs. File systems without hard links get a copy.
    """
    chunks = (piece[start:start + CHUNK_BYTES] for piece in pieces for start in range(0, len(piece), CHUNK_BYTES))
    try:
        descriptor = open_to_read(earlier)
    except OSError:
        return write_durably(path, chunks)
    digest, n = hashlib.sha256(), 0
    try:
        for chunk in chunks:
            if os.pread(descriptor, len(chunk), n) != chunk:
                return write_durably(path, itertools.chain(_start_of(descriptor, n), [chunk], chunks))
            digest.update(chunk)
            n += len(chunk)
        if os.fstat(descriptor).st_size != n:
            return write_durably(path, _start_of(descriptor, n))
        try:
            os.link(earlier, path, follow_symlinks=False)
        except OSError:
            return write_durably(path, _start_of(descriptor, n))
    finally:
        os.close(descriptor)
    return FileEntry(n, digest.hexdigest())


def _start_of(descriptor: int, n: int) -> Iterator[memoryview]:
    """Yield the first ``n`` bytes of a file, which have been read before. OSError."""
    at = 0
    while at < n:
        data = os.pread(descriptor, min(CHUNK_BYTES, n - at), at)
        if not data:
            raise OSError(errno.EIO, "the file became shorter")
        yield memoryview(data)
        at += len(data)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file; OSError for a link, a pipe or a device."""
    descriptor = open_to_read(path)
    try:
        while chunk := os.read(descriptor, CHUNK_BYTES):
            yield chunk
    finally:
        os.close(descriptor)


def open_to_read(path: Path) -> int:
    """Open a regular file; OSError for a link, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_into(path: Path, offset: int, memory: memoryview) -> None:
    """Fill ``memory`` with the bytes of a file from ``offset`` on. OSError, also where the file ends before."""
    descriptor = open_to_read(path)
    try:
        while len(memory):
            n = os.preadv(descriptor, [memory[:CHUNK_BYTES]], offset)
            if n <= 0:
                raise OSError(errno.EIO, "the file is shorter than it was", str(path))
            memory, offset = memory[n:], offset + n
    finally:
        os.close(descriptor)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the filesystem can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _DIRECTORY_FSYNC_UNKNOWN:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create ``path`` and its missing parents, each durable in its own parent."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    fsync_directory(path.parent)


def lock(directory: Path) -> int:
    """Lock a directory until its descriptor, which is returned, is closed; -1 on a file system without locks.

    BlockingIOError where another process or descriptor has it. The lock leaves no file and ends with its process.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return -1
    return descriptor


def free_bytes(directory: Path) -> int:
    """Return the bytes that this process may write into ``directory``, quotas aside. OSError."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise OSError(ENOSPC) where ``directory`` has less than ``needed_bytes`` free."""
    free = free_bytes(directory)
    if free < needed_bytes:
        text = (
            f"not enough space for a checkpoint: {format_bytes(free)} free; expected at least "
            f"{format_bytes(needed_bytes)}. Free some space, keep fewer checkpoints, or save elsewhere"
        )
        raise OSError(errno.ENOSPC, text, str(directory))


def make_temp(parent: Path) -> Path:
    """Create a hidden directory of this process in ``parent``; the umask decides who may read it."""
    path = parent / hidden_name("tmp")
    os.mkdir(path)
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file, which then replaces ``path`` atomically. OSError."""
    make_directories(path.parent)
    temp = make_temp(path.parent)
    try:
        yield temp / path.name
        fsync(temp / path.name)
        os.rename(temp / path.name, path)
        fsync_directory(path.parent)
    finally:
        remove_quietly(temp)


def publish(temp: Path, target: Path) -> None:
    """Give the finished directory ``temp`` the name ``target``; an old one stays until the new is durable.

    On an OSError before the renames are done the old one has its name back. A failing fsync of the parent is raised
    too: the new one then has its name and the old one stays aside, the disk's state being unknown.
    """
    aside = None
    if os.path.lexists(target):
        aside = target.with_name(hidden_name("aside", target.name))
        os.rename(target, aside)
    try:
        os.rename(temp, target)
    except BaseException:
        if aside is not None:
            with contextlib.suppress(OSError):
                os.rename(aside, target)
        raise
    fsync_directory(target.parent)
    if aside is not None:
        with contextlib.suppress(OSError):  # the save is done; what cannot be removed now is swept up later
            discard(aside)


def discard(path: Path) -> None:
    """Remove a directory, renamed to rubbish first, so that a crash half-way leaves no half checkpoint."""
    rubbish = path.with_name(hidden_name("tmp"))
    os.rename(path, rubbish)
    shutil.rmtree(rubbish)


def remove_quietly(path: Path) -> None:
    """Remove a temporary directory after a failure, whose error matters more."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path)


def leftovers(parent: Path) -> list[Leftover]:
    """Return the hidden directories of this package in ``parent``, by name, without links and files."""
    found = []
    for name in sorted(os.listdir(parent)):
        match = _HIDDEN.fullmatch(name)
        path = parent / name
        if not match or path.is_symlink() or not path.is_dir():
            continue
        kind, host, pid, _serial, target = match.groups()
        if (kind == "aside") == (target is not None):
            found.append(Leftover(path, kind, host, int(pid), target or ""))
    return found


def writer_is_gone(left: Leftover) -> bool:
    """Return whether a hidden directory's maker has ended, or is this process: one save runs at a time."""
    if left.host != _host():
        with contextlib.suppress(OSError):
            return time.time() - os.lstat(left.path).st_mtime > FOREIGN_STALE_AFTER_S
        return False
    if left.pid in (0, os.getpid()):
        return True
    try:
        os.kill(left.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def write_all(descriptor: int, chunk: memoryview) -> None:
    """Write all of ``chunk``, which a disk that fills up may take in parts. OSError."""
    while len(chunk):
        written = os.write(descriptor, chunk)
        if written <= 0:
            raise OSError(errno.EIO, "the filesystem took no bytes and gave no reason")
        chunk = chunk[written:]


def tree_bytes(directory: Path) -> int:
    """Return the bytes of the files in ``directory``; 0 where it cannot be read."""
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
    return 0


def hidden_name(kind: str, target: str = "", serial: str = "") -> str:
    """Return the name of a `Leftover` of this process; ``serial``: 8 hexadecimal digits, random by default."""
    name = f".hvdtrain-{kind}-{_host()}-{os.getpid()}-{serial or secrets.token_hex(4)}"
    return f"{name}-{target}" if target else name


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", ".", socket.gethostname())[:64] or "localhost"
