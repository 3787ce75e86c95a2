"""The set ``cifar100``: both published formats give the same pictures, nothing is unpickled, what is wrong is named."""

import io
import pickle
import tarfile

import numpy as np
import pytest
from cifar_archive import pickled, pictures, write_binary, write_python

from hvdtrain.core.errors import UserError
from hvdtrain.data.sets import cifar100
from hvdtrain.data.sources import Source, resolve, resolve_splits


def everything(source):
    return source.fetch(np.arange(len(source), dtype=np.int64))


@pytest.mark.parametrize("write, name", [(write_binary, "cifar-100-binary"), (write_python, "cifar-100-python")])
def test_the_archive_the_archive_itself_and_an_unpacked_one_give_the_pictures(tmp_path, write, name):
    md5 = write(tmp_path / f"{name}.tar.gz", train=120, test=30)
    args = {"root": str(tmp_path), "md5": md5, "normalise": False}
    train, test = resolve_splits("cifar100", args)
    assert isinstance(train, Source) and [len(part) for part in (train, test)] == [120, 30]
    assert train.classes == tuple(f"fine_{i}" for i in range(100))
    pixels, coarse, fine = pictures(120, 0, 100)
    x, y = everything(train)
    assert x.dtype == np.float32 and x.shape == (120, 32, 32, 3) and y.dtype == np.int64
    assert np.array_equal(x, pixels.reshape(120, 3, 32, 32).transpose(0, 2, 3, 1) / np.float32(255))
    assert np.array_equal(y, fine)
    coarse_set = resolve("cifar100", {**args, "labels": "coarse"}, "train")
    assert np.array_equal(everything(coarse_set)[1], coarse) and len(coarse_set.classes) == 20
    first = resolve("cifar100", {**args, "layout": "channels_first"}, "train").fetch(np.array([7]))[0]
    assert np.array_equal(first[0], x[7].transpose(2, 0, 1))
    scaled = resolve("cifar100", {"root": str(tmp_path / f"{name}.tar.gz"), "md5": md5}, "train")
    assert np.allclose(everything(scaled)[0], (x - cifar100.MEAN) / cifar100.STD, atol=1e-5)
    again = pickle.loads(pickle.dumps(scaled))
    assert np.array_equal(again.fetch(np.array([5, 3]))[0], scaled.fetch(np.array([5, 3]))[0])
    with tarfile.open(tmp_path / f"{name}.tar.gz") as tar:
        tar.extractall(tmp_path / "open", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    for root in (tmp_path / "open", tmp_path / "open" / name):
        found = resolve("cifar100", {"root": str(root), "normalise": False}, "test")
        assert np.array_equal(everything(found)[0], everything(test)[0])
    with pytest.raises(UserError, match="md5 is given for .*unpacked"):
        resolve("cifar100", {"root": str(tmp_path / "open"), "md5": md5}, "train")


def test_our_archive_is_what_unpickling_it_would_give():
    """The format is that of Python's own pickles: the library reads the same from what these tests write."""
    value = {b"labels": [0, 255, 256, 65535, 70000], b"text": b"a" * 300, b"data": np.arange(6, dtype=np.uint8).reshape(
        2, 3), b"names": [b"n%d" % i for i in range(300)]}
    value[b"columns"] = np.asfortranarray(value[b"data"])
    written = pickled(value)
    mine, theirs = cifar100.read_pickle(io.BytesIO(written)), pickle.loads(written, encoding="bytes")
    for found in (mine, theirs):
        assert list(found) == list(value)
        assert all(np.array_equal(found.pop(name), value[b"data"]) for name in (b"data", b"columns"))
        assert all(found[key] == value[key] for key in found)
    huge_memo_number = b"Nr\xff\xff\xff\xff."  # for which pickle.Unpickler in C would allocate 64 GiB
    assert cifar100.read_pickle(io.BytesIO(huge_memo_number)) is None
    array = b"cnumpy.core.multiarray\n_reconstruct\n)R"
    state = b"(K\x01(K\x02K\x03tcnumpy\ndtype\nU\x02u1\x85R\x88U\x06abcdefq\x01tq\x02b"
    twice = cifar100.read_pickle(io.BytesIO(b"}(U\x01a" + array + state + b"U\x01b" + array + b"h\x02bu."))
    assert np.shares_memory(twice[b"a"], twice[b"b"])  # else a small file could make any number of copies


class Opens:
    """An object of a hostile pickle."""

    def __reduce__(self):
        return open, ("/nowhere/touched", "w")


@pytest.mark.parametrize("data, words", [
    (pickle.dumps({"a": Opens()}, 2), "not plain"), (pickle.dumps(Opens(), 4), "not plain"),
    (b"\x80\x02cos\nsystem\n(U\x04truetR.", "names os.system"), (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "eval"),
    (b"cnumpy\nndarray\n)R.", "not plain"), (b"cnumpy\ndtype\nU\x02O8\x85R.", "something other"),
    (b"\x80\x02}q\x01U\x01aK\x01s", "EOFError"), (b"]K\x01u.", "not plain"), (b".", "not plain"),
    (b"K\x01K\x02a.", "not plain"), (b"}]K\x01s.", "not a string"), (b"}(]K\x01u.", "not a string"),
    (b"T\xff\xff\xff\x7fab", "not plain"), (b"]}U\x01aK\x01sb.", "not plain"), (b"garbage", "KeyError"),
    (b"", "EOFError"), (b"cnumpy\ndtype\n}U\x01aK\x01sb.", "not plain"),
    (b"(" * 40 + b"t" * 41 + b".", "not plain"),
    (b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x02\x85]I00\nU\x02abtb.", "KeyError"),
    (b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x02\x85]\x89U\x02abtb.", "not of uint8"),
    (b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\nU\x02u1\x85R\x89U\x02abtb.",
     "reshape"),
    (b"]" * 101, "more than 100"),
])
def test_a_pickle_of_anything_else_is_refused_and_never_run(monkeypatch, data, words):
    monkeypatch.setattr(cifar100, "MOST_READS", 100)
    with pytest.raises(ValueError, match=words):
        cifar100.read_pickle(io.BytesIO(data))


def test_another_checksum_than_the_published_one_is_told(tmp_path):
    md5 = write_binary(tmp_path / "cifar-100-binary.tar.gz", train=5, test=5)
    with pytest.raises(UserError, match=f"MD5 {md5}; expected {cifar100.PUBLISHED['cifar-100-binary']} .the published"):
        resolve("cifar100", {"root": str(tmp_path)}, "train")
    with pytest.raises(UserError, match=f"MD5 {md5}; expected {'0' * 32}[.]"):
        resolve("cifar100", {"root": str(tmp_path), "md5": "0" * 32}, "train")
    assert len(resolve("cifar100", {"root": str(tmp_path), "md5": md5.upper()}, "train")) == 5


@pytest.mark.parametrize("args, words", [
    ({}, "needs the argument 'root'"), ({"root": ""}, "root is ''"),
    ({"root": "nowhere"}, "nowhere, which does not exist.*ownload one from https://www.cs.toronto.edu"),
    ({"root": "."}, "no CIFAR-100 archive in"), ({"root": ".", "labels": "all"}, "fine .100 classes. or coarse"),
    ({"root": ".", "normalise": 3}, "normalise"), ({"root": "set.tar.gz"}, "the format of"),
    ({"root": "set.tar.gz", "md5": "12"}, "32 hexadecimal"), ({"root": ".", "normalize": False}, "did you mean 'norm"),
])
def test_wrong_arguments_are_named(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.tar.gz").write_text("")
    with pytest.raises(UserError, match=words):
        resolve("cifar100", args, "train")


def archive(path, files):
    """Return a .tar.gz of ``files`` (bytes, or a TarInfo that says what else it is); its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            else:
                member.type, member.linkname = data
                tar.addfile(member)
    with open(path, "rb") as file:
        return cifar100._md5(file)


RECORD = bytes(cifar100._RECORD)


@pytest.mark.parametrize("kind, files, words", [
    ("binary", {"train.bin": RECORD}, "lacks cifar-100-binary/test.bin"),
    ("binary", {"train.bin": RECORD[:-1], "test.bin": RECORD}, "3073 bytes, no multiple of 3074"),
    ("binary", {"train.bin": b"", "test.bin": RECORD}, "0 bytes"),
    ("binary", {"train.bin": b"\x00\x64" + RECORD[2:], "test.bin": RECORD}, "fine label of 100, above 99"),
    ("binary", {"train.bin": b"\x14" + RECORD[1:], "test.bin": RECORD}, "coarse label of 20"),
    ("binary", {"train.bin": (tarfile.SYMTYPE, "/etc/passwd"), "test.bin": RECORD}, "lacks cifar-100-binary/train.bin"),
    ("python", {"train": pickle.dumps({"data": Opens()}, 2), "test": pickled({})}, "not plain"),
    ("python", {"train": pickled({}), "test": pickled({})}, "without images"),
    ("python", {"train": pickled({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1], b"coarse_labels": [1]}),
                "test": pickled({})}, "one small number for each"),
])
def test_an_archive_with_something_else_in_it_is_refused(tmp_path, kind, files, words):
    path = tmp_path / f"cifar-100-{kind}.tar.gz"
    md5 = archive(path, {f"cifar-100-{kind}/{name}": data for name, data in files.items()})
    with pytest.raises(UserError, match=f"cannot be read: .*{words}"):
        resolve("cifar100", {"root": str(tmp_path), "md5": md5}, "train")


def test_damaged_archives_are_named_whatever_their_checksum(tmp_path, monkeypatch):
    path = tmp_path / "cifar-100-binary.tar.gz"
    write_binary(path, train=40, test=5)
    whole = path.read_bytes()
    for data in (b"", b"no archive", whole[:3], whole[:len(whole) // 2], whole[:200] + b"\xff" * 50 + whole[250:]):
        path.write_bytes(data)
        with open(path, "rb") as file:
            md5 = cifar100._md5(file)
        with pytest.raises(UserError, match="binary.tar.gz cannot be read: "):
            resolve("cifar100", {"root": str(tmp_path), "md5": md5}, "train")
    monkeypatch.setattr(cifar100, "_MOST_BYTES", 1000)
    path.write_bytes(whole)
    with open(path, "rb") as file:
        md5 = cifar100._md5(file)
    with pytest.raises(UserError, match="train.bin in it has 122960 bytes"):
        resolve("cifar100", {"root": str(tmp_path), "md5": md5}, "train")
