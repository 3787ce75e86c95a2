"""Partition of a model into stages, and the device of each: the plan with the shortest step that fits memory. Pure.

Candidates are optimal for a bound of the step's time, by dynamic programming from the last place to the first over
(ranks of each kind placed, blocks left). The best candidate is then improved by simulation (`orders.play`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hvdtrain.planning.pipeline.blocks import DeviceProfile, Holds, forward_s
from hvdtrain.planning.pipeline.orders import Action, Step, in_flight, order_of, play

MOST_STATES = 4096
"""Ways to have placed some ranks that are looked at; with more, ranks are placed by memory and speed."""

MOST_ORDERS = 24
"""Orders of different devices that are tried if a rank has several chunks."""

MOST_PLAYED = 400_000
"""Actions that a search may play through; about a second."""

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Task:
    """A replica to be planned: ``kinds[kind_of[i]]`` is the profile of its i-th device.

    ``order``: as configured; ``micros``: of a step; ``chunks``: of each rank. ``fixed``: the first block of each chunk,
    if configured. ``latency_s``, ``byte_s``: seconds of a message, and of each byte. ``ordered``: stage i stays on the
    i-th device.
    """

    kinds: tuple[DeviceProfile, ...]
    kind_of: tuple[int, ...]
    order: str
    micros: int
    chunks: int = 1
    fixed: tuple[int, ...] = ()
    latency_s: float = 0.0
    byte_s: float = 0.0
    ordered: bool = False

    @property
    def depth(self) -> int:
        """Number of ranks."""
        return len(self.kind_of)

    @property
    def n(self) -> int:
        """Number of blocks."""
        return len(self.kinds[0].blocks)

    @cached_property
    def actions(self) -> list[list[Action]]:
        """Actions of each place."""
        if self.depth == 1:
            return [order_of("gpipe")(0, 1, 1, 1) * self.micros]
        return [order_of(self.order)(i, self.depth, self.chunks, self.micros) for i in range(self.depth)]

    @cached_property
    def in_flight(self) -> list[int]:
        """Most micro-batches of a chunk in flight at each place, if all chunks are equal."""
        return [int(self.held(place)) for place in range(self.depth)]

    def held(self, place: int, each: Sequence[float] = ()) -> float:
        """Return the most that the rank at ``place`` keeps for backwards, with ``each[v]`` of a micro-batch in chunk v.
        """
        if self.depth == 1:  # a micro-batch after the other
            return each[0] if each else 1.0
        return in_flight(order_of(self.order), place, self.depth, self.chunks, self.micros, each)

    @cached_property
    def tables(self) -> list[_Table]:
        return [_Table(kind) for kind in self.kinds]


class _Table:
    """Seconds and bytes of ``blocks[begin:end]`` on one kind of device; float64[n + 1, n + 1], inf where empty."""

    def __init__(self, kind: DeviceProfile) -> None:
        blocks, grow = kind.blocks, 1 + kind.needs.gradients + kind.needs.slots
        self.seconds = _spans([b.cost_s for b in blocks])
        self.state = _spans([grow * b.param_bytes for b in blocks])
        self.activations = _spans([b.activation_bytes for b in blocks])
        self.capacity = kind.capacity_bytes or math.inf

    def fullness(self, in_flight: int) -> np.ndarray:
        """Return the fraction of the memory that each span takes."""
        with np.errstate(invalid="ignore"):
            full = (self.state + in_flight * self.activations) / self.capacity
        return np.where(np.isinf(self.state), math.inf, full)


def _spans(values: Sequence[float]) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])
    spans = sums[None, :] - sums[:, None]
    spans[np.tril_indices(len(sums))] = math.inf
    return spans


@dataclass(frozen=True)
class Partition:
    """The kind of device at each place (``places``), and the first block of each chunk (``starts``)."""

    places: tuple[int, ...]
    starts: tuple[int, ...]

    def chunks(self, task: Task, place: int) -> list[range]:
        """Return the blocks of each chunk at ``place``."""
        ends = (*self.starts[1:], task.n)
        return [range(a, b) for a, b in zip(self.starts, ends)][place::task.depth]

    def holds(self, task: Task, place: int) -> Holds:
        """Return the memory of the rank at ``place``."""
        kind = task.kinds[self.places[place]]
        sizes, parameters = [], 0
        for chunk in self.chunks(task, place):
            sizes.append(float(sum(kind.blocks[i].activation_bytes for i in chunk)))
            parameters += sum(kind.blocks[i].param_bytes for i in chunk)
        held = sizes[0] * task.in_flight[place] if len(sizes) == 1 else task.held(place, sizes)
        return Holds(parameters, parameters * kind.needs.gradients, parameters * kind.needs.slots, held)

    def fits(self, task: Task) -> bool:
        """Return whether every rank has enough memory."""
        room = (task.tables[kind].capacity for kind in self.places)
        return all(self.holds(task, place).total <= most for place, most in enumerate(room))

    def played(self, task: Task) -> Step:
        """Simulate a step."""
        forward, backward, travel = [], [], []
        for number, (begin, end) in enumerate(zip(self.starts, (*self.starts[1:], task.n))):
            kind = task.kinds[self.places[number % task.depth]]
            forward.append(math.fsum(forward_s(b) for b in kind.blocks[begin:end]))
            backward.append(math.fsum(b.cost_s for b in kind.blocks[begin:end]) - forward[-1])
            travel.append(task.latency_s + task.byte_s * kind.blocks[end - 1].cargo_bytes)
        return play(task.actions, forward, backward, travel[:-1])


def search(task: Task) -> tuple[Partition, Step] | None:
    """Return the best partition and its step; None if none fits the memory."""
    found = [choice for choice in candidates(task) if choice.fits(task)]
    if not found:
        return None
    played = [(choice.played(task).step_s, number) for number, choice in enumerate(found)]
    return _moved(task, found[min(played)[1]], len(found))


def candidates(task: Task) -> Iterator[Partition]:
    """Yield partitions that are the best by one of the bounds; with several chunks also some that may not fit."""
    if task.chunks > 1:
        yield from _interleaved(task)
        return
    micros, gpipe = task.micros, task.order == "gpipe"
    cost = _seconds(task)
    first = _best(task, cost, lambda t, rest: np.maximum(micros * t, t + rest))
    if first is None:
        return
    if not gpipe:
        yield first
    yield from _swept(task, cost)


def spread(task: Task) -> Partition:
    """Return the partition whose fullest rank is the least full."""
    def cost(place: int, kind: int) -> np.ndarray:
        return task.tables[kind].fullness(task.in_flight[place % task.depth])

    if task.chunks == 1:
        found = _best(task, cost, np.maximum)
    else:
        found = min((c for c in (_best(task, cost, np.maximum, order) for order in _orders(task)) if c is not None),
                    key=lambda c: max(fullness(task, c)))
    assert found is not None
    return found


def fullness(task: Task, choice: Partition) -> list[float]:
    """Return the fraction of its memory that each place holds; 0 if unknown."""
    return [choice.holds(task, place).total / task.tables[kind].capacity for place, kind in enumerate(choice.places)]


def _seconds(task: Task) -> Callable[[int, int], np.ndarray]:
    """Return a function that gives the seconds of each span at a place, inf if it does not fit."""
    def cost(place: int, kind: int) -> np.ndarray:
        table = task.tables[kind]
        full = table.fullness(task.in_flight[place % task.depth])
        return np.where(full <= 1, table.seconds, math.inf)
    return cost


def _swept(task: Task, cost: Callable[[int, int], np.ndarray]) -> Iterator[Partition]:
    """Yield the partition with the least sum for ever lower bounds on the slowest stage.

    Among them is the one with the least ``sum + (m - 1) slowest``.
    """
    lowest = _best(task, cost, np.maximum)
    assert lowest is not None
    floor_s, best_s, cap_s = max(_stage_s(task, lowest)), math.inf, math.inf
    while True:
        def capped(t: np.ndarray, rest: np.ndarray, cap_s: float = cap_s) -> np.ndarray:
            return np.where(t <= cap_s, t + rest, math.inf)

        found = _best(task, cost, capped)
        if found is None:
            return
        stages = _stage_s(task, found)
        best_s = min(best_s, sum(stages) + (task.micros - 1) * max(stages))
        yield found
        cap_s = np.nextafter(max(stages), 0.0)
        if cap_s < floor_s or sum(stages) + (task.micros - 1) * floor_s >= best_s:
            return


def _stage_s(task: Task, choice: Partition) -> list[float]:
    ends = (*choice.starts[1:], task.n)
    return [float(task.tables[k].seconds[a, b]) for k, a, b in zip(choice.places, choice.starts, ends)]


def _interleaved(task: Task) -> Iterator[Partition]:
    """Yield for each order of devices the partition whose slowest chunk is fastest, then the one that spreads memory
    best.
    """
    for order in _orders(task):
        found = _best(task, lambda place, kind: task.tables[kind].seconds, np.maximum, order)
        if found is not None:
            yield found
    yield spread(task)


def _orders(task: Task) -> list[tuple[int, ...]]:
    """Return orders of the devices: all different ones if few; the one by memory and speed first."""
    if task.ordered:
        return [task.kind_of]
    by_room = _by_room(task)
    some = itertools.islice(_permutations(by_room), MOST_ORDERS)
    return list(dict.fromkeys([by_room, *some]))


def _by_room(task: Task) -> tuple[int, ...]:
    """Return the kinds by memory, largest first, then by speed."""
    return tuple(sorted(task.kind_of, key=lambda k: (-task.tables[k].capacity, task.kinds[k].cost_s, k)))


def _permutations(kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the different orders of ``kinds``."""
    if not kinds:
        yield ()
    for kind in dict.fromkeys(kinds):
        rest = list(kinds)
        rest.remove(kind)
        for order in _permutations(rest):
            yield (kind, *order)


