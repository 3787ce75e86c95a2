"""Tars, TFRecord, JSON lines, Parquet and `datasets`: read by number, indexed once, named where damaged."""

import importlib.util
import io
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from shards import ENDINGS, FORMATS, example, npy, record, write_shards, write_tar

from hvdtrain.core.errors import UserError
from hvdtrain.data import index, kept
from hvdtrain.data.cells import columns_of
from hvdtrain.data.feed import Feed
from hvdtrain.data.formats import braces
from hvdtrain.data.sets import jsonl, tfrecord
from hvdtrain.data.sources import ALL, Source, Unreadable, resolve, resolve_splits

N = 23
X = np.random.default_rng(0).standard_normal((N, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(-5, 300, N)
PACKAGES = {"parquet": "pyarrow", "hf": "datasets", "tfrecord": "google_crc32c"}
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
    assert sorted(np.concatenate(seen)) == list(range(N)) and sum(feed.walk.decodes for feed in feeds) == N


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
    real = jsonl.JsonlFormat.scan
    monkeypatch.setattr(jsonl.JsonlFormat, "scan", lambda self, path, *a: (scanned.append(Path(path).name),
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


def picture(colour, size=(5, 6), ending="png"):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    out = io.BytesIO()
    image.fromarray(np.full((*size, 3), colour, np.uint8)).save(out, {"jpg": "JPEG"}.get(ending, ending))
    return out.getvalue()


def test_fields_of_a_tf_example_that_are_unknown_are_skipped():
    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    unknown = field(7, b"??") + bytes([9 << 3, 5])
    label, text = field(3, field(1, b"\x04")), field(1, unknown + field(1, b"abc"))
    entries = [field(1, b"y") + field(2, unknown + label), field(1, b"x") + field(2, field(2, b"") + text),
               field(2, label)]
    features = unknown + b"".join(field(1, entry) for entry in entries)
    assert tfrecord._features(unknown + field(1, features)) == {"y": 4, "x": b"abc", "": 4}


def test_pictures_of_every_format_are_those_of_a_folder(tmp_path):
    from hvdtrain.data.pictures import load_picture

    colours = np.arange(0, 240, 24)
    pictures = [picture(c, ending=("png", "jpg", "ppm")[i % 3]) for i, c in enumerate(colours)]
    write_tar(tmp_path / "a.tar", [file for i, one in enumerate(pictures) for file in (
        (f"d/{i}.cls", b"%d" % i), (f"d/{i}.{('png', 'jpg', 'ppm')[i % 3]}", one),
        (f"d/{i}.json", b'{"a": {}, "b": 7}'))])
    (tmp_path / "a.tfrecord").write_bytes(b"".join(
        record(example({"height": 5, "label": i, "image": one}, packed=i % 2 == 0)) for i, one in enumerate(pictures)))
    found = {"tfrecord": {"files": str(tmp_path / "a.tfrecord")},
             "webdataset": {"files": str(tmp_path / "a.tar"), "x": "png;jpg;ppm"}}
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        found["parquet"] = {"files": str(tmp_path / "a.parquet")}  # as `datasets` writes an Image column
        pyarrow.parquet.write_table(pyarrow.table({
            "image": [{"bytes": one, "path": None} for one in pictures], "label": list(range(10))}),
            tmp_path / "a.parquet")
    for kind, args in found.items():
        more = {"size": 4, "mean": 0.5, "layout": "channels_first"}
        source = resolve(kind, {**args, **more}, "train")
        x, y = source.fetch(np.array([7, 2, 0]))
        assert x.shape == (3, 3, 4, 4) and x.dtype == np.float32 and y.tolist() == [7, 2, 0], kind
        assert np.array_equal(x[1], load_picture(pictures[2], **more)) and source.scale.mean == (0.5,) * 3
    tar = found["webdataset"]
    assert resolve("webdataset", {**tar, "y": "json.b"}, "train").fetch(np.array([3]))[1].tolist() == [7]
    with pytest.raises(UserError, match="first sample 'a picture' .5, 6, 3.|a picture .3, 6, 3.*data.args.size"):
        write_tar(tmp_path / "b.tar", [("0.png", pictures[0]), ("0.cls", b"1"), ("1.png", picture(3, (3, 6))),
                                       ("1.cls", b"1")])
        everything(resolve("webdataset", {"files": str(tmp_path / "b.tar")}, "train"))


@pytest.mark.parametrize("names, wanted", [
    (["cls", "jpg"], ("jpg", "cls")), (["a", "b", "c"], ("a", "b")), (["label", "image"], ("image", "label")),
    (["features"], ("features",)), (["id", "input_ids", "labels"], ("input_ids", "labels"))])
def test_which_columns_are_x_and_y(names, wanted):
    assert columns_of(names, "", "", "", "f") == wanted
    assert columns_of(names, names[-1], "", "", "f")[0] == names[-1]


def test_a_column_of_sample_weights(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"w": 2, "x": [1.5], "y": 1}\n{"w": 1, "x": [2], "y": 0}\n')
    source = resolve("jsonl", {"files": str(tmp_path / "a.jsonl"), "weight": "w"}, "train")
    x, y, w = everything(source)
    assert x.tolist() == [[1.5], [2]] and y.tolist() == [1, 0] and w.tolist() == [2, 1] and w.dtype == np.float32
    assert source.rows.note == "data: x is x, y is y, weight is w"
    with pytest.raises(UserError, match="no column for y"):
        columns_of(["x", "w"], "", "", "w", "f")


def test_what_a_user_gets_wrong_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": [1.5, 2], "y": 1}\n\r\n{"x": [3, 4], "y": 2}\n{"x": [1], "y": 2}\n'
                                      '{"x": "word", "y": 2}\n{"y": 2}\n[1]\n{"x": [1.5, 2], "y": 2.5}')
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b rest")
    (tmp_path / "c.tar").write_bytes(b"no tar" * 200)
    (tmp_path / "d.tfrecord").write_bytes(record(b"no example") + record(example({"x": b"ab", "y": 1})))
    (tmp_path / "e.jsonl").write_text("\n\n")
    files = {name[0]: str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.tar", "d.tfrecord", "e.jsonl")}
    source = resolve("jsonl", {"files": files["a"]}, "train")
    x, y = source.fetch(np.array([1, 0]))
    assert len(source) == 7 and x.tolist() == [[3, 4], [1.5, 2]] and x.dtype == np.float32 and y.tolist() == [2, 1]
    for row, words in ((2, r"x is float32 \[1\], in the first sample float32 \[2\]"), (3, "strings, such as 'word'"),
                       (4, "sample 4 cannot be read: .*a.jsonl, byte [0-9]+: x is missing"), (5, "a JSON list"),
                       (6, "y is float32")):
        with pytest.raises(UserError, match=words):
            source.fetch(np.array([row]))
    for kind, args, words in (
            ("jsonl", {}, "jsonl needs the argument 'files'"),
            ("jsonl", {"fils": "x"}, "takes no argument 'fils'.*files"),
            ("jsonl", {"files": str(tmp_path / "*.json")}, "no file is .*json, of data.args.files"),
            ("jsonl", {"files": files["a"], "x": "z"}, "data.args.x is 'z', and .*a.jsonl has the columns x, y"),
            ("jsonl", {"files": files["b"]}, "compressed with gzip"), ("jsonl", {"files": files["e"]}, "no sample"),
            ("jsonl", {"files": files["a"], "shape": [0]}, "data.args.shape is"),
            ("jsonl", {"files": files["a"], "dtype": "str"}, "data.args.dtype is 'str'"),
            ("jsonl", {"files": files["a"], "test": "x", "test_fraction": 0.1}, "one of them"),
            ("webdataset", {"files": files["c"]}, "no sample|truncated or damaged"),
            ("tfrecord", {"files": files["d"]}, "no readable sample: it is no tf.Example"),
            ("tfrecord", {"files": files["c"]}, "checksum of its length is wrong")):
        with pytest.raises(UserError, match=words):
            resolve(kind, args, "train")
    (tmp_path / "d.tfrecord").write_bytes(record(example({"x": b"ab", "y": 1})) + record(b"no example"))
    with pytest.raises(UserError, match="holds 2 bytes.*data.args.dtype"):
        resolve("tfrecord", {"files": files["d"]}, "train")
    source = resolve("tfrecord", {"files": files["d"], "dtype": "uint8"}, "train")
    assert source.fetch(np.array([0]))[0].tolist() == [[97, 98]]
    with pytest.raises(Unreadable, match="d.tfrecord, byte [0-9]+: it is no tf.Example"):
        source.fetch(np.array([1]))


def test_tars_lose_no_sample_unnoticed(tmp_path):
    files = [(f"{i}.{ending}", data) for i in range(4) for ending, data in (("npy", npy(X[i])), ("cls", b"%d" % i))]
    write_tar(tmp_path / "a.tar", [*files[:3], *files[4:]])
    whole = (tmp_path / "a.tar").read_bytes()
    source = resolve("webdataset", {"files": str(tmp_path / "a.tar")}, "train")
    with pytest.raises(Unreadable, match="sample 1 .*no file that ends in .cls, but npy"):
        everything(source)
    for cut in (7 * 1024, 5 * 1024, 2700):  # without the end's zeros, and in the middle of a header and of a file
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        source = resolve("webdataset", {"files": str(tmp_path / "a.tar")}, "train")
        with pytest.raises(Unreadable, match="truncated"):
            source.fetch(np.array([len(source) - 1]))
    files[2] = ("1.npy", npy(X[1]).replace(b"{'descr'", b"{'descr(", 1))  # numpy reads a header as Python
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(Unreadable, match="sample 1 .*byte [0-9]+: x is a damaged .npy"):
        everything(resolve("webdataset", {"files": str(tmp_path / "a.tar")}, "train"))


@needed("parquet")
def test_a_damaged_row_group_is_named(tmp_path):
    import pyarrow.parquet

    pattern = write_shards(tmp_path / "p", "parquet", X, Y, 1)
    path = tmp_path / "p/part-00.parquet"
    at = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[at:at + 30] = b"\xff" * 30
    path.write_bytes(data)
    source = resolve("parquet", {"files": pattern}, "train")
    with pytest.raises(Unreadable, match="sample 7 .*part-00.parquet, byte [0-9]+: row group 1 cannot be read"):
        everything(source)
    good = np.r_[0:7, 14:N]
    assert np.array_equal(source.fetch(good)[1], Y[good])
    path.write_bytes(data[:-9])
    with pytest.raises(UserError, match="part-00.parquet cannot be read"):
        resolve("parquet", {"files": pattern}, "train")


@needed("hf")
def test_a_saved_dataset_and_its_splits(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a"] * N, "x": X.reshape(N, -1).tolist(), "label": Y.tolist()})
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(str(tmp_path / "d"))
    rows.save_to_disk(str(tmp_path / "one"))
    train, test = resolve_splits("hf", {"files": str(tmp_path / "d")})
    assert (len(train), len(test)) == (N, 5) and np.array_equal(everything(train)[1], Y)
    assert resolve("hf", {"files": str(tmp_path / "d")}, ALL) is None
    assert resolve_splits("hf", {"files": str(tmp_path / "one")})[1] is None
    with pytest.raises(UserError, match="cannot be loaded by datasets"):
        resolve("hf", {"files": str(tmp_path)}, "train")


def test_tensorflow_writes_what_is_read_here(tmp_path):
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    kinds = tf.train
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as out:
        for i in range(3):
            out.write(kinds.Example(features=kinds.Features(feature={
                "x": kinds.Feature(float_list=kinds.FloatList(value=[i, 0.5, -2])),
                "n": kinds.Feature(bytes_list=kinds.BytesList(value=[b"n"])),
                "y": kinds.Feature(int64_list=kinds.Int64List(value=[-2**63 + i, 2**40, *range(i, 40 + i)])),
            })).SerializeToString())
    x, y = everything(resolve("tfrecord", {"files": str(tmp_path / "a.tfrecord")}, "train"))
    assert x.tolist() == [[i, 0.5, -2] for i in range(3)]
    assert y.tolist() == [[-2**63 + i, 2**40, *range(i, 40 + i)] for i in range(3)]


def test_braces_as_shells_spell_them_out():
    assert braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert braces("{a,b}/x{1..2}") == ["a/x1", "a/x2", "b/x1", "b/x2"] and braces("plain*") == ["plain*"]
