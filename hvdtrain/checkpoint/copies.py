"""Host memory that a rank's state is copied into, kept from save to save: new pages would cost more than the copy.

Owns the count of what is held and the bound on it. Does not know what is copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdtrain.cluster.machine.memory import host_room_bytes


class NoRoom(Exception):
    """Host memory has no room for a copy of the state; ``needed_bytes`` were asked for so far, ``room_bytes`` left."""

    def __init__(self, needed_bytes: int, room_bytes: int) -> None:
        self.needed_bytes, self.room_bytes = needed_bytes, room_bytes
        super().__init__(f"{needed_bytes} bytes of {room_bytes}")


class Copies:
    """Gives the same memory for the same array in every save. ``bytes``: what it holds.

    ``local_size``: ranks of this host, which share its memory.
    """

    def __init__(self, local_size: int) -> None:
        self.bytes = 0
        self._local_size = local_size
        self._kept: dict[tuple[str, str], np.ndarray] = {}
        self._used: set[tuple[str, str]] = set()
        self._room_bytes = 0

    def begin(self) -> None:
        """Open a save: ask what room there is, and drop what the last one had no use for."""
        for key in set(self._kept) - self._used:
            self.bytes -= self._kept.pop(key).nbytes
        self._used = set()
        self._room_bytes = -1

    def place(self, group: str, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the memory for an array, implements `hvdtrain.core.protocols.run.Place`. `NoRoom`."""
        key, dtype = (group, name), np.dtype(dtype)
        kept = self._kept.get(key)
        if kept is None or kept.shape != shape or kept.dtype != dtype:
            self._take(math.prod(shape) * dtype.itemsize - (0 if kept is None else kept.nbytes))
            kept = self._kept[key] = np.empty(shape, dtype)
        self._used.add(key)
        return kept

    def forget(self) -> None:
        """Give all memory back."""
        self._kept, self._used, self.bytes = {}, set(), 0

    def _take(self, n_bytes: int) -> None:
        """Count new memory, which counts as used from here on though the system gives its pages later."""
        if self._room_bytes < 0:
            room = host_room_bytes(self._local_size)
            self._room_bytes = 2**62 if room is None else room
        if n_bytes > self._room_bytes:
            raise NoRoom(self.bytes + n_bytes, self._room_bytes)
        self._room_bytes -= n_bytes
        self.bytes += n_bytes


def view(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Ask for no copy; implements `hvdtrain.core.protocols.run.Place`."""


def fresh(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Give new memory for every copy; implements `hvdtrain.core.protocols.run.Place`."""
    return np.empty(shape, dtype)
