"""The tokens of text files, made once and kept in a ``.npy`` file that all ranks of a host map.

Owns the kept file: its name (from the files' sizes and times and from the tokenizer), the lock that has one process
make it, and that it appears whole or not at all. Enters no collective: ranks meet at the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.tokenizer import Tokenizer, files_stamp

FOLDER = ".hvdtrain-tokens"
WAIT_S = 1800.0
"""Longest wait for another process that makes the same file."""

_LOOK_S = 0.05
_VERSION = 1  # of how tokens are made and kept
_HEADER = 128


def kept(paths: list[bytes], tokenizer: Tokenizer, beside: Path, cache: str = "") -> Path:
    """Return the file with the tokens of ``paths``, one after the other, as uint16 or uint32; make it if need be.

    It lies in ``cache``, or in `FOLDER` of the folder ``beside``, or, where that cannot be written to, in
    $XDG_CACHE_HOME/hvdtrain/tokens. Errors: `UserError` where none of these can be written to, where another process
    takes longer than `WAIT_S`, and of `Tokenizer.numbers`.
    """
    stamp = files_stamp(paths)
    key = hashlib.sha256(json.dumps([_VERSION, stamp, tokenizer.identity]).encode()).hexdigest()[:24]
    folder = _folder(beside, cache, f"{key}.npy")
    target = folder / f"{key}.npy"
    if target.exists():
        return target
    try:
        with _alone(folder / f"{key}.lock", target):
            if not target.exists():
                _write(target, paths, tokenizer)
                if files_stamp(paths) != stamp:
                    target.unlink()
                    raise UserError("the text files have changed while they were read", "files that stay as they are",
                                    "start again when nothing writes to them")
    except OSError as error:
        raise UserError(f"the tokens cannot be kept in {folder}: {error.strerror or error}",
                        "a folder with room, that can be written to", "set data.args.cache to one") from None
    return target


def opened(path: str) -> np.ndarray:
    """A map of a kept file; `UserError` where it is gone or is something else."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"it holds {tokens.dtype}{list(tokens.shape)}")
    except (OSError, ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"the tokens in {path} cannot be read: {getattr(error, 'strerror', None) or error}",
                        "what a run has written there", "remove the file, to have it made anew") from None
    return tokens


def _folder(beside: Path, cache: str, name: str) -> Path:
    """Where the file ``name`` is or can be."""
    if cache:
        folder = Path(cache).expanduser()
        with contextlib.suppress(OSError):  # which writing there will tell
            folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = beside / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        if (folder / name).exists() or os.access(folder, os.W_OK):
            return folder
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base, "hvdtrain", "tokens")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _alone(lock: Path, target: Path) -> Iterator[None]:
    """Hold ``lock``, or go on as soon as ``target`` is there; a process that ends lets go of it.

    On a file system without locks nobody waits: each makes a file of its own, and the last one stays.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        held = _locked(descriptor, lock, target)
        yield
        if held:
            with contextlib.suppress(OSError):
                lock.unlink()
    finally:
        os.close(descriptor)


def _locked(descriptor: int, lock: Path, target: Path) -> bool:
    """Wait for the lock; whether this process has it."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
        if target.exists():
            return False
        if time.monotonic() > until:
            raise UserError(f"another process has made tokens for more than {WAIT_S:.0f} s, with {lock}",
                            "it to end", "end that process, or set data.args.cache to another folder")
        time.sleep(_LOOK_S)


def _write(target: Path, paths: list[bytes], tokenizer: Tokenizer) -> None:
    """Write the tokens to a file of another name, then give it this one."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    draft = target.with_name(f".{target.stem}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(bytes(_HEADER))
            count = 0
            for path in paths:
                for numbers in tokenizer.numbers(path):
                    file.write(numbers.astype(dtype).tobytes())
                    count += len(numbers)
            file.seek(0)
            file.write(_header(dtype, count))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _header(dtype: Any, count: int) -> bytes:
    """The first `_HEADER` bytes of a ``.npy`` file, version 1.0: numpy/lib/format.py has the format."""
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": (count,)}).encode()
    return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11) + b"\n"
