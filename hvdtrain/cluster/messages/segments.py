"""Memory that the ranks of one host share: how it is made, and how it is cut into vectors.

A segment is an anonymous file in memory (memfd): it has no name to leak, does not count against /dev/shm, and is gone
with its last process, however that ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN_BYTES = 16


@dataclass(frozen=True)
class Layout:
    """How shared memory is cut: a choice for each of the L ranks of this host, then for each S vectors of n elements.

    ``number``: of the memory, the same on every rank.
    """

    L: int
    slots: int
    n: int
    dtype: str
    number: int

    @property
    def row_bytes(self) -> int:
        """Of one vector, in whole pages: no two ranks' vectors on one page."""
        return _pages(self.n * np.dtype(self.dtype).itemsize)

    @property
    def begin(self) -> int:
        """Where the vectors begin."""
        return _pages(8 * self.L)

    def chosen_L(self, raw: np.ndarray) -> np.ndarray:
        """Which vector each rank hands to a sum."""
        return raw[:8 * self.L].view(np.int64)

    def rows_LSN(self, raw: np.ndarray) -> np.ndarray:
        """The vectors."""
        rows = raw[self.begin:self.begin + self.L * self.slots * self.row_bytes]
        own = self.n * np.dtype(self.dtype).itemsize
        return rows.reshape(self.L, self.slots, self.row_bytes)[:, :, :own].view(self.dtype)


class SharedUnavailable(Exception):
    """The ranks of a host cannot share memory; ``reason`` says why. Raised on every rank of the job."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold ``nbytes``."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_of(host: Any, nbytes: int) -> tuple[mmap.mmap | None, str]:
    """Memory of ``nbytes`` zeros that all ranks of ``host`` map, or (None, why not). Collective over ``host``.

    Rank 0 makes the file and writes a random token at its start; the others open it through /proc and must find the
    token there, since in another PID namespace the path means another process.
    """
    first, fd, reason = host.Get_rank() == 0, -1, ""
    path, token = "", b""
    if first:
        try:
            fd = os.memfd_create("hvdtrain-gradients")
            os.ftruncate(fd, max(nbytes, TOKEN_BYTES))
            token = secrets.token_bytes(TOKEN_BYTES)
            os.pwrite(fd, token, 0)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        except (OSError, AttributeError) as error:
            reason = f"no shared memory can be made: {error}"
    path, token = host.bcast((path, token))
    memory = None
    try:
        if path and not first:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path:
            memory = mmap.mmap(fd, max(nbytes, TOKEN_BYTES))
            if memory[:TOKEN_BYTES] != token:
                memory, reason = None, "the ranks of a host do not see the same processes (PID namespaces)"
    except (OSError, ValueError) as error:
        reason = f"a rank cannot open the memory of another: {error}"
    host.Barrier()  # all have looked: the file may be closed, and the token overwritten
    if fd >= 0:
        os.close(fd)
    if first and memory is not None:
        memory[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
    host.Barrier()
    return memory, reason
