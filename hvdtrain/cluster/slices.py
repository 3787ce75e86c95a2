"""A short time slice for a thread that often has a moment's work and must not wait for it.

Where threads that compute fill all cores, one that moves messages would get a core at the next tick of the clock only,
after up to 4 ms, and the link would stand still until then. A thread with a short slice gets its core when it wakes,
and has to leave it as soon; its share of the processor stays what it was. Linux since 6.12; earlier ones take no
notice.
Source: sched_setattr(2); "EEVDF: custom slices", Linux 6.12.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

SLICE_NS = 100_000
"""The shortest that Linux gives."""

_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call, which has no name in Python nor in every C library."""


def shorten() -> bool:
    """Ask for a short slice for this thread; return whether the system has taken it. Needs no right."""
    number = _SETATTR.get(os.uname().machine)
    if number is None:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation.
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, _nice(), 0, SLICE_NS, 0, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)) == 0
    return False


def _nice() -> int:
    """This thread's priority, which is to stay."""
    return os.getpriority(os.PRIO_PROCESS, 0)
