"""Keeps freed host memory in this process, so that the next step does not ask the system for the same pages again.

Owns that one setting of the C library. A step on a CPU frees all its activations at its end; glibc then gives the top
of its heap back, and blocks of some MiB at once, and the system clears each page anew when the next step touches it. On
the ResNet of `benchmarks step` these were 5000 page faults a step, 7 to 14 ms of the system's time on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

KEPT_BYTES = 1 << 30
"""Free memory that stays in the process before the heap is cut, and size from which a block is mapped by itself."""

LARGE_BYTES = 1 << 26
"""Parameters from which ZeRO lays memory out by `map_large` before it keeps what steps free."""

MAPPED_BYTES = 1 << 20
"""Size from which a block is mapped by itself meanwhile."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What malloc.h calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

LARGEST_KEPT_BYTES = 1 << 24
"""Size from which a block of a large model under ZeRO is always mapped by itself."""

_mapping = False

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Keep up to `KEPT_BYTES`; return whether that took effect. Not where the environment says otherwise, nor outside
    of glibc; an allocator that was preloaded in its place goes on as it does.
    """
    if any(name in os.environ for name in _OWN):
        return False
    mallopt = _glibc("mallopt")
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, KEPT_BYTES))


@contextlib.contextmanager
def kept_freed() -> Iterator[None]:
    """Within it memory is kept as by `keep_freed`, that what is timed costs what it will in a step; then given back.

    Afterwards blocks are mapped as by `map_large`: to be used before `keep_freed`, not within it.
    """
    kept = keep_freed()
    try:
        yield
    finally:
        if kept:
            map_large()
            give_back()


def map_large(settles: bool = False) -> bool:
    """Map blocks of `MAPPED_BYTES` and more by themselves; return whether that took effect.

    ``settles``: until `settled`. Undoes `keep_freed`, for as long as blocks are made that stay (an optimizer's state in
    its first step) among such that go (gradients): what is freed between blocks that stay is no use to larger ones. It
    costs the system's clearing of pages, about 0.25 ms a MiB.
    """
    global _mapping
    if any(name in os.environ for name in _OWN):
        return False
    mallopt = _glibc("mallopt")
    done = bool(mallopt(_TRIM_THRESHOLD, MAPPED_BYTES) and mallopt(_MMAP_THRESHOLD, MAPPED_BYTES))
    _mapping = done and settles
    return done


def settled() -> bool:
    """Keep what is freed from now on, where `map_large` has taken effect; return whether it had.

    What stays has been made by now, each block in a place of its own. Not blocks of `LARGEST_KEPT_BYTES` and more: a
    small block in the gap that one left would keep the next one out of it.
    """
    global _mapping
    found, _mapping = _mapping, False
    mallopt = _glibc("mallopt")
    return found and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES))


def give_back() -> None:
    """Give all free memory back to the system, so that what this process holds is what it uses; where glibc is."""
    _glibc("malloc_trim")(0)


def _glibc(name: str) -> Callable[..., int]:
    """A function of glibc; one that does nothing and returns 0 where there is none."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return found
    except (OSError, AttributeError):
        return lambda *_: 0
