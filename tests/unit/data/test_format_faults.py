"""Files of each format that once gave other samples than are in them, in silence."""

import importlib.util
import os

import numpy as np
import pytest
from shards import npy, write_shards, write_tar

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import Unreadable, resolve

N = 23
X = np.random.default_rng(0).standard_normal((N, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(-5, 300, N)
PARQUET = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


def everything(source):
    return source.fetch(np.arange(len(source)))


def test_tars_that_webdataset_refuses_or_that_go_on_after_their_end(tmp_path):
    files = [(f"__{i}.{ending}", data) for i in range(3) for ending, data in (("npy", npy(X[i])), ("cls", b"%d" % i))]
    write_tar(tmp_path / "a.tar", [("__notes__/0.json", b"1"), *files])
    assert everything(resolve("webdataset", {"files": str(tmp_path / "a.tar")}, "train"))[1].tolist() == [0, 1, 2]
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes() * 2)  # as cat does
    with pytest.raises(Unreadable, match="sample 3 .*the tar ends here, but not its file"):
        everything(resolve("webdataset", {"files": str(tmp_path / "b.tar")}, "train"))
    write_tar(tmp_path / "c.tar", [*files, *files[4:]])  # as tar --append does
    with pytest.raises(Unreadable, match="sample 2 .*two files that end in .npy"):
        everything(resolve("webdataset", {"files": str(tmp_path / "c.tar")}, "train"))
    write_tar(tmp_path / "d.tar", [("0.json", b'{"label": 7}'), ("0.npy", npy(X[0]))])
    assert everything(resolve("webdataset", {"files": str(tmp_path / "d.tar"), "y": "json.label"}, "train"))[1] == 7


def test_numbers_that_do_not_fit_are_no_other_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": [1, 2], "y": 3}\n{"x": [300, 2], "y": 9223372036854775809}\n{"x": [0.5, 1], "y": 3}\n')
    for args, row, words in (({}, 1, "9223372036854775809, and whole numbers become int64"),
                             ({"dtype": "uint8", "x": "x", "y": "x"}, 1, "x holds 300, which is no uint8"),
                             ({"dtype": "uint8"}, 2, "x holds 0.5, which is no uint8")):
        with pytest.raises(Unreadable, match=f"sample {row} .*{words}"):
            resolve("jsonl", {"files": str(path), **args}, "train").fetch(np.array([row]))
    with pytest.raises(UserError, match="data.args.mean is 0.5, and x is no picture"):
        resolve("jsonl", {"files": str(path), "mean": 0.5}, "train")


def test_a_column_of_whole_numbers_and_others_is_cast_by_y_dtype(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": [1, 2], "y": 3}\n{"x": [3, 4], "y": 0.5}\n')
    with pytest.raises(UserError, match="y is float32 .*in the first sample int64.*(?s:.)*data.args.y_dtype: float32"):
        everything(resolve("jsonl", {"files": str(path)}, "train"))
    y = everything(resolve("jsonl", {"files": str(path), "y_dtype": "float32"}, "train"))[1]
    assert y.dtype == np.float32 and y.tolist() == [3, 0.5]
    with pytest.raises(Unreadable, match="sample 1 .*y holds 0.5, which is no int8 of data.args.y_dtype"):
        everything(resolve("jsonl", {"files": str(path), "y_dtype": "int8"}, "train"))
    with pytest.raises(UserError, match="data.args.y_dtype is 'str'"):
        resolve("jsonl", {"files": str(path), "y_dtype": "str"}, "train")


@PARQUET
def test_unpacked_parquet_has_a_bound_and_a_damaged_file_is_unpacked_again(tmp_path):
    args = {"files": write_shards(tmp_path / "p", "parquet", X, Y, 2)}
    resolve("parquet", args, "train")
    first, second = sorted((tmp_path / "p").rglob("*.arrow"))
    whole, stat = first.read_bytes(), first.stat()
    first.write_bytes(whole[:700] + b"\xff" * 4 + whole[704:])
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    x = everything(resolve("parquet", args, "train"))[0]
    assert np.array_equal(x, X.reshape(N, -1)) and first.read_bytes() == whole
    first.unlink()
    bound = (second.stat().st_size + 100) / 2**30
    with pytest.raises(UserError, match="Arrow files in .* and data.args.cache_gib allows"):
        resolve("parquet", {**args, "cache_gib": bound}, "train")
    assert sorted((tmp_path / "p").rglob("*.arrow*")) == [second]
    resolve("parquet", {**args, "cache_gib": 2 * bound}, "train")


def test_a_stale_index_in_a_folder_that_is_not_writable_gives_way(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    pattern = write_shards(tmp_path / "d", "jsonl", X, Y, 1)
    resolve("jsonl", {"files": pattern}, "train")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    assert len(resolve("jsonl", {"files": pattern}, "train")) == N and not (tmp_path / "xdg").exists()
    write_shards(tmp_path / "d", "jsonl", X[:9], Y[:9], 1)
    assert len(resolve("jsonl", {"files": pattern}, "train")) == 9
    assert len(list((tmp_path / "xdg/hvdtrain/index").glob("*.index"))) == 1


@PARQUET
def test_tensors_of_fixed_shape_and_columns_of_one_name(tmp_path):
    import pyarrow
    import pyarrow.parquet

    kind = pyarrow.fixed_shape_tensor(pyarrow.int64(), (2, 3), permutation=[1, 0])
    rows = pyarrow.array([list(range(i, i + 6)) for i in range(4)], kind.storage_type)
    table = pyarrow.Table.from_arrays([pyarrow.ExtensionArray.from_storage(kind, rows), pyarrow.array(range(4))], "xy")
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    x, y = everything(resolve("parquet", {"files": str(tmp_path / "a.parquet")}, "train"))
    assert x.shape == (4, 3, 2) and x[1].tolist() == [[1, 4], [2, 5], [3, 6]] and y.tolist() == list(range(4))
    pyarrow.parquet.write_table(table.append_column("y", table["y"]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="b.parquet has several columns y"):
        resolve("parquet", {"files": str(tmp_path / "b.parquet")}, "train")


@PARQUET
def test_a_shortage_is_no_damage_that_an_index_keeps(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    pattern = write_shards(tmp_path / "p", "parquet", X, Y, 1)
    for error in (OSError(5, "Input/output error"), pyarrow.lib.ArrowMemoryError("malloc of size 64 failed")):
        with monkeypatch.context() as patch:
            def fails(*args, error=error, **more):
                raise error
            patch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", fails)
            with pytest.raises((UserError, MemoryError), match="Input/output error|memory"):
                resolve("parquet", {"files": pattern}, "train")
    assert np.array_equal(everything(resolve("parquet", {"files": pattern}, "train"))[1], Y)
    pyarrow.parquet.write_table(pyarrow.table({"x": np.arange(N) + 0.37, "y": Y}), tmp_path / "sums.parquet",
                                compression="none", use_dictionary=False, write_page_checksum=True)
    data = (tmp_path / "sums.parquet").read_bytes()
    at = data.index(np.float64(4.37).tobytes())
    (tmp_path / "sums.parquet").write_bytes(data[:at] + b"\0" + data[at + 1:])
    with pytest.raises(Unreadable, match="(?i)crc checksum"):
        resolve("parquet", {"files": str(tmp_path / "sums.parquet")}, "train")
