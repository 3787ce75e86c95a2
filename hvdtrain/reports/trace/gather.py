"""The ranks' spans and clocks on their way to rank 0; collective, outside of steps."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.clocks import bounds, measure
from hvdtrain.core.protocols import Control
from hvdtrain.core.timeline.profiler import Span
from hvdtrain.reports.trace.align import Measured


def clock_name() -> str:
    """Return what tells this process' `time.perf_counter` from others: processes of one kernel read one clock."""
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip(), os.readlink("/proc/self/ns/time")]
    except OSError:
        pass
    return " ".join(parts)


def clocks(control: Control, names_P: Sequence[str], now: Callable[[], float] = time.perf_counter) -> list[Measured]:
    """Return by rank how far its clock is ahead of rank 0's, on every rank.

    ``names_P``: `clock_name` by rank; "" is like no other. Ranks that read one clock share the narrowest bounds, and
    those that read rank 0's have none to measure.
    """
    if all(name and name == names_P[0] for name in names_P):
        return [Measured(now(), 0.0, 0.0)] * control.size
    rounds = measure(control, now)
    read_P = control.gather(now())
    own_P = [bounds(rounds, rank) for rank in range(control.size)]
    found = []
    for rank, name in enumerate(names_P):
        alike = [own_P[r] for r in range(control.size) if r == rank or name and names_P[r] == name]
        least_s, most_s = max(low for low, _ in alike), min(high for _, high in alike)
        if rank == 0 or name and name == names_P[0]:
            least_s = most_s = 0.0
        found.append(Measured(read_P[rank], min(least_s, most_s), max(least_s, most_s)))
    return found


def to_root(control: Control, spans: Sequence[Span], about: dict[str, Any]) -> list[tuple[list[Span], dict[str, Any]]]:
    """Return each rank's ``spans`` and ``about`` by rank, on rank 0; [] elsewhere. No rank holds them but these two."""
    packed = zlib.compress(json.dumps([spans, about], separators=(",", ":")).encode(), 1)
    own = np.frombuffer(packed, np.uint8)
    sizes_P = control.gather(own.size)
    found = []
    for rank, size in enumerate(sizes_P):
        data = own.copy() if rank == control.rank else np.empty(size if control.rank == 0 else 0, np.uint8)
        if rank:
            control.send([data], rank, 0)
        if control.rank == 0:
            rows, told = json.loads(zlib.decompress(data.tobytes()))
            found.append(([Span(*row) for row in rows], told))
    return found
