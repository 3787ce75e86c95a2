"""A snapshot comes back as it went in; what could not is refused with a message before anything is written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdtrain.checkpoint import CheckpointError, Snapshot, inspect, read_snapshot, write_snapshot
from hvdtrain.core.errors import UserError

pytestmark = pytest.mark.timeout(60)

DTYPES = "float64 float32 float16 int64 uint64 int32 uint32 int16 uint16 int8 uint8 bool".split()


def state(snapshot: Snapshot) -> dict:
    """Everything a snapshot holds, comparable with == down to the bits (NaN payloads, signs of zero)."""
    arrays = {
        group: {name: (array.dtype.name, array.shape, array.tobytes("C")) for name, array in named.items()}
        for group, named in snapshot.tensors.items()
    }
    return {"tensors": arrays, "meta": json.dumps(snapshot.meta)}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
any_text = st.text(max_size=12)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), shapes))
tensors = st.dictionaries(
    st.from_regex(r"[a-z0-9][a-z0-9_-]{0,12}", fullmatch=True),
    st.dictionaries(texts.filter(lambda name: name != "__metadata__"), arrays, max_size=5),
    max_size=4,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(tensors=tensors, meta=st.dictionaries(any_text, plain, max_size=4), step=st.integers(0, 2**63))
def test_round_trip(tensors, meta, step):
    given_snapshot = Snapshot(tensors, meta)
    with tempfile.TemporaryDirectory() as folder:
        path = write_snapshot(Path(folder) / "step-00000001", given_snapshot, step=step)
        assert state(read_snapshot(path)) == state(given_snapshot)
        assert inspect(path).step == step
        assert os.listdir(folder) == ["step-00000001"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_keeps_shape_and_extreme_bits(tmp_path, dtype):
    bits = np.frombuffer(bytes(range(256)) * 3, np.uint8)
    full = (bits % 2).view(bool) if dtype == "bool" else bits.view(dtype)
    named = {"full": full, "zero_d": full[5].reshape(()), "empty": full[:0].reshape(0, 3), "scalar": full[7]}
    found = read_snapshot(write_snapshot(tmp_path / "a", Snapshot({"model": named}))).tensors["model"]
    for name, array in named.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert found[name].flags.writeable


def test_views_of_any_layout_are_saved_by_value(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {
        "transposed": base.T,
        "strided": base[::2, ::-1],
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "big_endian": base.astype(">f4"),
        "fortran": np.asfortranarray(base),
    }
    found = read_snapshot(write_snapshot(tmp_path / "a", Snapshot({"model": views}))).tensors["model"]
    for name, view in views.items():
        np.testing.assert_array_equal(found[name], view, err_msg=name)
        assert found[name].dtype == np.float32


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    from safetensors.numpy import load, load_file, save

    named = {
        "w": np.arange(6.0).reshape(2, 3),
        "b": np.array([True, False]),
        "h": np.float16([1.5]),
        "é": np.array(7),
        "none": np.zeros((0, 2), np.uint16),
    }
    path = write_snapshot(tmp_path / "a", Snapshot({"model": named})) / "model.safetensors"
    for found in (load_file(path), load(path.read_bytes())):
        assert found.keys() == named.keys()
        for name, array in named.items():
            np.testing.assert_array_equal(found[name], array)
    assert load(save(load_file(path))).keys() == named.keys()


def test_meta_of_a_run_comes_back(tmp_path):
    meta = {
        "best": float("inf"),
        "worst": float("-inf"),
        "cursor": {"epoch": 3, "position": 2**70},
        "rng": [1, [2, 3], None],
        "lone surrogate \ud800": "\x00",
        "tuple": (1, 2),
        "order": {"b": 1, "a": 2},
    }
    found = read_snapshot(write_snapshot(tmp_path / "a", Snapshot({}, meta))).meta
    assert found == {**meta, "tuple": [1, 2]}
    assert list(found["order"]) == ["b", "a"]


def test_saving_takes_no_second_copy_of_the_state(tmp_path):
    array = np.ones(2**22, np.float32)  # 16 MiB
    tracemalloc.start()
    try:
        write_snapshot(tmp_path / "a", Snapshot({"model": {"w": array}}))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < array.nbytes / 4


@pytest.mark.parametrize("umask, file, folder", [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_files_follow_the_umask_and_parents_are_made(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        path = write_snapshot(tmp_path / "new" / "root" / "a", Snapshot({"model": {"w": np.ones(1)}}))
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in path.iterdir()} == {
        "manifest.json": file,
        "model.safetensors": file,
    }
    assert path.stat().st_mode & 0o777 == folder


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (Snapshot({"../evil": {}}), "group name '../evil'"),
        (Snapshot({"Model": {}}), "group name 'Model'"),
        (Snapshot({"": {}}), "group name ''"),
        (Snapshot({"a" * 65: {}}), "group name"),
        (Snapshot({"model\n": {}}), "group name"),
        (Snapshot({"model": {"__metadata__": np.ones(1)}}), "tensor name '__metadata__'"),
        (Snapshot({"model": {"\ud800": np.ones(1)}}), "UTF-8"),
        (Snapshot({"model": {3: np.ones(1)}}), "tensor name 3"),
        (Snapshot({"model": {"w": [1.0]}}), "is a list; expected a numpy array"),
        (Snapshot({"model": {"w": np.array([object()])}}), "dtype object"),
        (Snapshot({"model": {"w": np.ones(1, complex)}}), "dtype complex128"),
        (Snapshot({"model": {"w": np.array(["a"])}}), "dtype <U1"),
        (Snapshot({}, {"a": {1: 2}}), "meta.a has the key 1 of type int"),
        (Snapshot({}, {"a": [0, {"b": np.ones(1)}]}), "meta.a[1].b is a ndarray"),
        (Snapshot({}, {"a": b"bytes"}), "meta.a is a bytes"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, snapshot, said):
    with pytest.raises(CheckpointError) as caught:
        write_snapshot(tmp_path / "a", snapshot)
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(CheckpointError, match="expected a whole number of at least 0"):
        write_snapshot(tmp_path / "a", Snapshot({}), step=step)


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.checkpoint.manifest.MAX_MANIFEST_BYTES", 2000)
    with pytest.raises(CheckpointError, match="expected at most 2000 bytes"):
        write_snapshot(tmp_path / "a", Snapshot({}, {"long": "x" * 2000}))
    assert os.listdir(tmp_path) == []


def test_only_a_checkpoint_may_be_replaced(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").write_text("years")
    text = tmp_path / "text"
    text.write_text("notes")
    link = tmp_path / "link"
    link.symlink_to(work)
    for path in (work, text, link):
        with pytest.raises(CheckpointError, match="move it away|Move it away"):
            write_snapshot(path, Snapshot({}))
    assert (work / "thesis.tex").read_text() == "years" and text.read_text() == "notes" and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "text", "work"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([real.f_bsize, 1024, 9999, 900, 700, *tuple(real)[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    write_snapshot(tmp_path / "fits", Snapshot({"model": {"w": np.ones(2**12)}}))
    with pytest.raises(OSError, match=r"not enough space .* 700 KiB free; .* at least 1\.01 MiB") as caught:
        write_snapshot(tmp_path / "large", Snapshot({"model": {"w": np.ones(2**17)}}))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["fits"]


def test_a_checkpoint_error_is_the_users_and_travels_between_processes():
    import pickle

    error = CheckpointError(got="a", expected="b", do="c")
    assert isinstance(error, UserError)
    assert str(pickle.loads(pickle.dumps(error))) == "a; expected b. C."


def test_importing_the_room_brings_no_third_party_package_but_numpy():
    code = (
        "import sys, numpy; before = set(sys.modules); import hvdtrain.checkpoint;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'hvdtrain', 'numpy'}))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=30)
    assert printed.strip() == "[]"
