"""When the devices of a split model compute the parts of a micro-batch, and how long they wait.

Owns the clocks of GPipe's order, which `hvdtrain.planning.pipeline.orders` has, and its bubble; pure. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple

from hvdtrain.planning.pipeline import orders
from hvdtrain.planning.pipeline.orders import FORWARD
from hvdtrain.planning.pipeline.predict import Step, play


class Slot(NamedTuple):
    """At ``clock`` stage ``stage`` computes part ``micro``; ``phase``: forward or backward."""

    clock: int
    stage: int
    micro: int
    phase: str


@cache
def gpipe(stages: int, micros: int) -> tuple[Slot, ...]:
    """All parts forward, then all backward, the last part first; by clock, then stage.

    Slots of one clock run at the same time; 2 (M + S - 1) clocks in all.
    """
    ended = _played([2.0] * stages, micros, 0.5).ended_s
    return tuple(sorted(Slot(int(end) - 1, stage, micro, phase) for (phase, stage, micro), end in ended.items()))


def bubble(cost_s: Sequence[float], micros: int) -> float:
    """Part of all devices' time that they wait, with a cost for each stage: 1 - M sum(c) / (S (sum(c) + (M-1) max(c))).

    The slowest stage sets the pace; the others fill and drain the line. With equal costs (S - 1) / (M + S - 1).
    """
    return _played(cost_s if sum(cost_s) > 0 else [1.0] * len(cost_s), micros, 0.5).idle_share


def _played(cost_s: Sequence[float], micros: int, forward: float) -> Step:
    """GPipe's order played through; ``forward``: the part of each cost that is forward's."""
    each = [orders.gpipe(stage, len(cost_s), 1, micros) for stage in range(len(cost_s))]
    return play(each, [forward * cost for cost in cost_s], [(1 - forward) * cost for cost in cost_s])


def measured_bubble(devices: Sequence[Hashable], micros: int, begin_s: float, ends_s: Sequence[float]) -> float:
    """Part of all devices' time that they waited; ``ends_s``: when each slot of `gpipe` ended, in its order.

    ``devices``: that of each stage; stages on one take turns, so that with k of them at least 1 - 1/k is lost. A slot
    is taken to begin when all it waits for has ended: its input, and the slot before on its device.
    """
    slots = gpipe(len(devices), micros)
    assert len(slots) == len(ends_s), "an end for each slot"
    end_of = {slot[1:]: end_s for slot, end_s in zip(slots, ends_s)}
    turn_s = end_of[len(devices) - 1, micros - 1, FORWARD]
    busy_s, free_s = 0.0, dict.fromkeys(devices, begin_s)
    for (stage, micro, phase), end_s in sorted(end_of.items(), key=lambda item: item[1]):
        forth = phase == FORWARD
        input_s = end_of.get((stage - 1 if forth else stage + 1, micro, phase), begin_s if forth else turn_s)
        busy_s += max(0.0, end_s - max(input_s, free_s[devices[stage]]))
        free_s[devices[stage]] = end_s
    span_s = max(ends_s) - begin_s
    return max(0.0, 1 - busy_s / (len(devices) * span_s)) if span_s > 0 else 0.0
