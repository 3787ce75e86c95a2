"""torchdata's `StatefulDataLoader` and datasets with ``state_dict``: a resume reads on where the run had been."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import Dataset, IterableDataset  # noqa: E402

from hvdtrain.backends.torch.data import adapt  # noqa: E402
from hvdtrain.checkpoint.manifest import decode_state, encode_state  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.core.protocols.types import Cursor  # noqa: E402
from hvdtrain.data import stream_state  # noqa: E402
from hvdtrain.data.feed import Feed  # noqa: E402

N = 60


@pytest.fixture(autouse=True)
def every_state_is_taken(monkeypatch):
    monkeypatch.setattr(stream_state, "LEAST_INTERVAL", 0)


class Numbers(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return np.float32(i), i % 2


class Place(IterableDataset):
    """0 .. N-1; the dataset keeps its place."""

    def __init__(self):
        self.at, self.begin = torch.tensor(0), 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for i in range(begin, N):
            self.at = torch.tensor(i + 1)
            yield np.float32(i), i % 2

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = int(state["at"])


class Walk:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return np.float32(self.at - 1), 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Walks(IterableDataset):
    """0 .. N-1; the iterator keeps its place."""

    def __iter__(self):
        return Walk()


class Plain(IterableDataset):
    def __iter__(self):
        return iter([(np.float32(i), 0) for i in range(N)])


class Behind(Place):
    """A place that is one sample behind, and stays where an iteration has left it."""

    def __iter__(self):
        for i in range(self.begin, N):
            yield np.float32(i), 0
            self.begin = i + 1
        self.begin = 0

    def state_dict(self):
        return {"at": self.begin}


def stateful(dataset, **args):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return loaders.StatefulDataLoader(dataset, batch_size=7, **args)


def hugging_face(shuffled=False):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"x": [float(i) for i in range(N)], "y": [0] * N}).to_iterable_dataset(3)
    return rows.shuffle(seed=1, buffer_size=10) if shuffled else rows


def walked(make, cursor, n=0, restored=None):
    """Return (x of each step, the state after them, the note about a replay, samples read)."""
    feed = Feed(adapt(make()), 8, control=SoloControl(), prefetch=2)
    feed.sample(1)
    feed.walk.positions.restored = restored
    note, before = feed.walk.replay(cursor), feed.walk.decodes
    steps, at = [], cursor
    for step in (batches := feed.epoch(cursor)):
        steps.append(step.micros[0][0].tolist())
        at = step.cursor_after
        if len(steps) == n:
            break
    state = feed.walk.positions.saved(at.epoch, at.samples)
    batches.close()
    return steps, decode_state(json.loads(json.dumps(encode_state(state, "state")))), note, feed.walk.decodes - before


@pytest.mark.parametrize("make", [
    lambda: stateful(Numbers(), shuffle=True), lambda: stateful(Numbers(), shuffle=True, num_workers=2),
    lambda: stateful(Place()), lambda: stateful(Walks()), Place, Walks, hugging_face])
def test_a_resume_begins_at_the_state(make, monkeypatch):
    if make in (Place, Walks, hugging_face):
        monkeypatch.setattr("hvdtrain.data.stream_reading._CHUNK", 7)
    whole, *_ = walked(make, Cursor(1))
    steps, state, *_ = walked(make, Cursor(1), 4)
    assert steps == whole[:4] and sorted(sum(whole, [])) == list(range(N)) and 0 < state["samples"] <= 32
    rest, _, note, read = walked(make, Cursor(1, 4, 4, 32), restored=state)
    assert rest == whole[4:] and note == "" and read <= N - state["samples"]
    if whole[0] != list(range(8)):  # shuffled by (seed, epoch)
        assert walked(make, Cursor(2), 1)[0] != whole[:1]


@pytest.mark.parametrize("make, words", [
    (lambda: stateful(Plain()), "cannot seek"), (Plain, "cannot seek"),
    (lambda: hugging_face(shuffled=True), "other samples follow"),
    (lambda: stateful(hugging_face(shuffled=True)), "other samples follow"),
    (lambda: stateful(Behind()), "other samples follow")])
def test_a_stream_whose_state_does_not_lead_back_is_read_again(make, words, monkeypatch):
    monkeypatch.setattr("hvdtrain.data.stream_reading._CHUNK", 7)
    whole, *_ = walked(make, Cursor(1))
    _, state, *_ = walked(make, Cursor(1), 4)
    rest, _, note, _ = walked(make, Cursor(1, 4, 4, 32), restored=state)
    assert words in note and "32 samples of epoch 1 are read again" in note and rest == whole[4:]
