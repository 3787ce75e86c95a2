"""Tars, TFRecord, JSON lines, Parquet and `datasets`: read by number, indexed once, and named where they are damaged."""

import importlib.util
import io
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from shards import ENDINGS, FORMATS, example, npy, record, write_shards, write_tar

from hvdtrain.core.errors import UserError
from hvdtrain.data import index, kept
from hvdtrain.data.cells import columns_of
from hvdtrain.data.crc32c import crc32c
from hvdtrain.data.feed import Feed
from hvdtrain.data.formats import braces
from hvdtrain.data.sets import jsonl
from hvdtrain.data.sources import ALL, Source, Unreadable, resolve, resolve_splits

N = 23
X = np.random.default_rng(0).standard_normal((N, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(-5, 300, N)
PACKAGES = {"parquet": "pyarrow", "hf": "datasets"}
INDEXED = [kind for kind in FORMATS if kind != "hf"]


def needed(kind):
    package = PACKAGES.get(kind, "numpy")
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def each(kinds=FORMATS):
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=needed(kind)) for kind in kinds])


@pytest.fixture
def args(tmp_path, monkeypatch):
    """Return a function that writes the shards of a format and returns ``data.args`` of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def write(kind, **more):
        made = {"files": write_shards(tmp_path / "shards", kind, X, Y), "shape": [4, 3], **more}
        return made | ({"cache": str(tmp_path / "hf")} if kind == "hf" else {})
    return write


def everything(source):
    return source.fetch(np.arange(len(source)))


def indexes(tmp_path):
    return sorted((tmp_path / "shards" / index.FOLDER).iterdir())


@each()
def test_samples_by_number_splits_and_pickles(kind, args):
    given = args(kind)
    source, test = resolve_splits(kind, given)
    assert isinstance(source, Source) and len(source) == N and test is None
    order = np.random.default_rng(2).permutation(N)
    for one in (source, pickle.loads(pickle.dumps(source))):
        x, y = one.fetch(order)
        assert x.dtype == np.float32 and y.dtype == np.int64
        assert np.array_equal(x, X[order]) and np.array_equal(y, Y[order])
    assert "x is " in source.rows.note and "y is " in source.rows.note
    train, test = resolve_splits(kind, {**given, "test_fraction": 0.3})
    assert sorted([*everything(train)[1], *everything(test)[1]]) == sorted(Y) and len(test) == round(0.3 * N)
    assert len(resolve(kind, {**given, "test_fraction": 0.3}, ALL)) == N
    train, test = resolve_splits(kind, {**given, "test": given["files"]})
    assert len(train) == len(test) == N and resolve(kind, {**given, "test": given["files"]}, ALL) is None


@each()
def test_ranks_read_each_sample_once_and_count_it(kind, args):
    source = resolve(kind, args(kind), "train")
    feeds = [Feed(source, 8, rank=rank, size=3, seed=4, prefetch=0) for rank in range(3)]
    seen = [batch.numbers for feed in feeds for batch in feed.epoch(next_epoch())]
    assert sorted(np.concatenate(seen)) == list(range(N)) and sum(feed.decodes for feed in feeds) == N


def next_epoch():
    from hvdtrain.core.protocols.types import Cursor

    return Cursor().next_epoch()


@each(INDEXED)
def test_an_index_is_made_once_checked_and_made_again_for_changed_shards(kind, args, tmp_path, monkeypatch):
    given, scans = args(kind), []
    real = index.Index.__init__
    monkeypatch.setattr(index.Index, "__init__", lambda self, *a, **k: (scans.append(1), real(self, *a, **k))[1])
    threads = [threading.Thread(target=resolve, args=(kind, given, "train")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made = indexes(tmp_path)
    assert [path for path in made if path.suffix == ".lock"] == [] and len({p.stem for p in made}) == 3
    before = [path.stat().st_mtime_ns for path in made]
    assert np.array_equal(everything(resolve(kind, given, "train"))[0], X)
    assert [path.stat().st_mtime_ns for path in made] == before, "nothing was made again"
    at = next(i for i, path in enumerate(made) if path.suffix == ".index")
    text = made[at].read_bytes()
    made[at].write_bytes(text[:-8] + b"\xff" * 8)  # a checksum notices
    assert np.array_equal(everything(resolve(kind, given, "train"))[1], Y)
    assert kind == "parquet" or made[at].read_bytes() == text  # of Parquet it names a new Arrow file
    source = resolve(kind, given, "train")
    write_shards(tmp_path / "shards", kind, X[:17], Y[:17])
    for use in (lambda: everything(source), lambda: everything(pickle.loads(pickle.dumps(source)))):
        with pytest.raises(UserError, match="part-0[0-2].* changed while it was in use") as caught:
            use()
        assert not isinstance(caught.value, Unreadable), "no sample that may be skipped"
    source = resolve(kind, given, "train")
    assert np.array_equal(everything(source)[0], X[:17])
    (tmp_path / "shards" / f"part-01.{ENDINGS[kind]}").unlink()
    with pytest.raises(UserError, match="part-01.* cannot be read: No such file"):
        everything(source)


def test_an_index_is_waited_for_divided_and_elsewhere_where_the_data_is_read_only(args, tmp_path, monkeypatch):
    given = args("jsonl")
    resolve("jsonl", {**given, "cache": str(tmp_path / "c")}, "train")
    assert len(list((tmp_path / "c").iterdir())) == 3 and not (tmp_path / "shards" / index.FOLDER).exists()
    (tmp_path / "shards" / index.FOLDER).write_text("no folder")
    resolve("jsonl", given, "train")
    assert len(list((tmp_path / "xdg/hvdtrain/index").iterdir())) == 3
    (tmp_path / "shards" / index.FOLDER).unlink()
    (tmp_path / "shards" / index.FOLDER).mkdir()
    monkeypatch.setattr(kept, "WAIT_S", 0.05)
    scanned = []
    real = jsonl.JsonLines.scan
    monkeypatch.setattr(jsonl.JsonLines, "scan", lambda self, path, *a: (scanned.append(Path(path).name),
                                                                        real(self, path, *a))[1])
    key = next(iter((tmp_path / "c").iterdir())).suffixes[-2]
    with open(tmp_path / "shards" / index.FOLDER / f"part-01.jsonl{key}.index.lock", "w") as lock:
        kept.fcntl.flock(lock, kept.fcntl.LOCK_EX)
        with pytest.raises(UserError, match="has been indexing a shard for more than"):
            resolve("jsonl", given, "train")
    assert sorted(scanned) == ["part-00.jsonl", "part-02.jsonl"], "what nobody else makes is made before the wait"


def damaged(kind, path, how):
    """Damage the second sample of a shard, or truncate it in the last one."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[:-40] if kind != "webdataset" else data[:-(10240 - 4000)])
    elif kind == "jsonl":
        path.write_bytes(data.replace(b'"x"', b'"x', 2).replace(b'"x', b'"x"', 1))
    elif kind == "tfrecord":
        size = len(record(example({"x": X[0].ravel(), "y": 0})))
        data[size + 40] ^= 1
        path.write_bytes(data)
    else:
        at = data.index(b"\x93NUMPY", data.index(b"\x93NUMPY") + 1)
        data[at + 1:at + 6] = b"NUMPX"
        path.write_bytes(data)


@pytest.mark.parametrize("kind, how, reason", [
    ("jsonl", "corrupt", "it is no JSON"), ("jsonl", "truncated", "it is no JSON"),
    ("tfrecord", "corrupt", "its checksum is wrong"), ("tfrecord", "truncated", "the file is truncated here"),
    ("webdataset", "truncated", "truncated"),
])
def test_a_damaged_sample_is_named_and_others_are_read(kind, how, reason, args, tmp_path):
    given = args(kind)
    path = tmp_path / "shards" / f"part-01.{ENDINGS[kind]}"
    damaged(kind, path, how)
    source = resolve(kind, given, "train")
    with pytest.raises(Unreadable, match=f"part-01.*, byte [1-9][0-9]*: .*{reason}") as caught:
        everything(source)
    bad = caught.value.number
    good = np.setdiff1d(np.arange(len(source)), [bad])
    x, y = source.fetch(good)
    assert np.array_equal(x[:8], X[:8]) and set(y) <= set(Y) and 8 <= bad < 16
    assert len(source) == N or how == "truncated"
