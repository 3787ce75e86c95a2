"""What a forward and backward pass holds from one operation to the next, by the number of samples; pure.

A pass of n samples runs the same operations as one of m, each on tensors that grow with the samples by a line. Two
small passes so tell what every moment of a large one holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MemoryTrace:
    """A pass of ``samples``: ``live_E`` bytes after each of E allocations, without the gradients of parameters.

    ``made``: (how many allocations were before it, index of the parameter) for each gradient, in order.
    """

    samples: int
    live_E: np.ndarray
    made: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryLine:
    """Bytes at each moment of a pass of any number of samples, by two traces: ``base_E`` + n x ``slope_E``."""

    base_E: np.ndarray
    slope_E: np.ndarray
    made: tuple[tuple[int, int], ...]

    def live_E(self, samples: float) -> np.ndarray:
        """Return the bytes of a pass of so many samples, without gradients; none are below 0."""
        return np.maximum(0.0, self.base_E + samples * self.slope_E)

    def peak(self, samples: float, held_E: np.ndarray | float = 0.0) -> int:
        """Return the most bytes of a pass, with ``held_E`` beside them at each moment."""
        live_E = self.live_E(samples) + held_E
        return int(live_E.max()) if live_E.size else 0


def line(small: MemoryTrace, large: MemoryTrace) -> MemoryLine:
    """Return the line through two traces; through their peaks alone where they differ in more than sizes.

    So does a pass that takes other operations for other sizes. Of one size twice it is a multiple of the samples.
    """
    a, b = small, large
    if len(a.live_E) != len(b.live_E) or a.made != b.made:
        ends = tuple((1, i) for _, i in b.made)
        a, b = (MemoryTrace(t.samples, np.array([t.live_E.max(initial=0)]), ends) for t in (a, b))
    if a.samples == b.samples:
        return MemoryLine(np.zeros(len(b.live_E)), b.live_E / max(1, b.samples), b.made)
    slope_E = (b.live_E - a.live_E) / float(b.samples - a.samples)
    return MemoryLine(a.live_E - a.samples * slope_E, slope_E, b.made)


def first_copies(made: Sequence[tuple[int, int]], n_events: int, param_bytes: Sequence[int],
                 groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return int64 (E,): bytes of gradients that wait at each moment until all of their group have been made.

    ``groups``: parameters by bucket: when the last of a bucket is there, all are copied into it and let go. Without
    groups gradients stay. The last group is taken in when backward has ended.
    """
    held_E = np.zeros(n_events + 1, np.int64)
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    missing = [set(group) for group in groups]
    waiting = [0] * len(groups)
    for at, i in made:
        held_E[min(at, n_events)] += param_bytes[i]
        if i not in group_of:
            continue
        g = group_of[i]
        waiting[g] += param_bytes[i]
        missing[g].discard(i)
        if not missing[g] and g + 1 < len(groups):  # let go after the next allocation at the earliest
            held_E[min(at + 1, n_events)] -= waiting[g]
    found_E: np.ndarray = np.cumsum(held_E)[:n_events] if n_events else held_E[:0]
    return found_E
