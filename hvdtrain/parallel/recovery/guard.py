"""Refuses a micro-batch that this host has no room for: the kernel would not, and end the process in its midst.

Owns the comparison before each micro-batch: what the process will hold at most, as reckoned at the start and then as
seen, less what it holds already, against what its host and its control groups leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.cluster.machine import memory
from hvdtrain.core.units import format_bytes

EVERY_S, RARELY = 0.25, 400
"""Micro-batches of a size that has run are looked at so often: others on the host may take more meanwhile. A look that
takes long, as where processor time is rationed, waits so many times as long for the next."""


class MemoryGuard:
    """``local``: ranks of this host, each of which counts on its part of what is left.

    ``reckoned``: bytes that this process holds at most with micro-batches of so many samples; None: nobody knows
    before one has run. ``held``, ``peak``, ``left``: bytes that it holds now, has held at most, and can still have.
    """

    def __init__(self, local: int = 1, held: Callable[[], int] = memory.resident_bytes,
                 peak: Callable[[], int] = memory.peak_resident_bytes,
                 left: Callable[[], int | None] = memory.left_alive_bytes) -> None:
        self.reckoned: Callable[[int], int] | None = None
        self.off = False  # where no smaller micro-batch is an answer, no forecast ends a run
        self._local, self._held, self._peak, self._left = local, held, peak, left
        self._base = self._before = self._most = self._ran = 0
        self._next_look = float("-inf")

    def check(self, samples: int) -> None:
        """Raise `MemoryError` where a micro-batch of so many samples would take more than there is."""
        if self.off:
            return
        now = time.monotonic()
        if samples <= self._ran and now < self._next_look:
            return
        held, left = self._held(), self._left()
        if not self._ran:
            self._base, self._before = held, self._peak()
        else:
            self._base = min(self._base, held)  # what was measured at the start may have left something behind
            self._most = max(self._most, self._taken(self._ran))  # the optimizer's state came with the first update
        took_s = time.monotonic() - now
        self._next_look = now + max(EVERY_S, RARELY * took_s)
        wanted = self.wanted(samples) - held
        if left is not None and wanted > left // self._local:
            ranks = f" for {self._local} ranks" if self._local > 1 else ""
            raise MemoryError(f"a micro-batch of {samples} would take {format_bytes(wanted)} more than this process "
                              f"holds, and {format_bytes(left)} is left{ranks}")

    def ran(self, samples: int) -> None:
        """Take note of what a micro-batch has taken that `check` let pass."""
        if samples > self._ran:
            self._most, self._ran = self._taken(samples), samples

    def _taken(self, samples: int) -> int:
        """Return the most bytes that were held since the first look, with micro-batches of so many samples.

        A peak from before, of the reading of data say, hides all below it; then what is held and was reckoned counts.
        """
        peak = self._peak()
        return peak if peak > self._before else max(self._held(), self.reckoned(samples) if self.reckoned else 0)

    def wanted(self, samples: int) -> int:
        """Return the bytes that this process will hold at most; 0 where nobody knows."""
        if self._ran:
            return self._base + (self._most - self._base) * samples // self._ran
        return self.reckoned(samples) if self.reckoned else 0
