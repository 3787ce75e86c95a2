"""Several arrays as one message: where each lies in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ALIGNED = 64
"""Each part begins at a multiple of it: what TensorFlow reads without a copy, and a line of the cache."""

ROOM = 64
"""Messages of one sender, receiver and kind that may be under way; who sends one more waits."""


KINDS = ("outputs", "gradients of outputs", "outputs in evaluation", "measured messages")
"""What messages are of, by their tag, in words for who waits for them."""


def begins(parts: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return where each part begins, in bytes, and the bytes of the whole message."""
    places, total = [], 0
    for part in parts:
        places.append(total)
        total += -(-part.nbytes // ALIGNED) * ALIGNED
    return places, total


def copied(parts: Sequence[np.ndarray], places: Sequence[int], into: np.ndarray) -> None:
    """Copy the contiguous ``parts`` to their places in ``into``, uint8 (n,)."""
    for part, place in zip(parts, places, strict=True):
        assert part.flags.c_contiguous, "a channel moves contiguous arrays"
        into[place:place + part.nbytes] = part.reshape(-1).view(np.uint8)


def room_for(nbytes: int) -> np.ndarray:
    """Return memory for a message, uint8 (nbytes,), that begins at a multiple of `ALIGNED`."""
    memory = np.empty(nbytes + ALIGNED, np.uint8)
    at = -memory.ctypes.data % ALIGNED
    return memory[at:at + nbytes]