def _best(task: Task, cost: Callable[[int, int], np.ndarray], combine: Combine,
          sequence: Sequence[int] | None = None) -> Partition | None:
    """Return the partition with the least value, or None if all are inf.

    The value of the last place is ``combine(t, 0)`` of its ``cost(place, kind)``, that of a place in front ``combine(t,
    value of what follows)``; ``combine`` must be monotonic. ``sequence``: the kinds by place, if their order is given.
    Ties: devices with more memory in front.
    """
    task_n, total = task.n, task.depth * task.chunks
    counts = [task.kind_of.count(k) for k in range(len(task.kinds))]
    if task.ordered:
        sequence = task.kind_of
    elif sequence is None and math.prod(c + 1 for c in counts) > MOST_STATES:
        sequence = _by_room(task)
    rank = {k: i for i, k in enumerate(dict.fromkeys(_by_room(task)))}
    ended = np.full(task_n + 1, math.inf)
    ended[task_n] = 0.0
    layer: dict[tuple[int, ...], np.ndarray] = {(0,) * len(counts): ended}
    came: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    for place in reversed(range(total)):
        ahead: dict[tuple[int, ...], np.ndarray] = {}
        costs: dict[int, np.ndarray] = {}
        for state, rest in layer.items():
            usable = [sequence[place % task.depth]] if sequence else [k for k in rank if state[k] < counts[k]]
            for kind in usable:
                if kind not in costs:
                    costs[kind] = _fixed(task, place, cost(place, kind))
                values = np.where(np.isinf(rest)[None, :], math.inf, combine(costs[kind], rest[None, :]))
                ends = values.argmin(axis=1)
                value = values[np.arange(task_n + 1), ends]
                now = (*state[:kind], state[kind] + 1, *state[kind + 1:])
                if now not in ahead:
                    ahead[now] = np.full(task_n + 1, math.inf)
                    came[now] = np.full(task_n + 1, -1), np.zeros(task_n + 1, np.int64)
                # Kinds come in the order of their room, but states do not: a roomier one takes what is equal.
                old, room = ahead[now], np.array([rank.get(int(k), len(rank)) for k in came[now][0]])
                better = (value < old) | ((value == old) & np.isfinite(value) & (rank[kind] < room))
                ahead[now] = np.where(better, value, old)
                came[now] = np.where(better, kind, came[now][0]), np.where(better, ends, came[now][1])
        layer = ahead
    (state, values), = layer.items()
    if math.isinf(values[0]):
        return None
    places, starts, begin = [], [], 0
    for _ in range(total):
        kind, end = int(came[state][0][begin]), int(came[state][1][begin])
        places.append(kind)
        starts.append(begin)
        state, begin = (*state[:kind], state[kind] - 1, *state[kind + 1:]), end
    return Partition(tuple(places[:task.depth]), tuple(starts))


