"""How long a step of a pipeline takes and what its ranks hold meanwhile: its order played through event by event. Pure.

A rank does its actions one after the other; each begins when the rank is free and what it needs has come. Sending takes
no time of the sender, and ``travel_s`` until it is there. With p stages that take t each and m micro-batches a step of
1F1B or GPipe takes (m + p - 1) t, and each rank waits (p - 1) / (m + p - 1) of it (Huang et al. 2019, arXiv
1811.06965; Narayanan et al. 2021, arXiv 2104.04473); with stages t_i::

    GPipe  sum_i t_i + (m - 1) max_i t_i
    1F1B   not below max_i (m t_i + sum_(j < i) t_j)

where forward and backward are the same parts of all t_i: GPipe's is exact, and an upper bound of 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.planning.pipeline.orders import FORWARD, Action


@dataclass(frozen=True)
class Step:
    """A step played through: its seconds, those that each place computes, and when each action ended, by its phase,
    the copy's chunk and micro-batch."""

    step_s: float
    busy_s: tuple[float, ...]
    ended_s: dict[tuple[str, int, int], float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they compute nothing."""
        return max(0.0, 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)) if self.step_s > 0 else 0.0


def play(orders: Sequence[Sequence[Action]], forward_s: Sequence[float], backward_s: Sequence[float],
         travel_s: Sequence[float] = ()) -> Step:
    """Play a step through.

    ``orders``: the actions of each place. ``forward_s``, ``backward_s``: seconds of each chunk of the copy; chunk k is
    at place k % p. ``travel_s``: from chunk k to the next, and back.
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
    return Step(max(free_s), tuple(busy_s), ended)
