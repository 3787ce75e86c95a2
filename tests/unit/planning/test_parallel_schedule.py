"""The clocks of GPipe's order and its bubble, in closed form and by walking through it."""

import pytest

from hvdtrain.planning.pipeline.devices.schedule import bubble, gpipe, measured_bubble
from hvdtrain.planning.pipeline.orders import BACKWARD, FORWARD

SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 8), (4, 4)]


def waits_for(slot, stages, micros):
    """(stage, micro, phase) of what must have ended before ``slot``: its input, and the slot before on its device."""
    _, s, m, phase = slot
    if phase == FORWARD:
        return ([(s - 1, m, FORWARD)] if s else []) + ([(s, m - 1, FORWARD)] if m else [])
    after = [(s + 1, m, BACKWARD)] if s < stages - 1 else []
    return after + [(s, m + 1, BACKWARD) if m < micros - 1 else (s, m, FORWARD)]


@pytest.mark.parametrize("stages, micros", SIZES)
def test_every_slot_runs_once_after_what_it_waits_for(stages, micros):
    slots = gpipe(stages, micros)
    clock = {slot[1:]: slot.clock for slot in slots}
    assert len(clock) == len(slots) == 2 * stages * micros
    assert len({(slot.clock, slot.stage) for slot in slots}) == len(slots)  # a device does one thing at a time
    for slot in slots:
        assert all(clock[before] < slot.clock for before in waits_for(slot, stages, micros))
    assert max(clock.values()) + 1 == 2 * (micros + stages - 1)


def test_two_stages_three_parts():
    told = [[f"{'F' if s.phase == FORWARD else 'B'}{s.micro}" for s in gpipe(2, 3) if s.stage == stage]
            for stage in (0, 1)]
    assert told == [["F0", "F1", "F2", "B2", "B1", "B0"]] * 2
    first = [s.clock for s in gpipe(2, 3) if s.stage == 0 and s.phase == BACKWARD]
    assert first == [5, 6, 7]


@pytest.mark.parametrize("stages, micros", SIZES)
def test_bubble_is_what_the_schedule_leaves_idle(stages, micros):
    clocks = 2 * (micros + stages - 1)
    assert bubble([2.0] * stages, micros) == pytest.approx(1 - 2 * micros / clocks)
    assert bubble([2.0] * stages, micros) == pytest.approx((stages - 1) / (micros + stages - 1))


def walk(cost_s, micros, forward=1 / 3):
    """(begin, when each slot ends) where stage s takes ``cost_s[s]`` for forward and backward of a part."""
    end_of = {}
    for slot in gpipe(len(cost_s), micros):
        own = cost_s[slot.stage] * (forward if slot.phase == FORWARD else 1 - forward)
        ready = max([100.0, *(end_of[b] for b in waits_for(slot, len(cost_s), micros))])
        end_of[slot[1:]] = ready + own
    return 100.0, [end_of[slot[1:]] for slot in gpipe(len(cost_s), micros)]


@pytest.mark.parametrize("cost_s", [[1.0], [1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [1.0, 2.0, 1.0], [4.0, 1.0, 2.0]])
@pytest.mark.parametrize("micros", [1, 2, 8])
def test_the_measured_bubble_of_exact_times_is_the_predicted_one(cost_s, micros):
    total, stages = sum(cost_s), len(cost_s)
    want = 1 - micros * total / (stages * (total + (micros - 1) * max(cost_s)))
    assert bubble(cost_s, micros) == pytest.approx(want)
    assert measured_bubble(range(stages), micros, *walk(cost_s, micros)) == pytest.approx(want)


def test_one_after_the_other_is_half_idle():
    """Two devices that take turns, as without parts."""
    assert measured_bubble([0, 1], 1, *walk([1.0, 1.0], 1)) == pytest.approx(0.5) == bubble([1.0, 1.0], 1)
    assert measured_bubble([0, 1], 1, 0.0, [0.0] * 4) == 0.0
    assert bubble([0.0, 0.0], 4) == bubble([1.0, 1.0], 4)


def test_stages_on_one_device_take_turns():
    """Each slot takes a second, one after the other: half of two stages' time is lost, however many parts there are."""
    slots = gpipe(2, 4)
    assert measured_bubble([0, 0], 4, 0.0, [1.0 + i for i in range(len(slots))]) == pytest.approx(0.5)
