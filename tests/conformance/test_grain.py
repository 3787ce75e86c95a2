"""Datasets and loaders of grain in both frameworks: samples by number, streams with their state, refusals."""

import json

import numpy as np
import pytest
from small_runs import FRAMEWORKS, config, fitted, make_model, samples, solo

grain = pytest.importorskip("grain", reason="grain is not installed")

from hvdtrain import backends  # noqa: E402
from hvdtrain.checkpoint.manifest import decode_state, encode_state  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.config import DataConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols.types import Cursor  # noqa: E402
from hvdtrain.data import stream_reading, stream_state  # noqa: E402
from hvdtrain.data.feed import Feed  # noqa: E402
from hvdtrain.data.sources import Source, interpret  # noqa: E402

X, Y = samples(40)
SHORT = config(epochs=2, global_batch=12, metrics=[], data=DataConfig(prefetch=0, workers=0, shuffle=False))


def rows():
    return grain.MapDataset.source([(x, int(y)) for x, y in zip(X, Y)])


def loader(operations=(), **sampler):
    sampler = {"num_epochs": 1, "shard_options": grain.sharding.NoSharding(), **sampler}
    return grain.DataLoader(data_source=[(x, int(y)) for x, y in zip(X, Y)], operations=operations,
                            sampler=grain.samplers.IndexSampler(40, **sampler))


def read(framework, data):
    return interpret(data, "train", (backends.load(framework).adapt_data,))


def walked(framework, data, cursor, n=0, restored=None):
    """Return (x of each step, the state after them, the note about a replay, samples read)."""
    feed = Feed(read(framework, data()), 8, control=SoloControl(), prefetch=0)
    feed.walk.positions.restored = restored
    note, steps, at = feed.walk.replay(cursor), [], cursor
    for step in (batches := feed.epoch(cursor)):
        steps.append(step.micros[0][0])
        at = step.cursor_after
        if len(steps) == n:
            break
    state = encode_state(feed.walk.positions.saved(at.epoch, at.samples), "state")
    batches.close()
    return np.concatenate(steps), decode_state(json.loads(json.dumps(state))), note, feed.walk.decodes


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_and_batches_of_grain_train(framework):
    run = fitted(solo(SHORT, make_model(framework), loader([grain.transforms.Batch(7)], shuffle=True, seed=1)))
    assert run.ledger["samples"] == run.feed.walk.decodes == 80
    source = read(framework, rows())
    x, y = source.fetch(np.arange(40))
    assert isinstance(source, Source) and (x == X).all() and (y == Y).all() and x.dtype == X.dtype


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("data", [
    lambda: rows().shuffle(seed=3).to_iter_dataset(), lambda: rows().filter(lambda row: row[1] < 4),
    lambda: rows().shuffle(seed=3).batch(6), lambda: rows().to_iter_dataset().batch(5).map(lambda batch: batch),
    lambda: loader(shuffle=True, seed=1), lambda: loader([grain.transforms.Batch(7)])])
def test_a_stream_of_grain_is_continued_at_its_state(framework, data, monkeypatch):
    monkeypatch.setattr(stream_state, "LEAST_INTERVAL", 0)
    monkeypatch.setattr(stream_reading, "_CHUNK", 5)
    whole, *_ = walked(framework, data, Cursor(1))
    first, state, *_ = walked(framework, data, Cursor(1), 3)
    rest, _, note, decodes = walked(framework, data, Cursor(1, 3, 3, 24), restored=state)
    assert note == "" and state["samples"] > 12 and decodes == len(whole) - state["samples"]
    assert (first == whole[:24]).all() and (rest == whole[24:]).all() and len(whole) in (40, sum(Y < 4))


def test_a_map_dataset_draws_other_numbers_in_each_epoch():
    data = rows().random_map(lambda row, draw: (row[0] + draw.normal(), row[1]), seed=5)
    source = read("torch", data)
    again, other = (source.fetch_in(np.array([4, 9]), epoch)[0] for epoch in (0, 1))
    assert (again == source.fetch(np.array([4, 9]))[0]).all() and (again != other).all()
    repeated = data.repeat(2)
    assert (other == [repeated[44][0], repeated[49][0]]).all()


@pytest.mark.parametrize("data, words", [
    (lambda: rows().repeat(), "no end"),
    (lambda: grain.experimental.RepeatIterDataset(rows().to_iter_dataset()), "no end"),
    (lambda: rows().repeat().to_iter_dataset().batch(4), "no end"), (lambda: loader(num_epochs=None), "no end"),
    (lambda: loader(shard_options=grain.sharding.ShardOptions(0, 2)), "one of 2 shards")])
def test_grain_without_end_and_shares_of_it_are_refused(data, words):
    with pytest.raises(UserError, match=words):
        read("torch", data())
