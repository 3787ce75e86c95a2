"""No changed, missing, added or swapped byte of a checkpoint passes unseen; refusals say what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.checkpoint import CheckpointError, Snapshot, inspect, read_snapshot, write_snapshot
from hvdtrain.checkpoint.manifest import FileEntry, Manifest, decode, encode

pytestmark = pytest.mark.timeout(60)

NAMES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rank-0000.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Write one good checkpoint, which no test changes."""
    tensors = {
        "model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(4, np.float16)},
        "optimizer": {"w.momentum": np.ones((3, 4), np.float32), "b.momentum": np.zeros(4, np.float16)},
        "rank-0000": {"rng": np.arange(32, dtype=np.uint8)},
    }
    meta = {"loss": 0.125, "step": 120, "name": "digits", "done": False}
    path = tmp_path_factory.mktemp("damage") / "step-00000120"
    return write_snapshot(path, Snapshot(tensors, meta), step=120)


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """Return a copy that a test may ruin."""
    return Path(shutil.copytree(whole, tmp_path / "step-00000120"))


@contextmanager
def holding(path: Path, data: bytes):
    """Let a file hold other bytes for a while."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def refusal(directory: Path) -> str:
    """Return what reading says; fails where it says nothing."""
    with pytest.raises(CheckpointError) as caught:
        read_snapshot(directory)
    error = caught.value
    assert error.got and error.expected and error.do
    assert len(str(error)) < 1000
    return str(error)


def seal(document: dict) -> bytes:
    """Return a manifest with a good self-hash over whatever it says, as a hostile or newer writer could make it."""
    document.pop("manifest_sha256", None)
    text = (json.dumps(document, indent=1) + "\n").encode()
    document["manifest_sha256"] = hashlib.sha256(text).hexdigest()
    return (json.dumps(document, indent=1) + "\n").encode()


def test_the_untouched_one_is_read(whole):
    assert read_snapshot(whole).meta["step"] == 120


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(whole, data):
    path = whole / data.draw(st.sampled_from(NAMES))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with holding(path, bytes(content)):
        refusal(whole)


@settings(max_examples=100, deadline=None)
@given(meta=st.dictionaries(st.text(max_size=3), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=3), max_leaves=10)))
def test_a_manifest_is_spelled_as_json_does(meta):
    data = encode(Manifest(7, {"model.safetensors": FileEntry(5, "0" * 64)}, meta))
    assert data == json.dumps(json.loads(data), indent=1).encode() + b"\n"
    assert repr(decode(data, "manifest.json").meta) == repr(meta)


def test_meta_is_nested_as_deeply_as_json_can_write_it():
    meta = {}
    for _ in range(600):
        meta = {"a": meta}
    assert decode(encode(Manifest(7, {}, meta)), "manifest.json").meta == meta


def test_every_flipped_bit_of_the_manifest_is_found(whole):
    content = (whole / "manifest.json").read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            decode(bytes(flipped), "manifest.json")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_truncation_is_found(whole, data):
    path = whole / data.draw(st.sampled_from(NAMES))
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    with holding(path, content[:length]):
        said = refusal(whole)
    assert "truncated" in said or "manifest.json is empty" in said or "was reformatted" in said


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_insertion_overwriting_or_zeroed_stretch_is_found(whole, data):
    path = whole / data.draw(st.sampled_from(NAMES))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    new = data.draw(st.binary(max_size=40) | st.just(bytes(stop - start)))
    changed = content[:start] + new + content[stop:]
    if changed == content:
        assert read_snapshot(whole).meta["step"] == 120
        return
    with holding(path, changed):
        refusal(whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_deleted_file_is_found(copy, name):
    (copy / name).unlink()
    said = refusal(copy)
    assert ("holds no manifest.json" if name == "manifest.json" else f"lacks {name}") in said


@pytest.mark.parametrize("name", ["extra.safetensors", "notes.txt", ".hidden", "rank-0001.safetensors"])
def test_an_added_file_is_found(copy, name):
    (copy / name).write_bytes(b"")
    assert f"also holds {name!r}" in refusal(copy)


def test_an_added_directory_is_found(copy):
    (copy / "deeper").mkdir()
    assert "also holds 'deeper'" in refusal(copy)


def test_two_swapped_files_of_one_size_are_found(tmp_path):
    same_size = {"rank-0000": {"rng": np.zeros(8, np.uint8)}, "rank-0001": {"rng": np.ones(8, np.uint8)}}
    path = write_snapshot(tmp_path / "a", Snapshot(same_size))
    (path / "rank-0000.safetensors").rename(path / "swap")
    (path / "rank-0001.safetensors").rename(path / "rank-0000.safetensors")
    (path / "swap").rename(path / "rank-0001.safetensors")
    assert "rank-0000.safetensors was changed: it hashes to" in refusal(path)


def test_a_manifest_of_another_checkpoint_is_found(copy, tmp_path):
    other = write_snapshot(tmp_path / "other", Snapshot({"model": {"w": np.ones(3)}}))
    shutil.copy(other / "manifest.json", copy / "manifest.json")
    assert "also holds 'optimizer.safetensors'" in refusal(copy)


@pytest.mark.parametrize("name", NAMES)
def test_a_symbolic_link_is_refused_even_to_the_right_bytes(copy, tmp_path, name):
    shutil.move(copy / name, tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name} is a symbolic link" in refusal(copy)


def test_a_link_to_a_checkpoint_is_refused(whole, tmp_path):
    (tmp_path / "latest").symlink_to(whole)
    assert "latest is a symbolic link; expected the checkpoint" in refusal(tmp_path / "latest")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_pipe_is_refused_and_not_waited_on(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert "not a regular file" in refusal(copy)


def test_a_missing_path_a_text_file_and_an_empty_or_foreign_directory_are_named(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "missing does not exist" in refusal(tmp_path / "missing")
    assert "does not exist" in refusal(tmp_path / "text" / "inside")
    assert "text is a file; expected a checkpoint directory" in refusal(tmp_path / "text")
    assert "empty is empty" in refusal(tmp_path / "empty")
    assert "foreign holds no manifest.json" in refusal(tmp_path / "foreign")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "manifest.json is empty"),
        (bytes(900), "blank or filled with zeros"),
        (b"hello", "truncated or not JSON"),
        (b"\xff\xfe", "truncated or not JSON"),
        (b"[" * 200_000, "truncated or not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"{}", "has format None; expected format 'hvdtrain-checkpoint'"),
        (b'{"format": "pt"}', "has format 'pt'"),
        (b'{"format": "hvdtrain-checkpoint", "version": 3}', "has format version 3; expected version 1 or 2"),
        (b'{"format": "hvdtrain-checkpoint", "version": 1}', "has the keys ['format', 'version']"),
    ],
)
def test_a_manifest_that_is_none_is_named(copy, content, said):
    (copy / "manifest.json").write_bytes(content)
    assert said in refusal(copy)


def test_a_future_version_names_what_to_do(copy):
    document = json.loads((copy / "manifest.json").read_text())
    document["version"] = 7
    document["shards"] = []
    (copy / "manifest.json").write_bytes(seal(document))
    assert "format version 7" in refusal(copy)
    assert "Load it with the hvdtrain release that wrote it" in refusal(copy)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "..", ""])
def test_names_that_leave_the_directory_are_refused_though_well_hashed(copy, name):
    document = json.loads((copy / "manifest.json").read_text())
    document["files"] = {name: entry for entry in document["files"].values()}
    (copy / "manifest.json").write_bytes(seal(document))
    assert "plain names of group files" in refusal(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", "120"),
        ("step", True),
        ("meta", []),
        ("files", []),
        ("files", {"model.safetensors": 3}),
        ("files", {"model.safetensors": {"bytes": -1, "sha256": "0" * 64}}),
        ("files", {"model.safetensors": {"bytes": 1, "sha256": "xyz"}}),
        ("files", {"model.safetensors": {"bytes": 1, "sha256": None}}),
        ("dtypes", {"model": {"w": "bfloat16"}}),
        ("dtypes", []),
    ],
)
def test_wrong_values_are_refused_though_well_hashed(copy, key, value):
    document = json.loads((copy / "manifest.json").read_text())
    document[key] = value
    (copy / "manifest.json").write_bytes(seal(document))
    refusal(copy)


def test_a_file_that_is_not_safetensors_is_refused_though_well_hashed(copy):
    import pickle

    content = pickle.dumps({"w": [1.0]})
    (copy / "model.safetensors").write_bytes(content)
    document = json.loads((copy / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    document["files"]["model.safetensors"] = {"bytes": len(content), "sha256": digest}
    (copy / "manifest.json").write_bytes(seal(document))
    assert "not a safetensors file" in refusal(copy)


def test_a_huge_manifest_is_refused_without_being_read_whole(copy):
    os.truncate(copy / "manifest.json", 2**40)  # sparse: takes no space
    assert "larger than 67108864 bytes" in refusal(copy)


def test_a_file_that_cannot_be_read_is_refused_in_words(copy, monkeypatch):
    real = os.read

    def failing(descriptor: int, size: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("optimizer.safetensors"):
            raise OSError(5, "Input/output error")
        return real(descriptor, size)

    monkeypatch.setattr(os, "read", failing)
    assert "optimizer.safetensors cannot be read ([Errno 5] Input/output error)" in refusal(copy)


def test_inspect_reads_the_manifest_only(copy):
    (copy / "model.safetensors").write_bytes(b"ruined")
    manifest = inspect(copy)
    assert (manifest.step, manifest.meta["name"]) == (120, "digits")
    assert sorted(manifest.files) == NAMES[1:]
