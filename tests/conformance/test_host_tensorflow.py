"""Gradients between TensorFlow and numpy buckets: what is copied, and that nothing that is held is written to."""

from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdtrain.backends.tensorflow.ops import ALIGNMENT, SLOTS, Memory, aligned, fill, view, zeros  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402
from hvdtrain.core.protocols import ParamSpec  # noqa: E402

SHAPES = ((5, 3), (7,), (), (64, 3), (0, 4))


def bucket():
    found, = plan_buckets([ParamSpec(f"p{i}", s, "float32") for i, s in enumerate(SHAPES)], 16)
    return found


def gradients(plan, turn=0):
    return [tf.fill(shape, float(100 * turn + i)) for i, shape in enumerate(plan.shapes)]


def address(x):
    return np.asarray(x).ctypes.data


def shared(slots=SLOTS):
    """Return a transport with memory of its own, seen from one rank, and that memory."""
    rows = zeros(slots * 1024, "float32").reshape(slots, 1024)
    return SimpleNamespace(buffers=lambda n, dtype, slots: [row[:n] for row in rows]), rows


def test_aligned_parameters_are_told_by_their_shapes():
    plan = aligned(bucket())
    assert plan.shapes == bucket().shapes and plan.params == bucket().params
    assert all(offset * 4 % ALIGNMENT == 0 for offset in plan.offsets)
    ends = [o + int(np.prod(s)) for o, s in zip(plan.offsets, plan.shapes)]
    assert all(end <= begin for end, begin in zip(ends, [*plan.offsets[1:], plan.n]))


@pytest.mark.parametrize("plan", [bucket(), aligned(bucket())], ids=["as planned", "aligned"])
def test_gradients_come_back_as_they_went(plan):
    memory = Memory(NullCollectives(), plan)
    for turn in range(3):
        flat_N = memory.free()
        fill(flat_N, plan, gradients(plan, turn))
        flat_N *= 2
        for got, want in zip(memory.tensors(), gradients(plan, turn)):
            np.testing.assert_array_equal(got, want * 2)


def test_aligned_sums_are_not_copied():
    memory = Memory(NullCollectives(), aligned(bucket()))
    begin = memory.free().ctypes.data
    for offset, x in zip(memory.bucket.offsets, memory.tensors()):
        assert not x.shape.num_elements() or address(x) == begin + 4 * offset


@pytest.mark.parametrize("wire", [NullCollectives(), shared()[0]], ids=["any memory", "the wire's"])
def test_what_is_held_is_not_written_to(wire):
    """By a name, or by a variable, which takes a tensor's memory for its own."""
    plan = aligned(bucket())
    memory, kept, variable = Memory(wire, plan), [], tf.Variable(tf.zeros(SHAPES[0]))
    place = plan.shapes.index(SHAPES[0])
    for turn in range(6):
        fill(memory.free(), plan, gradients(plan, turn))
        tensors = memory.tensors()
        if turn == 1:
            variable.assign(tensors[place])
        else:
            kept.append((turn, tensors))
        del tensors
    for turn, tensors in kept:
        for got, want in zip(tensors, gradients(plan, turn)):
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(variable, gradients(plan, 1)[place])


def test_memory_is_used_again_once_nobody_holds_it():
    plan = aligned(bucket())
    memory = Memory(shared()[0], plan)
    first = memory.free().ctypes.data
    tensors = memory.tensors()
    second = memory.free().ctypes.data
    assert second != first
    del tensors
    assert memory.free().ctypes.data == first


def test_the_last_slot_of_a_wire_is_copied_out():
    wire, rows = shared(1)
    memory = Memory(wire, aligned(bucket()))
    for _ in range(2):
        assert memory.free().ctypes.data == rows.ctypes.data
        tensors = memory.tensors()
        rows[:] = 7
        assert not any(np.asarray(x).any() for x in tensors)
        rows[:] = 0


def test_what_is_not_aligned_is_copied():
    own = np.zeros(64, np.float32)
    own = own[-own.ctypes.data % ALIGNMENT // 4:]
    assert address(view(own[:16])) == own.ctypes.data and address(view(own[1:17])) != own[1:].ctypes.data
