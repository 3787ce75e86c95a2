"""How long to train between two saves, from what a save costs. Pure."""

from __future__ import annotations

import math

FIRST_S = 60.0
"""When the first save of a run is made whose cost nobody knows yet; runs of seconds save at their end only."""

PART = 0.03
"""Part of the time that saves may cost."""

LEAST_S = 60.0
"""Shortest interval where no time between failures is given: more often would save too little."""

DISTANCE = 1.5
"""A save begins this many times as long after the last one as that took, so that it need not wait for it."""


def interval_s(cost_s: float, took_s: float, mtbf_s: float = 0.0) -> float:
    """Return the seconds from the begin of a save to the next one.

    ``cost_s``: what a save costs the run, its training blocked and its threads' processor time. ``took_s``: how long it
    took to be on the disk. ``mtbf_s``: mean time between failures, 0 if unknown; with it the interval that loses least,
    sqrt(2 * cost * MTBF) (Young 1974, Daly 2006). Never so short that saves cost more than `PART` of the time.
    """
    wanted_s = math.sqrt(2 * cost_s * mtbf_s) if mtbf_s else LEAST_S
    return max(wanted_s, cost_s / PART, DISTANCE * took_s)
