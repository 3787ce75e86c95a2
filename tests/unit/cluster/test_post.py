"""Messages between the ranks of a pipeline: any tensors, in order, and errors that name both sides."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest

from hvdtrain.cluster.messages.carrier import Boxes, ThreadCarrier
from hvdtrain.cluster.messages.channel import ALIGNED
from hvdtrain.cluster.messages.shared_memory import _LANE, TAGS, Doorbells, SharedMemoryCarrier
from hvdtrain.core.errors import PeerFailed, WaitTimeout
from hvdtrain.core.protocols import Cargo
from hvdtrain.parallel.pipeline.messages import BACK, FORTH, MessageLabel, Post


def pair(timeout_s: float = 10.0) -> tuple[Post, Post]:
    """Return the posts of two ranks."""
    boxes = Boxes()
    return (Post(ThreadCarrier(boxes, 0, 2, timeout_s), "a"), Post(ThreadCarrier(boxes, 1, 2, timeout_s), "b"))


def cargo(*arrays: Any, form: str = "") -> Cargo:
    """Arrays as they are."""
    return Cargo(tuple(arrays), tuple(a.dtype.name for a in arrays), form)


def same(got: Cargo | None, want: Cargo) -> bool:
    """Return whether all that was sent has come."""
    assert got is not None
    return got[1:] == want[1:] and len(got.arrays) == len(want.arrays) and all(
        a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in zip(got.arrays, want.arrays))


@pytest.mark.parametrize("sent", [
    cargo(np.arange(6, dtype=np.float32).reshape(2, 3)), cargo(np.empty((0, 5))), cargo(np.array(3, np.int64)),
    cargo(np.zeros(0, np.uint8), np.arange(5, dtype=np.uint16), np.ones((1, 2, 3, 4), bool), form="(a, {b: c})"),
    cargo(*(np.full((3, i % 5), i, np.float16) for i in range(400)), form="x" * 5000), cargo()])
def test_all_kinds_of_cargo_come_as_they_were_sent(sent):
    here, there = pair()
    label = MessageLabel(FORTH, 0, 3, 2)
    here.send(sent, 1, label)
    got = there.receive(0, label)
    assert same(got, sent)
    assert all(a.ctypes.data % ALIGNED == 0 and a.flags.writeable for a in got.arrays if a.size)


def test_shapes_may_change_from_one_micro_batch_to_the_next_and_what_was_sent_may_be_written_to():
    here, there = pair()
    values = np.ones((4, 2))
    for micro, rows in enumerate((4, 1, 3)):
        here.send(cargo(values[:rows]), 1, MessageLabel(FORTH, 0, micro, rows))
        values *= 2
    got = [there.receive(0, MessageLabel(FORTH, 0, micro, rows)).arrays[0] for micro, rows in enumerate((4, 1, 3))]
    assert [x.shape for x in got] == [(4, 2), (1, 2), (3, 2)] and [x[0, 0] for x in got] == [1, 2, 4]


def test_what_is_lost_comes_as_nothing():
    here, there = pair()
    here.send(None, 1, MessageLabel(FORTH, 0, 0, 2))
    assert there.receive(0, MessageLabel(FORTH, 0, 0, 2)) is None


@pytest.mark.parametrize(("step", "sent", "words"), [
    (8, MessageLabel(FORTH, 0, 3, 2), "chunk 0 for micro-batch 3 of step 8, of 2 samples"),
    (7, MessageLabel(FORTH, 2, 3, 2), "chunk 2 for micro-batch 3 of step 7"),
    (7, MessageLabel(FORTH, 0, 4, 2), "chunk 0 for micro-batch 4 of step 7"),
    (7, MessageLabel(FORTH, 0, 3, 1), "micro-batch 3 of step 7, of 1 samples")])
def test_what_was_not_expected_is_an_error_on_both_ranks_that_names_both(step, sent, words):
    here, there = pair()
    here.begin(step)
    there.begin(7)
    here.send(cargo(np.ones(2)), 1, sent)
    said = (rf"rank 0 on host a sent the outputs of .*{words}.* rank 1 on host b expects the outputs of chunk 0 for "
            "micro-batch 3 of step 7, of 2 samples")
    with pytest.raises(RuntimeError, match=said):
        there.receive(0, MessageLabel(FORTH, 0, 3, 2))
    with pytest.raises(RuntimeError, match=said):
        here.receive(1, MessageLabel(BACK, 1, 0, 2))


def test_gradients_of_other_shapes_than_were_sent_are_an_error():
    here, there = pair()
    label = MessageLabel(BACK, 1, 0, 2)
    here.send(cargo(np.ones((2, 3)), np.ones(2, np.int64), np.ones(5, np.float32)), 1, MessageLabel(FORTH, 0, 0, 2))
    there.send(cargo(np.ones((2, 3)), np.ones(5, np.float32)), 0, label)
    assert len(here.receive(1, label).arrays) == 2
    here.send(cargo(np.ones((2, 3))), 1, MessageLabel(FORTH, 0, 1, 2))
    there.send(cargo(np.ones((3, 2))), 0, label._replace(micro=1))
    with pytest.raises(RuntimeError, match=r"rank 1 .*shapes \[3, 2\], where rank 0 .*shapes \[2, 3\], as it has sent"):
        here.receive(1, label._replace(micro=1))


def test_a_wait_is_bounded_and_ends_where_another_rank_fails():
    with pytest.raises(WaitTimeout, match="rank 1 waited 0.05 s in a message with outputs from rank 0"):
        pair(0.05)[1].receive(0, MessageLabel(FORTH, 0, 0, 1))
    boxes = Boxes()
    threading.Timer(0.05, boxes.fail).start()
    with pytest.raises(PeerFailed, match="another rank failed while rank 1 waited in a message"):
        Post(ThreadCarrier(boxes, 1, 2)).receive(0, MessageLabel(FORTH, 0, 0, 1))


def test_who_is_too_far_ahead_waits_for_room():
    boxes = Boxes()
    here, there = Post(ThreadCarrier(boxes, 0, 2), room=2), Post(ThreadCarrier(boxes, 1, 2))
    ahead: list[int] = []

    def send() -> None:
        for micro in range(6):
            here.send(cargo(np.full(2, micro)), 1, MessageLabel(FORTH, 0, micro, 1))
            ahead.append(micro)

    thread = threading.Thread(target=send)
    thread.start()
    for micro in range(6):
        assert there.receive(0, MessageLabel(FORTH, 0, micro, 1)).arrays[0][0] == micro
        assert len(ahead) <= micro + 4  # two wait, one was taken, one is told of after it was sent
    thread.join(10)
    assert ahead == list(range(6))


class Twice:
    """A host of two ranks that are both this process."""

    def Get_rank(self) -> int:
        return 0

    def allgather(self, own: Any) -> list[Any]:
        return [own, own]


def test_a_carrier_that_nobody_has_any_more_closes_its_files():
    before = len(os.listdir("/proc/self/fd"))
    carrier = SharedMemoryCarrier(Twice(), mmap.mmap(-1, 4 * TAGS * _LANE * 8), Doorbells(Twice()), [0, 1], 1.0)
    for _ in range(3):
        carrier.put([np.ones(100)], 1, 0)
    assert len(os.listdir("/proc/self/fd")) >= before + 3 + 3, "both ends of a pipe, another's, each message's file"
    del carrier
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
