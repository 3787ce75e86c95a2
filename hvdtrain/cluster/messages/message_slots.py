"""Memory without a name (memfd) that one process writes and another one maps: `MessageSlot`, `opened`, `freed_with`.

Owns the limit of open files. `hvdtrain.cluster.messages.shared_memory` decides which messages use a slot.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import weakref
from collections.abc import Iterator

import numpy as np

from hvdtrain.core.errors import UserError

SLOT_HEAD = 64
"""Bytes before a message in its slot: a word that is 1 while the slot is taken."""
_FILES = 1 << 16
"""Open files that a process asks for at most: a kept message takes two of its sender and one of its receiver."""


def more_files() -> None:
    """Let this process open as many files as it may: often that is 1024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def files_limited() -> Iterator[None]:
    """Raise `UserError` where no more files may be opened."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise UserError(f"shared memory for a message cannot be opened ({error.strerror})",
                        "a limit of open files above three for each micro-batch, or DataLoader batch, in flight",
                        "raise it (ulimit -n), or set fewer pipeline.micro_batches, pipeline.order: 1f1b, or a smaller "
                        "prefetch_factor") from None


class MessageSlot:
    """Memory of this rank for one message to one rank: ``number`` among all of this rank's, ``words``, ``data``.

    The receiver maps it and reads the message where it lies; it is free once the receiver drops the message.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, 1 << (nbytes - 1).bit_length()  # memory that nobody touches is not there
        with files_limited():
            self.fd = os.memfd_create("hvdtrain-message")
            os.ftruncate(self.fd, SLOT_HEAD + self.nbytes)
            memory = mmap.mmap(self.fd, SLOT_HEAD + self.nbytes)
        self.words = np.frombuffer(memory, np.int64, 1)
        self.data = np.frombuffer(memory, np.uint8, offset=SLOT_HEAD)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def freed_with(memory: mmap.mmap, nbytes: int) -> np.ndarray:
    """Return the message in a slot, uint8[nbytes], whose slot is free again once the message and its views are gone."""
    data = np.frombuffer(memory, np.uint8, nbytes, SLOT_HEAD)
    # Views of the array keep it, not its memory alone: it goes with the last of them.
    weakref.finalize(data, _free, np.frombuffer(memory, np.int64, 1), os.getpid()).atexit = False
    return data


def _free(words: np.ndarray, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has copies of the messages, and the original may still be read
        words[0] = 0


def opened(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map a file that another process has open."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)