def _fixed(task: Task, place: int, cost: np.ndarray) -> np.ndarray:
    """Return the costs with inf for all spans but the configured one."""
    if not task.fixed:
        return cost
    begin, end = task.fixed[place], (*task.fixed[1:], task.n)[place]
    only = np.full_like(cost, math.inf)
    only[begin, end] = cost[begin, end]
    return only


def _moved(task: Task, choice: Partition, played: int) -> tuple[Partition, Step]:
    """Move single blocks and swap ranks while that shortens the simulated step."""
    best = choice.played(task)
    actions = sum(map(len, task.actions))
    budget = MOST_PLAYED - played * actions
    improved = True
    while improved and budget > 0:
        improved = False
        for other in _neighbours(task, choice):
            if budget <= 0 or not other.fits(task):
                continue
            budget -= actions
            step = other.played(task)
            if step.step_s < best.step_s * (1 - 1e-9):
                choice, best, improved = other, step, True
                break
    return choice, best


def _neighbours(task: Task, choice: Partition) -> Iterator[Partition]:
    """Yield partitions that differ by one block or by two ranks."""
    starts, places = choice.starts, choice.places
    for k in range(1, len(starts)) if not task.fixed else ():
        for start in (starts[k] - 1, starts[k] + 1):
            if starts[k - 1] < start < (*starts[k + 1:], task.n)[0]:
                yield Partition(places, (*starts[:k], start, *starts[k + 1:]))
    for i, j in itertools.combinations(range(len(places)), 2) if not task.ordered else ():
        if places[i] != places[j]:
            other = list(places)
            other[i], other[j] = other[j], other[i]
            yield Partition(tuple(other), starts)
