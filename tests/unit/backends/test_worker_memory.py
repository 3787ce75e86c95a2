"""Batches of workers of a `DataLoader` in shared memory: the same bits as of PyTorch, reuse, worker death."""

import os
import signal
import time
from collections import namedtuple
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from hvdtrain.backends.torch import worker_memory  # noqa: E402
from hvdtrain.backends.torch.data import LoaderStream  # noqa: E402

Pair = namedtuple("Pair", "x more")
SIDE, N = 96, 11  # float32[96, 96] is 36 KiB: batches of 4 and the last one of 3 exceed `LEAST_BYTES`


class Pictures(torch.utils.data.Dataset):
    """Nested samples of several types; ``ends``: sample at which the worker kills itself."""

    def __init__(self, ends=-1):
        self.ends = ends

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) + i
        return Pair(x, {"half": x.bfloat16(), "ints": x.long().numpy(), "few": torch.tensor(i), "row": [x[:, ::2], i]})


def leaves(batch):
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [leaf for part in batch for leaf in leaves(part)] if isinstance(batch, (list, tuple)) else [batch]


@pytest.mark.parametrize("method, workers", [("fork", 2), ("spawn", 1), (None, 0)])
def test_batches_have_the_bits_of_the_own_collation(method, workers):
    shm = set(os.listdir("/dev/shm"))
    loader = partial(torch.utils.data.DataLoader, Pictures(), 4, num_workers=workers, multiprocessing_context=method)
    collate = worker_memory.collation(workers)
    assert isinstance(collate, worker_memory.SharedCollate) == bool(workers)
    want = list(torch.utils.data.DataLoader(Pictures(), 4))
    found = list(loader(collate_fn=collate))  # all are kept, so that no slot is used twice
    for batch, other in zip(found, want, strict=True):
        assert type(batch) is type(other) and list(batch.more) == list(other.more)
        for one, two in zip(leaves(batch), leaves(other), strict=True):
            assert one.dtype is two.dtype and torch.equal(one, two)
    assert len(leaves(found[-1])[0]) == N % 4 and bool(worker_memory._mapped) == bool(workers)
    shared = len(worker_memory._mapped)
    del found
    if method == "fork":
        for batch, other in zip(loader(collate_fn=worker_memory.collation(workers)), want):
            assert torch.equal(batch.x, other.x), "in slots that are used again"
        assert 0 < len(worker_memory._mapped) <= shared
    worker_memory.collation(0)
    assert not worker_memory._mapped and set(os.listdir("/dev/shm")) <= shm


def test_slots_are_reused_once_a_batch_is_dropped():
    collate, samples = worker_memory.SharedCollate(), [torch.zeros(SIDE, SIDE)] * 4
    first, second = collate(samples), collate(samples)
    assert len(collate._slots) == 2, "the first is still in use"
    function, values = second.__reduce__()
    tensor = function(*values)
    view = tensor[1:].numpy()
    del tensor
    collate(samples)
    assert len(collate._slots) == 3, "a view is still in use"
    del view
    collate(samples)
    assert len(collate._slots) == 3 and first is not None
    for slot in collate._slots:
        slot.close()


def test_other_tensors_go_the_way_of_pytorch(monkeypatch):
    collate = worker_memory.SharedCollate()
    grads = [torch.zeros(SIDE, SIDE, requires_grad=True)] * 4
    assert isinstance(collate([torch.zeros(3)] * 4), torch.Tensor) and isinstance(collate(grads), torch.Tensor)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate([torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE + 1)] * 2)
    assert not collate._slots
    monkeypatch.setattr(worker_memory, "collate", None)
    assert worker_memory.collation(2) is torch.utils.data.default_collate, "a PyTorch without the private names"


def test_a_worker_that_dies_is_reported():
    begin = time.monotonic()
    stream = LoaderStream(torch.utils.data.DataLoader(Ended(5), 4, num_workers=1))
    with pytest.raises(RuntimeError, match="worker.*(exited unexpectedly|killed|ended before)"):
        for x, y in stream.chunks(0):
            assert np.array_equal(x[:, 0, 0], y)
    assert time.monotonic() - begin < 60


class Ended(Pictures):
    """Samples of two arrays, as a model takes them."""

    def __getitem__(self, i):
        return super().__getitem__(i).x, i
