"""Batches that are sent to a device ahead of their step: the order of copies, waits and steps, on pretended lanes.

A lane here is a list of what was done on it, and CPU memory; what CUDA does is looked at by `make gpu-check` alone.
"""

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hvdtrain import Config, Trainer  # noqa: E402
from hvdtrain.backends.torch.pinned import Lane, Uploads  # noqa: E402
from hvdtrain.config import CheckpointConfig, DataConfig  # noqa: E402
from hvdtrain.core.protocols.types import Cursor  # noqa: E402
from hvdtrain.data.feed import Feed  # noqa: E402
from hvdtrain.data.sources import ArraySource  # noqa: E402

CPU = torch.device("cpu")


class Side(Lane):
    """A lane whose copies arrive when they are received, and not before."""

    early = True

    def __init__(self, device, done, refuses=()):
        super().__init__(device)
        self.done, self.refuses = done, refuses

    def stage(self, host, dtype):
        if "stage" in self.refuses:
            raise RuntimeError("no memory can be locked\nmore")
        self.done.append("stage")
        return host.to(dtype, copy=True)

    def send(self, staged, dtype):
        if "send" in self.refuses:
            raise torch.cuda.OutOfMemoryError("no room")
        self.done.append("send")
        return torch.full_like(staged, 99), staged

    def receive(self, sent, token):
        self.done.append("receive")
        sent.copy_(token)


def uploads(done, refuses=()):
    return Uploads(lambda i: CPU, torch.float32, lambda device: Side(device, done, refuses))


def batch(first=0.0):
    return np.arange(first, first + 6).reshape(3, 2), np.arange(3)


def test_a_batch_that_was_announced_is_copied_once_and_waited_for_where_it_is_taken():
    done, one = [], batch()
    lanes = uploads(done)
    lanes.ahead(one)
    assert done == ["stage", "send"] * 2
    x, y = lanes.take(tuple(array[:] for array in one))  # the same memory, seen again
    assert done == ["stage", "send"] * 2 + ["receive"] * 2
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert np.array_equal(x, one[0]) and np.array_equal(y, one[1])


@pytest.mark.parametrize("other", [batch(), batch(7.0), tuple(a[:2] for a in batch()), (batch()[0],)],
                         ids=["equal", "values", "shorter", "fewer"])
def test_another_batch_than_the_one_announced_is_copied_itself(other):
    done = []
    lanes = uploads(done)
    lanes.ahead(batch())
    for array, got in zip(other, lanes.take(other), strict=True):
        assert np.array_equal(got, array)
    assert done.count("send") == 2 + len(other)
    lanes.take(other)
    assert done.count("send") == 2 + 2 * len(other), "what was announced is taken once"


def test_memory_that_cannot_be_pinned_leaves_plain_copies_and_says_so_once():
    done, one = [], batch()
    lanes = uploads(done, ("stage",))
    with pytest.warns(UserWarning, match="not pinned, so the host waits for each copy: no memory can be locked$"):
        assert np.array_equal(lanes.take(one)[0], one[0])
    lanes.ahead(one)
    assert np.array_equal(lanes.take(one)[1], one[1]) and not done


def test_a_device_without_room_ahead_is_asked_again_in_the_batchs_own_step():
    done, one = [], batch()
    lanes = uploads(done, ("send",))
    lanes.ahead(one)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        lanes.take(one)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_step_sends_what_comes_next_and_trains_the_same(accumulate, monkeypatch, tmp_path):
    from hvdtrain.backends.torch import pinned as module

    def trained(lane_to, name):
        monkeypatch.setattr(module.Uploads.__init__, "__defaults__", (lane_to,))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        draw = np.random.default_rng(0)
        x, y = draw.normal(size=(50, 4)).astype(np.float32), draw.integers(0, 3, 50)
        config = Config(epochs=2, global_batch=12, accumulate=accumulate, lr=0.1, progress="off", metrics=[],
                        data=DataConfig(prefetch=2), checkpoint=CheckpointConfig(every="off", at_end=False),
                        out=str(tmp_path / name))
        Trainer(config).fit(model, (x, y))
        return [p.detach().clone() for p in model.parameters()]

    done, announced, ahead = [], [], module.Uploads.ahead
    monkeypatch.setattr(module.Uploads, "ahead", lambda self, batch: (announced.append(batch), ahead(self, batch)))
    got = trained(lambda device: Side(device, done), "side")
    steps = 2 * 5
    assert len(announced) >= steps * (accumulate - 1), "micro-batches of a step are known before they are computed"
    assert done.count("send") == done.count("receive"), "what was announced came next"
    for one, other in zip(got, trained(Lane, "plain"), strict=True):
        assert torch.equal(one, other)


def test_a_step_tells_what_the_next_begins_with_once_that_is_fetched():
    feed = Feed(ArraySource([np.arange(20.0)]), 8, accumulate=2, shuffle=True)
    steps = feed.epoch(Cursor())
    for after in (4, 2):
        step, until = next(steps), time.monotonic() + 20.0
        while not (coming := step.coming()) and time.monotonic() < until:
            time.sleep(0.002)
        assert len(coming[0]) == after
        kept = coming[0].copy()
    last = next(steps)
    assert np.array_equal(last.micros[0][0], kept) and np.shares_memory(last.micros[0][0], coming[0])
    assert last.coming() == () and next(steps, None) is None


def test_an_array_of_another_library_is_sent():
    class Array:
        """As jax.Array: without the ``flags`` of numpy's."""

        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    assert uploads([]).take((Array(),))[0].tolist() == [0, 1, 2]
