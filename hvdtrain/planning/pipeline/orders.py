"""Orders of a pipeline's forwards and backwards, and the time of a step in such an order. Pure.

An order lists the actions of the rank at ``place`` of a replica of ``depth`` ranks with ``chunks`` chunks on each, for
``micros`` micro-batches. Chunk v of the rank is chunk v * depth + place of the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """Forward or backward (``phase``) of micro-batch ``micro`` through the rank's own chunk number ``chunk``."""

    phase: str
    chunk: int
    micro: int


Order = Callable[[int, int, int, int], list[Action]]


def gpipe(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """All forwards, then all backwards, the last micro-batch first. Source: Huang et al. 2019, arXiv 1811.06965."""
    assert chunks == 1
    return [*(Action(FORWARD, 0, m) for m in range(micros)), *(Action(BACKWARD, 0, m) for m in reversed(range(micros)))]


def one_f_one_b(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """First min(micros, depth - place - 1) forwards, then forwards and backwards in turn, then the backwards left.

    At most min(micros, depth - place) micro-batches are between their forward and their backward.
    Source: Narayanan et al. 2019, SOSP, arXiv 1806.03377; 2021, arXiv 2006.09503 (PipeDream-Flush).
    """
    assert chunks == 1
    ahead = min(micros, depth - place - 1)
    actions = [Action(FORWARD, 0, m) for m in range(ahead)]
    for m in range(micros - ahead):
        actions += [Action(FORWARD, 0, ahead + m), Action(BACKWARD, 0, m)]
    return actions + [Action(BACKWARD, 0, m) for m in range(micros - ahead, micros)]


def interleaved(place: int, depth: int, chunks: int, micros: int) -> list[Action]:
    """As `one_f_one_b`, with ``chunks`` runs of blocks on each rank: an idle share of about 1 / chunks of its.

    Micro-batches go through all chunks in groups of ``depth`` or more, so that a group comes back to the first rank
    when that has done with it. Any number of them will do. Where it is no multiple of ``depth`` groups are larger: more
    is held, and up to ``depth`` messages of a direction wait between two ranks, of which otherwise one is enough. With
    one chunk it is `one_f_one_b`.
    Source: Narayanan et al. 2021, arXiv 2104.04473, which asks for a multiple of ``depth``.
    """
    assert chunks == 1 or depth > 1, f"{chunks} chunks on one rank"
    if chunks == 1:
        return one_f_one_b(place, depth, chunks, micros)
    groups = _groups(micros, depth)
    forwards = [Action(FORWARD, v, m) for group in groups for v in range(chunks) for m in group]
    backwards = [Action(BACKWARD, v, m) for group in groups for v in reversed(range(chunks)) for m in group]
    ahead = 2 * (depth - place - 1) + (chunks - 1) * max(map(len, groups), default=0)
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards)
    return [*forwards[:ahead], *(action for turn in turns for action in turn), *backwards[len(forwards) - ahead:]]


def _groups(micros: int, depth: int) -> list[range]:
    """``micros`` in runs of nearly equal lengths, ``depth`` or more each; one shorter run where there are fewer."""
    n = max(1, micros // depth)
    return [range(micros * i // n, micros * (i + 1) // n) for i in range(n)] if micros else []


def order_of(name: str) -> Order:
    """Return the order that ``pipeline.order`` names."""
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}[name]


def in_flight(order: Order, place: int, depth: int, chunks: int, micros: int, each: Sequence[float] = ()) -> float:
    """Return how much the rank keeps for its backwards at most, where its chunk v keeps ``each[v]`` of a micro-batch.

    By default 1 of each: the number of (chunk, micro-batch) between their forward and the end of their backward.
    """
    held = most = 0.0
    for phase, chunk, _ in order(place, depth, chunks, micros):
        amount = each[chunk] if each else 1
        held += amount if phase == FORWARD else -amount
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Step:
    """Predicted seconds of a step, and the seconds in which each place computes."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Fraction of all ranks' time without computation."""
        return max(0.0, 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)) if self.step_s > 0 else 0.0


def play(orders: Sequence[Sequence[Action]], forward_s: Sequence[float], backward_s: Sequence[float],
         travel_s: Sequence[float] = ()) -> Step:
    """Simulate a step.

    An action begins when its rank is free and its input has arrived. Sending takes no time of the sender. With p stages
    of t_i seconds and m micro-batches a step of GPipe takes sum_i t_i + (m - 1) max_i t_i if forward is the same
    fraction of all t_i (Huang et al. 2019, arXiv 1811.06965); 1F1B takes no longer, and not less than
    max_i (m t_i + sum_(j < i) t_j) (Narayanan et al. 2021, arXiv 2104.04473).

    ``orders``: the actions of each place. ``forward_s``, ``backward_s``: seconds of each chunk; chunk k is at place
    k % p. ``travel_s``: seconds of a message between chunk k and the next.
    """
    depth, last = len(orders), len(forward_s) - 1
    travel = travel_s or (0.0,) * last
    ended: dict[tuple[str, int, int], float] = {}
    at, free_s, busy_s = [0] * depth, [0.0] * depth, [0.0] * depth
    waiting = set(range(depth))
    while waiting:
        before = sum(at)
        for place in sorted(waiting):
            while at[place] < len(orders[place]):
                phase, chunk, micro = orders[place][at[place]]
                number = chunk * depth + place
                forth = phase == FORWARD
                beside = number - 1 if forth else number + 1
                if beside < 0:
                    ready: float | None = 0.0
                elif beside > last:
                    ready = ended.get((FORWARD, number, micro))
                else:
                    ready = ended.get((phase, beside, micro))
                    ready = None if ready is None else ready + travel[min(beside, number)]
                if ready is None:
                    break
                own_s = forward_s[number] if forth else backward_s[number]
                free_s[place] = max(ready, free_s[place]) + own_s
                busy_s[place] += own_s
                ended[phase, number, micro] = free_s[place]
                at[place] += 1
            else:
                waiting.discard(place)
        assert not waiting or sum(at) > before, f"places {sorted(waiting)} wait for each other"
    return Step(max(free_s), tuple(busy_s))


class Slot(NamedTuple):
    """Part ``micro`` on stage ``stage`` at time ``clock``; ``phase``: forward or backward."""

    clock: int
    stage: int
    micro: int
    phase: str


@cache
def gpipe_slots(stages: int, micros: int) -> tuple[Slot, ...]:
    """Return GPipe's order by clock, then stage. Slots of one clock run concurrently; 2 (M + S - 1) clocks in all."""
    turn = stages + micros - 1
    return tuple(sorted(slot for s in range(stages) for m in range(micros) for slot in (
        Slot(s + m, s, m, FORWARD), Slot(turn + (stages - 1 - s) + (micros - 1 - m), s, m, BACKWARD))))


def measured_bubble(devices: Sequence[Hashable], micros: int, begin_s: float, ends_s: Sequence[float]) -> float:
    """Return the idle fraction of all devices' time; ``ends_s``: when each slot of `gpipe_slots` ended, in its order.

    ``devices``: that of each stage; k stages on one device run one at a time, so that at least 1 - 1/k is idle. A slot
    is assumed to begin when its input and the previous slot on its device have ended.
    """
    slots = gpipe_slots(len(devices), micros)
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
