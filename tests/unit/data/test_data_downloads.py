"""Shards under URLs: copied once per host, checked, and within a bound."""

from types import SimpleNamespace

import numpy as np
import pytest
from shards import write_shards

from hvdtrain.core.errors import UserError
from hvdtrain.core.object_store import ObjectStore
from hvdtrain.data.sources import resolve

N = 23
X = np.random.default_rng(0).standard_normal((N, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(-5, 300, N)


def everything(source):
    return source.fetch(np.arange(len(source)))


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Return a function that writes shards to a folder that stands for a storage, and returns their URL."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def write(name, n=N):
        return "local://" + write_shards(tmp_path / name, "jsonl", X[:n], Y[:n])
    return write


def test_urls_are_copied_once_checked_and_within_a_bound(stored, tmp_path, monkeypatch):
    from hvdtrain.data import downloads

    url, copies = stored("one"), tmp_path / "xdg/hvdtrain/shards"
    fetched = []
    real = downloads.ObjectStore.get
    monkeypatch.setattr(downloads.ObjectStore, "get",
                        lambda self, name, path: (fetched.append(name), real(self, name, path))[1])
    assert np.array_equal(everything(resolve("jsonl", {"files": url}, "train"))[0], X)
    assert sorted(fetched) == [f"part-0{i}.jsonl" for i in range(3)]
    (folder,) = copies.iterdir()
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl")) / 2**30
    (folder / "part-01.jsonl").touch()
    resolve("jsonl", {"files": url}, "train")
    assert len(fetched) == 3, "another time, the same checksum"
    text = (folder / "part-01.jsonl").read_bytes()
    (folder / "part-01.jsonl").write_bytes(text.replace(b"1", b"7"))
    assert np.array_equal(everything(resolve("jsonl", {"files": url}, "train"))[1], Y) and len(fetched) == 4
    assert resolve("jsonl", {"files": stored("one", 9)}, "train").fetch(np.arange(9))[1].tolist() == Y[:9].tolist()
    with pytest.raises(UserError, match="the shards take .* and data.args.cache_gib allows"):
        resolve("jsonl", {"files": stored("two"), "cache_gib": size / 10}, "train")
    resolve("jsonl", {"files": stored("two"), "cache_gib": size * 1.1}, "train")
    assert len(list(copies.iterdir())) == 2, "this process uses the first one"
    while downloads._users:
        downloads.os.close(downloads._users.pop())
    resolve("jsonl", {"files": stored("three"), "cache_gib": size * 2.2}, "train")
    assert folder not in copies.iterdir() and len(list(copies.iterdir())) < 3, "the one used longest ago is gone"
    with pytest.raises(UserError, match="no file is local://.*data.args.files"):
        resolve("jsonl", {"files": f"local://{tmp_path}/one/*.none"}, "train")


def test_a_pattern_means_the_same_files_as_of_a_path(stored, tmp_path):
    write_shards(tmp_path / "one/old", "jsonl", X, Y)
    url = stored("one")
    for pattern in ("*.jsonl", "**/*.jsonl", "*/part-0[12].jsonl", "part-??.jsonl"):
        path = f"{tmp_path}/one/{pattern}"
        assert len(resolve("jsonl", {"files": f"local://{path}"}, "train")) == len(
            resolve("jsonl", {"files": path}, "train")), pattern
    assert len(resolve("jsonl", {"files": url}, "train")) == N


def test_a_version_is_the_same_in_a_listing_and_in_a_request_for_one_file():
    listing = {"size": 3, "ETag": '"ab"', "StorageClass": "STANDARD", "Key": "x"}
    request = {"size": 3, "ETag": '"ab"', "ContentType": "text", "mtime": None}
    versions = [ObjectStore("s3://b", SimpleNamespace(info=lambda path, info=info: info), "b").version("x")
                for info in (listing, request, {**request, "ETag": '"cd"'}, {"size": 3}, {"size": 4, "mtime": 7.5})]
    assert versions[0] == versions[1] and len(set(versions)) == 4


@pytest.mark.parametrize("entry", ["Last-Modified", "blob_id", "sha", "modificationTime"])
def test_a_file_of_the_same_size_has_another_version_over_http_and_on_hubs(entry):
    first, second = (ObjectStore("http://b", SimpleNamespace(info=lambda path, value=value: {"size": 3, entry: value}),
                                 "b").version("x") for value in "ab")
    assert first != second


def test_a_copy_that_is_cut_off_is_none(stored, monkeypatch):
    from hvdtrain.data import downloads

    real, url = downloads.ObjectStore.get, stored("one")
    with monkeypatch.context() as patch:
        patch.setattr(downloads.ObjectStore, "get",
                      lambda self, name, path: (real(self, name, path), path.write_bytes(path.read_bytes()[:100])))
        with pytest.raises(UserError, match="100 bytes of .*part-0[0-2].jsonl arrived, of [0-9]+"):
            resolve("jsonl", {"files": url}, "train")
    assert np.array_equal(everything(resolve("jsonl", {"files": url}, "train"))[0], X)
