"""How to wait for something that has to be polled: quick where it comes soon, cheap where it does not.

A rank that spins while it waits takes a core from its neighbours, and where its processor time is rationed (a control
group's quota) the time that it needs next. Owns the order of spinning, yielding and sleeping.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPINS = 50
"""Polls before a wait begins to let other processes run."""

AWAKE_S = 200e-6
"""How long a wait polls before it sleeps. Longer than a sleep lasts (50 us of timer slack more than asked for), or two
ranks that once slept would keep each other asleep at every later call."""

FIRST_SLEEP_S = 20e-6


def wait_for(test: Callable[[], bool], limit_s: float = float("inf"), longest_sleep_s: float = 200e-6) -> bool:
    """Poll ``test`` until it is true; False once ``limit_s`` have passed.

    Spins at first, then yields the core between polls, then sleeps 20 us, growing to ``longest_sleep_s``.
    """
    for _ in range(SPINS):
        if test():
            return True
    started = time.monotonic()
    while time.monotonic() - started < AWAKE_S:
        if test():
            return True
        os.sched_yield()
    pause_s = FIRST_SLEEP_S
    while not test():
        if time.monotonic() - started > limit_s:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_sleep_s)
    return True
