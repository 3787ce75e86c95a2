"""Catch a shortage of memory in a forward or backward, and refuse one that is foreseen. Callers decide what follows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.cluster.machine import memory
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.types import first_line
from hvdtrain.core.units import format_bytes

T = TypeVar("T")


def attempt(compute: Callable[[], T], out_of_memory: Callable[[BaseException], bool], free: Callable[[], None],
            caught: Callable[[Exception], None] | None = None) -> tuple[T | None, str]:
    """Return (what ``compute`` returns, ""), or (None, why) where memory did not suffice; not collective.

    ``out_of_memory``: whether an error, or what a `UserError` was made of, says that memory lacked; other errors pass
    through. ``free``: gives back what a framework keeps for itself. ``caught``: called with the error, in place of
    which it may raise another one.
    """
    try:
        return compute(), ""
    except Exception as error:
        causes = (error, error.__cause__) if isinstance(error, UserError) and error.__cause__ else (error,)
        short = next(filter(out_of_memory, causes), None)
        if short is None:
            raise
        if caught is not None:
            caught(error)
        why = first_line(short)
        del causes, short
    # Out of the handler: the error's frames, which hold the tensors of the pass, are gone by now.
    clean_up(free)
    return None, why


def attempt_halving(compute: Callable[[int], T], samples: int, out_of_memory: Callable[[BaseException], bool],
                    free: Callable[[], None], least: int = 1) -> tuple[T, int, str]:
    """Return (what ``compute(n)`` returns, n, why n is not ``samples``) for the first n of ``samples``, a half, a
    quarter, ... and ``least`` that memory suffices for; not collective.

    Errors: `UserError` where memory does not suffice for ``least``.
    """
    n, first = samples, ""
    while True:
        value, why = attempt(lambda: (compute(n),), out_of_memory, free)  # noqa: B023  (called at once)
        if value is not None:
            return value[0], n, first and f"out of memory with {samples} samples ({first})"
        first = first or why
        if n <= least:
            raise UserError(f"out of memory with {count(n, 'sample')} while the model is measured ({why})",
                            "memory for the model and one sample", "use a smaller model, precision bf16, or a device "
                            "with more memory")
        n = max(least, n // 2)


def clean_up(free: Callable[[], None]) -> None:
    """Give memory back that nothing needs. The error that told of its lack must be forgotten by now."""
    gc.collect()
    free()
    memory.give_back()


EVERY_S, RARELY = 0.25, 400
"""Micro-batches of a size that has run are looked at so often: others on the host may take more meanwhile. A look that
takes long, as where processor time is rationed, waits so many times as long for the next."""


class MemoryGuard:
    """Refuses a micro-batch that this host has no memory for: the kernel would end the process instead.

    ``local``: ranks of this host, which share what is left. ``estimated``: bytes of this process by samples of a
    micro-batch; None before one has run. ``held``, ``peak``, ``left``: bytes that it holds, has held at most, can
    still take.
    """

    def __init__(self, local: int = 1, held: Callable[[], int] = memory.resident_bytes,
                 peak: Callable[[], int] = memory.peak_resident_bytes,
                 left: Callable[[], int | None] = memory.left_alive_bytes) -> None:
        self.estimated: Callable[[int], int] | None = None
        self.off = False  # where no smaller micro-batch is an answer, no forecast ends a run
        self._local, self._held, self._peak, self._left = local, held, peak, left
        self._base = self._before = self._most = self._ran = 0
        self._next_look = float("-inf")

    def check(self, samples: int) -> None:
        """Raise `MemoryError` if a micro-batch of so many samples would take more than is left."""
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
        """Note the memory of a micro-batch that has run."""
        if samples > self._ran:
            self._most, self._ran = self._taken(samples), samples

    def _taken(self, samples: int) -> int:
        """Return the most bytes held since the first check, with micro-batches of so many samples.

        An earlier peak, of reading data say, hides all below it; then the estimate counts.
        """
        peak = self._peak()
        return peak if peak > self._before else max(self._held(), self.estimated(samples) if self.estimated else 0)

    def wanted(self, samples: int) -> int:
        """Return the bytes that this process will hold at most; 0 if unknown."""
        if self._ran:
            return self._base + (self._most - self._base) * samples // self._ran
        return self.estimated(samples) if self.estimated else 0
