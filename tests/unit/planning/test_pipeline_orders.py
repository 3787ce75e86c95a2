"""The orders of a pipeline's forwards and backwards: complete, free of deadlock, and as frugal as they say."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.planning.pipeline.orders import (
    BACKWARD,
    FORWARD,
    Action,
    gpipe,
    gpipe_slots,
    in_flight,
    interleaved,
    measured_bubble,
    one_f_one_b,
    order_of,
    play,
)

SIZES = st.tuples(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 8), st.integers(1, 4),
                  st.integers(0, 17)).map(
                      lambda s: (s[0], s[1], s[2] if s[0] == "interleaved" and s[1] > 1 else 1, s[3]))


def lists(name: str, depth: int, chunks: int, micros: int) -> list[list[Action]]:
    """Return what each rank does."""
    return [order_of(name)(place, depth, chunks, micros) for place in range(depth)]


def played(ranks: list[list[Action]], chunks: int, capacity: int = 1, forward_s: float = 1.0,
           backward_s: float = 1.0) -> float:
    """Play the ranks' actions with channels that hold ``capacity`` messages; return when the last rank is done.

    A message goes into the channel of its (sender, receiver, direction), whose messages come in the order in which they
    were sent; the sender waits where it is full. Fails where no rank can continue.
    """
    depth, now = len(ranks), [0.0] * len(ranks)
    due = [deque(actions) for actions in ranks]
    outbox: list[tuple[tuple[int, int, str], tuple[int, int]] | None] = [None] * depth
    channels: dict[tuple[int, int, str], deque[tuple[tuple[int, int], float]]] = {}
    last = depth * chunks - 1

    def moved(place: int) -> bool:
        if outbox[place] is not None:
            key, what = outbox[place]
            if len(channels.setdefault(key, deque())) == capacity:
                return False
            channels[key].append((what, now[place]))
            outbox[place] = None
            return True
        if not due[place]:
            return False
        phase, chunk, micro = due[place][0]
        number, ahead = chunk * depth + place, 1 if phase == FORWARD else -1
        source, begins = number - ahead, 0 if phase == FORWARD else last
        if number != begins:
            came = channels.get((source % depth, place, phase))
            if not came:
                return False
            what, at = came.popleft()
            assert what == (source, micro), f"rank {place} takes {what} for {(source, micro)}"
            now[place] = max(now[place], at)
        due[place].popleft()
        now[place] += forward_s if phase == FORWARD else backward_s
        if 0 <= number + ahead <= last:
            outbox[place] = (place, (number + ahead) % depth, phase), (number, micro)
        return True

    while any(due) or any(outbox):
        assert any([moved(place) for place in range(depth)]), f"nobody goes on: {[list(d)[:2] for d in due]}, {outbox}"
    assert not any(channels.values())
    return max(now)


@given(SIZES)
def test_every_chunk_goes_forward_and_then_back_once(sizes: tuple[str, int, int, int]) -> None:
    _, _, chunks, micros = sizes
    for actions in lists(*sizes):
        assert sorted(actions) == sorted(Action(phase, v, m) for phase in (BACKWARD, FORWARD) for v in range(chunks)
                                         for m in range(micros))
        assert all(actions.index(Action(FORWARD, v, m)) < actions.index(Action(BACKWARD, v, m))
                   for v in range(chunks) for m in range(micros))


def room(name: str, depth: int, micros: int) -> int:
    """Messages that a channel has to hold."""
    return depth if name == "interleaved" and micros % depth else 1


@given(SIZES, st.floats(0.1, 10))
def test_no_order_waits_for_itself_in_channels_of_one_message(sizes: tuple[str, int, int, int],
                                                              backward_s: float) -> None:
    name, depth, chunks, micros = sizes
    played(lists(*sizes), chunks, room(name, depth, micros), backward_s=backward_s)


def test_no_order_of_a_small_pipeline_waits_for_itself() -> None:
    for depth, micros in product(range(1, 9), range(9)):
        for name, most in (("gpipe", 1), ("1f1b", 1), ("interleaved", 4 if depth > 1 else 1)):
            for chunks in range(1, most + 1):
                played(lists(name, depth, chunks, micros), chunks, room(name, depth, micros))


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 4))
def test_orders_hold_no_more_than_they_say(depth: int, micros: int, chunks: int) -> None:
    for place in range(depth):
        assert in_flight(gpipe, place, depth, 1, micros) == micros
        assert in_flight(one_f_one_b, place, depth, 1, micros) == min(micros, depth - place)
        assert in_flight(one_f_one_b, place, depth, 1, micros, [2.5]) == 2.5 * min(micros, depth - place)
        if depth > 1 and chunks > 1:
            groups = max(1, micros // depth)
            ahead = 2 * (depth - place - 1) + (chunks - 1) * -(-micros // groups)
            assert in_flight(interleaved, place, depth, chunks, micros) == min(chunks * micros, ahead + 1)


def test_in_flight_weighs_the_chunks() -> None:
    actions = interleaved(1, 2, 2, 4)
    sums = [sum((3 if a.chunk else 1) * (1 if a.phase == FORWARD else -1) for a in actions[:n]) for n in range(17)]
    assert in_flight(interleaved, 1, 2, 2, 4, [1, 3]) == max(sums) == 5


@pytest.mark.parametrize(("depth", "micros"), [(2, 4), (4, 8), (4, 11), (3, 7), (8, 8)])
def test_orders_idle_as_long_as_their_sources_say(depth: int, micros: int) -> None:
    roomy = {name: played(lists(name, depth, chunks, micros), chunks, capacity=99)
             for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))}
    assert roomy["gpipe"] == roomy["1f1b"] == 2 * (micros + depth - 1)
    assert roomy["interleaved"] == 2 * (2 * micros + depth - 1)  # of chunks that are half as long


STAGES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 8), (4, 4)]


def waits_for(slot, stages, micros):
    """(stage, micro, phase) of what must have ended before ``slot``: its input, and the slot before on its device."""
    _, s, m, phase = slot
    if phase == FORWARD:
        return ([(s - 1, m, FORWARD)] if s else []) + ([(s, m - 1, FORWARD)] if m else [])
    after = [(s + 1, m, BACKWARD)] if s < stages - 1 else []
    return after + [(s, m + 1, BACKWARD) if m < micros - 1 else (s, m, FORWARD)]


@pytest.mark.parametrize("stages, micros", STAGES)
def test_every_slot_runs_once_after_what_it_waits_for(stages, micros):
    slots = gpipe_slots(stages, micros)
    clock = {slot[1:]: slot.clock for slot in slots}
    assert len(clock) == len(slots) == 2 * stages * micros
    assert len({(slot.clock, slot.stage) for slot in slots}) == len(slots)  # a device does one thing at a time
    for slot in slots:
        assert all(clock[before] < slot.clock for before in waits_for(slot, stages, micros))
    assert max(clock.values()) + 1 == 2 * (micros + stages - 1)


def test_two_stages_three_parts():
    told = [[f"{'F' if s.phase == FORWARD else 'B'}{s.micro}" for s in gpipe_slots(2, 3) if s.stage == stage]
            for stage in (0, 1)]
    assert told == [["F0", "F1", "F2", "B2", "B1", "B0"]] * 2
    first = [s.clock for s in gpipe_slots(2, 3) if s.stage == 0 and s.phase == BACKWARD]
    assert first == [5, 6, 7]


def walk(cost_s, micros, forward=1 / 3):
    """(begin, when each slot ends) where stage s takes ``cost_s[s]`` for forward and backward of a part."""
    end_of = {}
    for slot in gpipe_slots(len(cost_s), micros):
        own = cost_s[slot.stage] * (forward if slot.phase == FORWARD else 1 - forward)
        ready = max([100.0, *(end_of[b] for b in waits_for(slot, len(cost_s), micros))])
        end_of[slot[1:]] = ready + own
    return 100.0, [end_of[slot[1:]] for slot in gpipe_slots(len(cost_s), micros)]


def predicted(cost_s, micros):
    """Return the idle share of a played step."""
    return play([gpipe(s, len(cost_s), 1, micros) for s in range(len(cost_s))], [c / 3 for c in cost_s],
                [c * 2 / 3 for c in cost_s]).idle_share


@pytest.mark.parametrize("cost_s", [[1.0], [1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [1.0, 2.0, 1.0], [4.0, 1.0, 2.0]])
@pytest.mark.parametrize("micros", [1, 2, 8])
def test_the_measured_bubble_of_exact_times_is_the_predicted_one(cost_s, micros):
    total, stages = sum(cost_s), len(cost_s)
    want = 1 - micros * total / (stages * (total + (micros - 1) * max(cost_s)))
    assert predicted(cost_s, micros) == pytest.approx(want)
    assert measured_bubble(range(stages), micros, *walk(cost_s, micros)) == pytest.approx(want)


def test_one_after_the_other_is_half_idle():
    """Two devices that take turns, as without parts."""
    assert measured_bubble([0, 1], 1, *walk([1.0, 1.0], 1)) == pytest.approx(0.5) == predicted([1.0, 1.0], 1)
    assert measured_bubble([0, 1], 1, 0.0, [0.0] * 4) == 0.0


def test_stages_on_one_device_take_turns():
    """Each slot takes a second, one after the other: half of two stages' time is lost, however many parts there are."""
    slots = gpipe_slots(2, 4)
    assert measured_bubble([0, 0], 4, 0.0, [1.0 + i for i in range(len(slots))]) == pytest.approx(0.5)
