"""The order in which the stages of a split model compute the parts of a micro-batch, and how long they wait.

Owns GPipe's schedule and its bubble; pure. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Slot(NamedTuple):
    """At ``clock`` stage ``stage`` computes part ``micro``; ``phase``: forward or backward."""

    clock: int
    stage: int
    micro: int
    phase: str


def gpipe(stages: int, micros: int) -> list[Slot]:
    """All parts forward, then all backward, the last part first; by clock, then stage.

    Slots of one clock run at the same time; 2 (M + S - 1) clocks in all. Source: Huang et al. 2019, arXiv 1811.06965.
    """
    half = micros + stages - 1
    slots = [Slot(m + s, s, m, FORWARD) for s in range(stages) for m in range(micros)]
    slots += [Slot(half + (micros - 1 - m) + (stages - 1 - s), s, m, BACKWARD)
              for s in range(stages) for m in range(micros)]
    return sorted(slots)


def waits_for(slot: Slot, stages: int, micros: int) -> list[tuple[int, int, str]]:
    """(stage, micro, phase) of what must have ended before ``slot``: its input, and the slot before on its device."""
    _, s, m, phase = slot
    if phase == FORWARD:
        return ([(s - 1, m, FORWARD)] if s else []) + ([(s, m - 1, FORWARD)] if m else [])
    after = [(s + 1, m, BACKWARD)] if s < stages - 1 else []
    return after + [(s, m + 1, BACKWARD) if m < micros - 1 else (s, m, FORWARD)]


def bubble(stages: int, micros: int) -> float:
    """Part of all devices' time that they wait, where all stages take equally long: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (micros + stages - 1)


def bubble_of(cost_s: Sequence[float], micros: int) -> float:
    """Part of all devices' time that they wait, with a cost for each stage: 1 - M sum(c) / (S (sum(c) + (M-1) max(c))).

    The slowest stage sets the pace; the others fill and drain the line. The same split of forward and backward for all.
    """
    total_s, slowest_s = sum(cost_s), max(cost_s)
    if total_s <= 0:
        return bubble(len(cost_s), micros)
    return 1 - micros * total_s / (len(cost_s) * (total_s + (micros - 1) * slowest_s))


def measured_bubble(stages: int, micros: int, begin_s: float, ends_s: Sequence[float]) -> float:
    """Part of all devices' time that they waited; ``ends_s``: when each slot of `gpipe` ended, in its order.

    A slot is taken to begin when all it waits for has ended.
    """
    slots = gpipe(stages, micros)
    assert len(slots) == len(ends_s), "an end for each slot"
    end_of = {slot[1:]: end_s for slot, end_s in zip(slots, ends_s)}
    busy_s = 0.0
    for slot in slots:
        ready_s = max([begin_s, *(end_of[before] for before in waits_for(slot, stages, micros))])
        busy_s += max(0.0, end_of[slot[1:]] - ready_s)
    span_s = max(ends_s) - begin_s
    return max(0.0, 1 - busy_s / (stages * span_s)) if span_s > 0 else 0.0
