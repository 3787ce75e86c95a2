"""PyTorch's datasets and loaders as numpy sources and streams."""

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from hvdtrain.backends.torch.data import adapt  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols.types import Cursor  # noqa: E402
from hvdtrain.data.feed import Feed  # noqa: E402
from hvdtrain.data.rows import ColumnNames  # noqa: E402
from hvdtrain.data.sources import ArraySource, Source, interpret  # noqa: E402
from hvdtrain.data.stream import Stream  # noqa: E402


class Squares(Dataset):
    """Sample i is (a vector of i, i * i), in the form ``make`` gives it."""

    def __init__(self, n, make=lambda x, y: (x, y)):
        self.n, self.make = n, make

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(torch.full((3,), float(i)), i * i)


class Counting(IterableDataset):
    """0 .. n-1, from ``start`` times the epoch on."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.n):
            yield np.float32(i + 1000 * self.epoch), i % 2


class OneProcess:
    """The control plane of a single rank."""

    rank, size = 0, 1

    def sum(self, values_k):
        return values_k


def firsts(stream, epoch=0):
    return [int(v) for chunk in stream.chunks(epoch) for v in np.ravel(chunk[0])]


@pytest.mark.parametrize("obj", [
    TensorDataset(torch.arange(5.0), torch.arange(5)), (torch.arange(5.0), torch.arange(5)),
    [torch.arange(5.0, requires_grad=True), np.arange(5)],
])
def test_tensors_become_arrays(obj):
    source = adapt(obj)
    assert isinstance(source, ArraySource)
    x, y = source.fetch(np.array([4, 1]))
    assert x.tolist() == [4.0, 1.0] and y.tolist() == [4, 1] and x.dtype == np.float32 and y.dtype == np.int64


def test_one_tensor_and_bfloat16():
    assert [a.dtype for a in adapt(torch.ones(4, 2, dtype=torch.bfloat16)).arrays] == [np.float32]


@pytest.mark.parametrize("make, arity", [
    (lambda x, y: (x, y), 2), (lambda x, y: [x.numpy(), y], 2), (lambda x, y: {"y": y, "x": x}, 2),
    (lambda x, y: {"image": x, "label": y}, 2), (lambda x, y: x, 1), (lambda x, y: (x, y, 1.0), 3),
])
def test_map_style_dataset_is_collated(make, arity):
    source = adapt(Squares(6, make))
    assert isinstance(source, Source) and len(source) == 6
    arrays = source.fetch(np.array([5, 2], dtype=np.int64))
    assert len(arrays) == arity and all(isinstance(a, np.ndarray) for a in arrays)
    assert arrays[0].tolist() == [[5.0] * 3, [2.0] * 3]
    if arity > 1:
        assert arrays[1].tolist() == [25, 4] and arrays[1].dtype == np.int64


def test_dataclasses_are_taken_by_the_names_of_their_fields():
    @dataclass
    class Sample:
        site: int
        label: int
        image: np.ndarray

    def named(i):
        return Sample(i % 3, i, np.full(3, i, np.float32))

    class Samples(Squares):
        def __getitem__(self, i):
            return named(i)

    class Items(IterableDataset):
        def __iter__(self):
            return map(named, range(6))

    loader = DataLoader(Samples(6, None), batch_size=4)
    for data in (Samples(6, None), Items(), loader):
        rows = ColumnNames(whole=True)
        source = adapt(data, rows=rows)
        arrays = source.fetch(np.arange(4)) if isinstance(source, Source) else next(iter(source.chunks(0)))
        assert [a[:4].tolist() for a in arrays] == [[[i] * 3 for i in range(4)], list(range(4)), [0, 1, 2, 0]]
        assert list(rows.packed(arrays)) == ["image", "label", "site"]
        with pytest.raises(UserError, match="not used by position"):
            adapt(data).fetch(np.arange(2)) if isinstance(source, Source) else next(iter(adapt(data).chunks(0)))
    assert loader.collate_fn is default_collate


def test_samples_that_cannot_be_collated_are_named():
    for make in (lambda x, y: (x, None), lambda x, y: object()):
        with pytest.raises(UserError, match="cannot be collated"):
            adapt(Squares(4, make)).fetch(np.array([0, 1]))


def test_subsets_that_ranks_draw_differently_are_refused():
    def work(control, wire):
        rows = TensorDataset(torch.arange(40.0)[:, None], torch.arange(40))
        indices = [0, 3 + control.rank, 20, 30, 39]  # the first, middle and last are the same
        feed = Feed(adapt(Subset(rows, indices)), 4, rank=control.rank, size=2, control=control)
        with pytest.raises(UserError, match="ranks hold different samples"):
            feed.check_ranks_agree()
        return True

    assert LockstepWorld(2).run(work, timeout_s=30.0) == [True, True]


def test_getitems_is_used_where_there_is_one():
    class Many(Squares):
        def __getitems__(self, indices):
            asked.append(indices)
            return [self[i] for i in indices]

    asked = []
    adapt(Many(6)).fetch(np.array([3, 0]))
    assert asked == [[3, 0]]


@pytest.mark.parametrize("make, words", [
    (lambda x, y: (x, "label"), "a sample holds strings, such as 'label'.*tokenize"),
    (lambda x, y: ((x, x), y), "after collation"),
    (lambda x, y: {"x": x, "yy": y}, "'yy'"),
])
def test_samples_that_are_not_numbers_are_named(make, words):
    with pytest.raises(UserError, match=words):
        adapt(Squares(4, make)).fetch(np.array([0, 1]))


def test_dataset_without_length_is_refused():
    class Endless(Dataset):
        def __getitem__(self, i):
            return i

    with pytest.raises(UserError, match="no len"):
        adapt(Endless())


def test_iterable_dataset_streams_anew_each_epoch_and_is_told_the_epoch():
    stream = adapt(Counting(150))
    assert isinstance(stream, Stream) and not isinstance(stream, Source)
    assert firsts(stream) == firsts(stream) == list(range(150))
    assert firsts(stream, epoch=2) == list(range(2000, 2150))
    assert [a.dtype for a in next(stream.chunks(0))] == [np.float32, np.int64]


def test_a_stream_that_each_rank_shuffles_is_not_verified():
    class Shuffled(IterableDataset):
        def __iter__(self):
            return ((np.float32(i), i % 2) for i in np.random.default_rng().permutation(40))

    def work(control, wire):
        feed = Feed(adapt(Shuffled()), 8, rank=control.rank, size=2, control=control)
        steps = list(feed.epoch(Cursor()))
        return len(steps), feed.unlike

    with pytest.warns(UserWarning, match="read different streams"):
        assert LockstepWorld(2).run(work, timeout_s=30.0) == [(5, "the ranks read different streams")] * 2


@pytest.mark.parametrize("loader, expected", [
    (DataLoader(Squares(7), batch_size=3), [[0, 1, 2], [3, 4, 5], [6]]),
    (DataLoader(Squares(7), batch_size=3, drop_last=True), [[0, 1, 2], [3, 4, 5]]),
    (DataLoader(Counting(5), batch_size=2), [[0, 1], [2, 3], [4]]),
    (DataLoader(Squares(2, lambda x, y: (x, x)), batch_size=None), [[0, 0, 0], [1, 1, 1]]),
])
def test_loader_streams_its_batches(loader, expected):
    chunks = list(adapt(loader).chunks(0))
    assert [np.reshape(x, (len(x), -1))[:, 0].tolist() for x, _ in chunks] == expected


def test_shuffling_loader_depends_on_seed_and_epoch_and_leaves_torchs_generator_alone():
    def loader(**args):
        return DataLoader(TensorDataset(torch.arange(30)), batch_size=4, shuffle=True, **args)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b = adapt(loader()), adapt(loader())
    epochs = [firsts(a, epoch) for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(epochs[2]) == list(range(30)) and len(set(map(tuple, epochs))) == 3
    assert firsts(b, 2) == epochs[2]  # a fresh process reaches epoch 2 without epochs 0 and 1
    assert firsts(adapt(loader(), seed=9), 0) != epochs[0]
    seeded = [adapt(loader(generator=torch.Generator().manual_seed(s))) for s in (5, 5, 6)]
    orders = [firsts(stream, 1) for stream in seeded]
    assert orders[0] == orders[1] != orders[2]


def test_loader_gets_its_own_generator_back():
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True, generator=own)
    chunks = adapt(loader).chunks(0)
    next(chunks)
    assert loader.sampler.generator is not own
    chunks.close()
    assert loader.generator is own and loader.sampler.generator is own


def test_loader_with_a_worker_process_streams_the_same_samples():
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True, num_workers=1)
    alone = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True)
    assert firsts(adapt(loader), 1) == firsts(adapt(alone), 1)


def test_distributed_sampler_is_refused():
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(UserError, match="DistributedSampler"):
        adapt(loader)


def numbered(files):
    for first, n in files:
        yield from ({"x": [float(first + i)], "y": i} for i in range(n))


def hugging():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.IterableDataset.from_generator(
        numbered, gen_kwargs={"files": [(0, 7), (100, 4), (200, 1), (300, 9), (400, 5)]})


class Parts(Counting):
    """Files of two samples each, which it can divide."""

    def __init__(self, n, files=None):
        super().__init__(n)
        self.files = list(range(n // 2)) if files is None else files
        self.num_shards = len(self.files)

    def shard(self, num_shards, index):
        return Parts(self.n, self.files[index::num_shards])

    def __iter__(self):
        yield from ((np.float32(2 * i + row + 1000 * self.epoch), row) for i in self.files for row in range(2))


@pytest.mark.parametrize("make", [
    lambda: Parts(12), lambda: hugging(), lambda: hugging().shuffle(seed=3, buffer_size=8).with_format("torch"),
    lambda: hugging().map(lambda row: {"y": row["y"] + 1}).filter(lambda row: row["y"] % 2).rename_column("y", "label"),
    lambda: DataLoader(Parts(12), batch_size=5),
    lambda: DataLoader(hugging().shuffle(seed=3, buffer_size=8).with_format("torch"), batch_size=3, num_workers=1)])
def test_shards_of_a_stream_hold_each_sample_once(make):
    whole, shared = adapt(make()), adapt(make())
    epochs = range(1 if hasattr(whole, "loader") and whole.loader.num_workers else 3)
    assert whole.num_shards >= 5
    for n in (2, 3)[:len(epochs)]:
        shards = [shared.shard(n, i) for i in range(n)]
        for epoch in epochs:
            found = [firsts(shard, epoch) for shard in shards]
            assert all(found) and sorted(sum(found, [])) == sorted(firsts(whole, epoch))
        assert firsts(adapt(make()).shard(n, 1), epoch) == found[1], "in the same order after a resume"


@pytest.mark.parametrize("make", [
    lambda: hugging().take(5), lambda: hugging().skip(2), lambda: hugging().map(lambda rows: rows, batched=True),
    lambda: hugging().map(lambda row, i: {"y": i}, with_indices=True), lambda: Counting(9),
    lambda: DataLoader(Parts(12), batch_size=5, drop_last=True), lambda: DataLoader(Squares(9)),
    lambda: DataLoader(Parts(12), batch_size=5, collate_fn=lambda rows: default_collate(rows[1:]))])
def test_a_stream_whose_samples_depend_on_the_division_has_no_shards(make):
    assert adapt(make()).num_shards == 0


@pytest.mark.parametrize("obj", [None, 3, "text", (1, 2), [], (np.arange(3), np.arange(3)), {"x": 1}])
def test_what_is_not_torchs_is_left_to_others(obj):
    assert adapt(obj) is None


def test_a_pair_of_datasets_is_train_and_test():
    pair = Squares(6), Squares(2)
    assert [len(interpret(pair, split, [adapt])) for split in ("train", "test")] == [6, 2]
    tensors = (torch.arange(4.0), torch.arange(4)), (torch.arange(2.0), torch.arange(2))
    assert [len(interpret(tensors, split, [adapt])) for split in ("train", "test")] == [4, 2]


def test_feed_resumes_a_shuffling_loader_in_the_middle_of_an_epoch():
    def feed():
        loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
        return Feed(adapt(loader), 5, control=OneProcess())

    whole = list(feed().epoch(Cursor(epoch=1)))
    rest = list(feed().epoch(whole[1].cursor_after))
    assert [s.micros[0][0].tolist() for s in rest] == [s.micros[0][0].tolist() for s in whole[2:]]
    assert [s.n_global for s in whole] == [5, 5, 5, 5, 3]
