"""The set ``npy``: files that are mapped, read by row, and found out when they change."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import Source, resolve, resolve_splits


def everything(source):
    return source.fetch(np.arange(len(source), dtype=np.int64))


@pytest.fixture
def files(tmp_path):
    """x.npy and y.npy of ten samples in a folder of their own."""
    (tmp_path / "whole").mkdir()
    np.save(tmp_path / "whole/x.npy", np.arange(20.0).reshape(10, 2))
    np.save(tmp_path / "whole/y.npy", np.arange(10))
    return tmp_path


def test_named_halves_and_a_held_out_fraction(files):
    x, y = np.load(files / "whole/x.npy"), np.load(files / "whole/y.npy")
    for name, args in (("npy", {"root": str(files / "whole")}), (str(files / "whole/x.npy"), {})):
        train, test = resolve_splits(name, args)
        assert isinstance(train, Source) and (len(train), len(test)) == (8, 2)
        assert sorted([*everything(train)[1], *everything(test)[1]]) == list(range(10))
        assert np.array_equal(everything(train)[0], x[everything(train)[1]])
    assert len(resolve("npy", {"root": str(files / "whole"), "test_fraction": 0.5}, "test")) == 5
    for name, array in (("x_train", x), ("y_train", y.astype(">i4")), ("x_test", x[:3]), ("y_test", y[:3])):
        np.save(files / f"{name}.npy", array)
    train, test = resolve_splits(str(files / "x_train.npy"), {})
    assert (len(train), len(test)) == (10, 3) and np.array_equal(everything(train)[0], x)
    assert everything(train)[1].dtype == np.int32 and everything(train)[1].dtype.isnative
    for half in files.glob("*_test.npy"):
        half.unlink()
    assert resolve_splits("npy", {"root": str(files)})[1] is None


def test_a_fetch_reads_its_own_rows_and_pickles_are_paths(files):
    big = np.lib.format.open_memmap(files / "whole/x.npy", "w+", np.float32, (10, 2**24))  # 640 MiB of holes
    big[3, 5], big[9, -1] = 7, 8
    del big
    source = resolve("npy", {"root": str(files / "whole"), "test_fraction": 0.1}, "train")
    assert Path(files / "whole/x.npy").stat().st_blocks * 512 < 2**24, "holes are still holes"
    at = int(np.flatnonzero(everything_y(source) == 3)[0])
    x, y = source.fetch(np.array([at]))
    assert y == [3] and x[0, 5] == 7 and x.sum() == 7 and type(x) is np.ndarray
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert len(again) == len(source) and np.array_equal(everything_y(again), everything_y(source))


def everything_y(source):
    """y alone, past the large x."""
    return source._arrays[1][source._chosen]


def test_a_file_that_changes_or_goes_is_named(files):
    source = resolve("npy", {"root": str(files / "whole")}, "train")
    sent = pickle.dumps(source)
    data = (files / "whole/x.npy").read_bytes()
    (files / "whole/x.npy").write_bytes(data[:-8])
    for use in (lambda: source.fetch(np.array([0])), lambda: pickle.loads(sent)):
        with pytest.raises(UserError, match="whole/x.npy changed while it was in use"):
            use()
    with pytest.raises(UserError, match="whole/x.npy cannot be read: it is truncated"):
        resolve("npy", {"root": str(files / "whole")}, "train")
    (files / "whole/x.npy").unlink()
    with pytest.raises(UserError, match="whole/x.npy cannot be read: No such file"):
        source.fetch(np.array([0]))


class Touch:
    """An object of a hostile array."""

    def __reduce__(self):
        return open, ("/nowhere/touched", "w")


@pytest.mark.parametrize("array, words", [
    (np.array([Touch(), 1, 2], object), "it holds Python objects"), (b"hello", "not a .npy file"),
    (b"", "not a .npy file"), (b"\x93NUMPY\x01\x00\x10\x00garbage", "cannot be read"), (np.float64(3), "shape "),
    (np.array(["a", "b"]), "dtype <U1"), (np.asfortranarray(np.ones((3, 4))), "column by column"),
    (np.zeros(3), "differ in length: x.npy .3., y.npy .10."), (np.zeros((1, 2)), "differ in length"),
])
def test_a_file_of_something_else_is_refused(files, array, words):
    if isinstance(array, bytes):
        (files / "whole/x.npy").write_bytes(array)
    else:
        np.save(files / "whole/x.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=words):
        resolve("npy", {"root": str(files / "whole")}, "train")


@pytest.mark.parametrize("name, args, words", [
    ("npy", {}, "root is ''"), ("npy", {"root": "nowhere"}, "nowhere, which does not exist"),
    ("npy", {"root": "."}, "no x_train.npy and no x.npy in"), ("npy", {"root": 3}, "root is 3"),
    ("whole/z.npy", {}, "a file x.npy or x_train.npy"), ("gone/x.npy", {}, "there is no .*gone/x.npy"),
    ("whole/x.npy", {"path": "a"}, "holds 'path'"), ("whole/x.npy", {"root": "whole"}, "root is 'whole'"),
    ("both", {}, "unknown"), ("npy", {"root": "both"}, "both x.npy and x_train.npy"),
    ("npy", {"root": "lone"}, "at least 2"), ("npy", {"root": "unlike"}, "the same of y"),
    ("npy", {"root": "whole", "test_fraction": 2}, "test_fraction"),
])
def test_wrong_arguments_and_files_are_named(files, monkeypatch, name, args, words):
    monkeypatch.chdir(files)
    for folder, arrays in (("both", ("x", "x_train")), ("lone", ("x",)), ("unlike", ("x_train", "y_train", "x_test"))):
        (files / folder).mkdir()
        for array in arrays:
            np.save(files / folder / f"{array}.npy", np.zeros(1))
    with pytest.raises(UserError, match=words):
        resolve(name, args, "train")
