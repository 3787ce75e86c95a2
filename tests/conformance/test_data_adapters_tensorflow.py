"""Keras' PyDataset and tf.data as numpy streams."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import bits, config, fitted, make_model, samples, solo

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import keras  # noqa: E402

from hvdtrain.backends.tensorflow.data import adapt  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import CheckpointConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols.types import Cursor  # noqa: E402
from hvdtrain.data.feed import Feed  # noqa: E402
from hvdtrain.data.sources import ArraySource, Source, interpret  # noqa: E402
from hvdtrain.data.stream import Stream  # noqa: E402


class Batches(keras.utils.PyDataset):
    """0 .. n-1 in batches of 4; every epoch's end adds 1000 and is counted."""

    def __init__(self, n, batch=4):
        super().__init__()
        self.x, self.batch, self.began, self.ended = np.arange(n), batch, 0, 0

    def __len__(self):
        return -(-len(self.x) // self.batch)

    def __getitem__(self, i):
        x = self.x[i * self.batch:(i + 1) * self.batch]
        return x, x % 2

    def on_epoch_begin(self):
        self.began += 1

    def on_epoch_end(self):
        self.ended += 1
        self.x = self.x + 1000


class OneProcess:
    """The control plane of a single rank."""

    rank, size = 0, 1

    def sum(self, values_k):
        return values_k


def firsts(stream, epoch=0):
    return [int(v) for chunk in stream.chunks(epoch) for v in np.ravel(chunk[0])]


def count(n=10):
    return tf.data.Dataset.range(n)


def rows(n=10):
    return tf.data.Dataset.from_tensor_slices((tf.reshape(tf.range(2 * n), (n, 2)), tf.range(n)))


@pytest.mark.parametrize("obj", [
    tf.range(5), (tf.range(5), tf.range(5)), [tf.range(5), np.arange(5)],
    (tf.Variable(np.arange(5)), tf.range(5)),
])
def test_tensors_become_arrays(obj):
    source = adapt(obj)
    assert isinstance(source, ArraySource) and len(source) == 5
    assert all(a.tolist() == [4, 1] for a in source.fetch(np.array([4, 1])))


def test_pydataset_streams_its_items_and_ends_epochs_as_keras_does():
    data = Batches(10)
    stream = adapt(data)
    assert isinstance(stream, Stream) and not isinstance(stream, Source)
    assert [len(x) for x, _ in stream.chunks(0)] == [4, 4, 2]
    assert (data.began, data.ended) == (1, 0)
    assert firsts(stream, 1) == list(range(1000, 1010))
    assert (data.began, data.ended) == (2, 1)


def test_pydataset_reaches_a_later_epoch_after_a_resume():
    assert firsts(adapt(Batches(10)), 3) == list(range(3000, 3010))


def test_pydataset_without_end_is_refused():
    class Endless(Batches):
        @property
        def num_batches(self):
            return None

    with pytest.raises(UserError, match="no end"):
        adapt(Endless(4))


def test_a_dataset_is_read_without_the_thread_that_tunes_it():
    assert adapt(count().batch(4)).dataset.options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert adapt(count().with_options(options)).dataset.options().autotune.enabled is True


def keep(*element):
    return element[0] if len(element) == 1 else element


@pytest.mark.parametrize("make", [
    lambda: count().batch(4),
    lambda: count().batch(4, drop_remainder=True).prefetch(2),
    lambda: count().batch(4, num_parallel_calls=2).cache().take(9).skip(1),
    lambda: count().padded_batch(4, padded_shapes=[]),
    lambda: count().batch(4).rebatch(3),
    lambda: count().batch(4).with_options(tf.data.Options()),
    lambda: count().batch(4).map(lambda x: x + 1),
    lambda: count().batch(4, drop_remainder=True).map(lambda x: x + 1, num_parallel_calls=2).prefetch(1),
    lambda: count().batch(4).shuffle(3, seed=1).repeat(2),
    lambda: count().batch(4).filter(lambda x: tf.reduce_sum(x) > 3),
    lambda: count().batch(4).apply(tf.data.experimental.assert_cardinality(3)),
    lambda: tf.data.Dataset.zip((count().batch(4), count().batch(4))),
    lambda: count().batch(4).concatenate(count().batch(2)),
    lambda: rows().batch(4).map(lambda x, y: (tf.cast(x, tf.float32), tf.one_hot(y, 3))),
])
def test_batches_are_recognised(make):
    stream = adapt(make())
    assert stream.batched
    assert all(len({len(a) for a in chunk}) == 1 for chunk in stream.chunks(0))


@pytest.mark.parametrize("make", [
    lambda: count(),
    lambda: count().shuffle(10, seed=1).prefetch(1),
    lambda: count().batch(5).unbatch(),
    lambda: rows(),
    lambda: rows().batch(5).map(lambda x, y: tf.reduce_sum(x)),
    lambda: count().batch(5).map(lambda x: tf.ensure_shape(x[:3], (3,))),
    lambda: tf.data.Dataset.zip((rows().batch(5), count())),
    lambda: rows().batch(5).flat_map(lambda x, y: tf.data.Dataset.from_tensor_slices((x, y))),
])
def test_samples_are_recognised(make):
    assert not adapt(make()).batched


def test_samples_are_stacked():
    chunks = list(adapt(rows(150)).chunks(0))
    assert sum(len(y) for _, y in chunks) == 150
    x, y = (np.concatenate(column) for column in zip(*chunks))
    assert x.shape == (150, 2) and np.array_equal(y, np.arange(150)) and np.array_equal(x[:, 0], 2 * y)


@pytest.mark.parametrize("element, arity", [
    (lambda x: {"y": x, "x": x + 1}, 2), (lambda x: {"image": x + 1, "label": x}, 2), (lambda x: x + 1, 1),
    (lambda x: (x + 1, x, x), 3),
])
def test_elements_may_be_dicts_or_tuples(element, arity):
    chunk = next(adapt(count().batch(4).map(element)).chunks(0))
    assert len(chunk) == arity and chunk[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("batch", [0, 4])
def test_several_inputs_are_laid_flat_and_packed_again(batch):
    data = count().map(lambda x: ({"b": x + 1, "a": x}, (x * 2, x), x * 3))
    stream = adapt(data.batch(batch) if batch else data)
    chunk = next(stream.chunks(0))
    assert [array[:2].tolist() for array in chunk] == [[0, 1], [1, 2], [0, 2], [0, 1], [0, 3]]
    x, y, weight = stream.layout.pack(chunk)
    assert x["b"] is chunk[1] and y[0] is chunk[2] and weight is chunk[4]


@pytest.mark.parametrize("make, words", [
    (lambda: count().map(lambda x: {"x": x, "yy": x}), "'yy'"),
    (lambda: count().map(lambda x: ((x, tf.strings.as_string(x)), x)), "plain array of numbers"),
    (lambda: count().map(lambda x: tf.strings.as_string(x)), "element holds strings, such as '0'.*tokenize"),
    (lambda: count().map(lambda x: tf.range(x)), "one shape"),
    (lambda: count().map(lambda x: tf.range(x)).ragged_batch(3), "plain array of numbers"),
    (lambda: count().window(3), "cannot be read as arrays"),
])
def test_elements_that_are_not_arrays_are_named(make, words):
    with pytest.raises(UserError, match=words):
        list(adapt(make()).chunks(0))


@pytest.mark.parametrize("make, words", [
    (lambda: count().repeat(), "no end"),
    (lambda: count().repeat().batch(4).prefetch(1), "no end"),
    (lambda: count().shuffle(10).batch(4), "without a seed"),
    (lambda: count().map(keep, num_parallel_calls=2, deterministic=False), "deterministic=False"),
    (lambda: count().with_options(unordered()), "deterministic = False"),
])
def test_datasets_that_ranks_cannot_share_are_refused(make, words):
    tf.random.set_seed(None)  # under a global seed, such as another test's, every shuffle has one
    with pytest.raises(UserError, match=words):
        adapt(make())


def unordered():
    options = tf.data.Options()
    options.deterministic = False
    return options


@pytest.mark.parametrize("make", [
    lambda: count(12).shuffle(12, seed=4).shuffle(5, seed=1).batch(5),
    lambda: count(12).shuffle(4, seed=1).concatenate(count(12).shuffle(9, seed=2).shuffle(3, seed=3)).batch(5),
    lambda: count(12).shuffle(12, seed=4).repeat(2).batch(5),
    lambda: count(12).shuffle(12, seed=4).batch(5).prefetch(2),
    lambda: count(12).cache().shuffle(12, seed=4).batch(5).map(lambda x: x * 2, num_parallel_calls=2),
    lambda: count(12).shuffle(12, seed=4).repeat(2).shuffle(5, seed=1).batch(5),
    lambda: count(12).shuffle(12, seed=4, reshuffle_each_iteration=False),
])
def test_a_fresh_process_reaches_the_order_of_a_later_epoch(make):
    run = adapt(make())
    epochs = [firsts(run, epoch) for epoch in range(4)]
    for epoch in (3, 1):
        assert firsts(adapt(make()), epoch) == epochs[epoch]
    left = adapt(make())  # in the middle of epoch 0, as after a try of the model
    first = left.chunks(0)
    next(first)
    first.close()
    assert firsts(left, 1) == epochs[1]


def test_feed_resumes_a_shuffling_dataset_in_the_middle_of_an_epoch():
    def feed():
        return Feed(adapt(count(23).shuffle(23, seed=2).batch(4)), 5, control=OneProcess())

    run = feed()
    list(run.epoch(Cursor()))
    whole = list(run.epoch(Cursor(epoch=1)))
    rest = list(feed().epoch(whole[1].cursor_after))
    assert [s.micros[0][0].tolist() for s in rest] == [s.micros[0][0].tolist() for s in whole[2:]]
    assert [s.n_global for s in whole] == [5, 5, 5, 5, 3]


def test_a_stream_that_each_rank_shuffles_is_not_verified():
    def numbers():
        yield from np.random.default_rng().permutation(40)

    def work(control, wire):
        dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec((), tf.int64)).batch(4)
        feed = Feed(adapt(dataset), 8, rank=control.rank, size=2, control=control)
        steps = list(feed.epoch(Cursor()))
        return len(steps), feed.unlike

    with pytest.warns(UserWarning, match="read different streams"):
        assert LockstepWorld(2).run(work, timeout_s=30.0) == [(5, "the ranks read different streams")] * 2


def test_a_run_resumed_in_its_first_epoch_opens_a_shuffling_dataset_once(tmp_path):
    settings = config(out=str(tmp_path / "run"), epochs=1, global_batch=8, max_steps=3,
                      checkpoint=CheckpointConfig(at_end=True))
    dataset = [tf.data.Dataset.from_tensor_slices(samples(40)).shuffle(40, seed=3).batch(8) for _ in range(3)]
    whole = replace(settings, max_steps=0, out=str(tmp_path / "whole"))
    want = fitted(solo(whole, make_model("tensorflow"), dataset[0]))
    fitted(solo(settings, make_model("tensorflow"), dataset[1]))
    got = fitted(solo(replace(settings, resume="auto", max_steps=0), make_model("tensorflow"), dataset[2]))
    assert bits(got) == bits(want) and got.ledger["epochs"] == 1 and not got.ledger["unchecked"]


def number(line):
    return tf.strings.to_number(line, tf.int64)


def of_files(make):
    """Return what ``make`` returns for the names of five text files of numbers, of which one is empty."""
    def made(folder):
        names = [str(folder / f"{i}.txt") for i in range(5)]
        for i, name in enumerate(names):
            (folder / f"{i}.txt").write_text("".join(f"{100 * i + row}\n" for row in range([7, 4, 0, 9, 5][i])))
        return make(names)

    return made


lines = tf.data.TextLineDataset
files = tf.data.Dataset.from_tensor_slices


@pytest.mark.parametrize("make", [
    lambda names: lines(names).map(number).batch(4).prefetch(2),
    lambda names: lines(names, num_parallel_reads=2).map(number, num_parallel_calls=2).filter(lambda x: x % 2 == 0),
    lambda names: files(names).interleave(lines, cycle_length=2).map(number).shuffle(6, seed=1).batch(3).repeat(2),
    lambda names: files(names).shuffle(5, seed=7).flat_map(lines).map(number).cache().shuffle(9, seed=2),
])
def test_shards_of_a_dataset_hold_each_sample_once(make, tmp_path):
    """In every epoch, and in the same order for a run that starts at a later one."""
    def epochs(shards, first):
        return [[firsts(shard, epoch) for shard in shards] for epoch in range(first, 3)]

    whole, streams = adapt(of_files(make)(tmp_path)), [adapt(of_files(make)(tmp_path)) for _ in range(2)]
    assert whole.num_shards == 5
    for n in (2, 3):
        found = epochs([streams[0].shard(n, i) for i in range(n)], 0)
        assert [sorted(sum(shards, [])) for shards in found] == [sorted(firsts(whole))] * 3
        assert epochs([streams[1].shard(n, i) for i in range(n)], 1) == found[1:]


@pytest.mark.parametrize("make", [
    lambda names: lines(names).map(number).take(9),
    lambda names: lines(names).map(number).batch(4, drop_remainder=True),
    lambda names: lines(names).map(number).batch(4).unbatch(),
    lambda names: lines(names).map(number).batch(4).map(tf.reduce_sum),
    lambda names: lines(names).map(number).shard(2, 0),
    lambda names: lines(names).map(number).cache(names[0] + "-cache"),
    lambda names: tf.data.Dataset.zip(lines(names).map(number), lines(names).map(number)),
    lambda names: files(np.arange(8)).map(lambda x: x + 1),
    lambda names: files(np.arange(8)).flat_map(tf.data.Dataset.from_tensors),
    lambda names: count(),
])
def test_a_dataset_whose_samples_depend_on_the_division_has_no_shards(make, tmp_path):
    assert adapt(of_files(make)(tmp_path)).num_shards == 0


@pytest.mark.parametrize("obj", [None, 3, "text", (1, 2), [], (np.arange(3), np.arange(3)), {"x": 1}])
def test_what_is_not_tensorflows_is_left_to_others(obj):
    assert adapt(obj) is None


def test_a_pair_of_datasets_is_train_and_test():
    pair = Batches(8), count(3)
    assert [len(firsts(interpret(pair, split, [adapt]))) for split in ("train", "test")] == [8, 3]
