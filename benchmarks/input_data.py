"""Data of ``benchmarks input``: the same pictures as a folder, tars, TFRecord and Parquet, and sequences of tokens.

Owns the files; who reads them is in `benchmarks.input_rank`.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hvdtrain.data.sets.tfrecord import masked

CLASSES = 10
CONTEXT = 512  # tokens of a sequence
SHARD = 500  # samples of a file

FORMATS = {"folder": ("hvdtrain", "dataloader", "tfdata"), "tar": ("hvdtrain", "dataloader", "webdataset"),
           "tfrecord": ("hvdtrain", "tfdata"), "parquet": ("hvdtrain", "datasets"),
           "tokens": ("hvdtrain", "dataloader"), "stream": ("hvdtrain", "dataloader")}
"""Format -> who reads it. ``stream``: the folder, as a torch IterableDataset that decodes."""


def made(kind: str, root: Path, samples: int, size: int) -> str:
    """Write ``samples`` as ``kind``, one of `FORMATS`, to ``root``; return it."""
    root.mkdir(parents=True)
    if kind == "tokens":
        tokens_nt = np.random.default_rng(0).integers(0, 50_000, (samples, CONTEXT + 1))
        np.save(root / "x_train.npy", np.ascontiguousarray(tokens_nt[:, :-1]))
        np.save(root / "y_train.npy", np.ascontiguousarray(tokens_nt[:, 1:]))
        return str(root)
    for number, (png, label) in enumerate(_pictures(samples, size)):
        if kind in ("folder", "stream"):
            folder = root / "train" / f"class_{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:07d}.png").write_bytes(png)
    shards = range(-(-samples // SHARD))
    if kind in ("tar", "tfrecord", "parquet"):
        rows = _pictures(samples, size)
        for shard in shards:
            part = [row for _, row in zip(range(SHARD), rows)]
            {"tar": _tar, "tfrecord": _tfrecord, "parquet": _parquet}[kind](root / f"{shard:05d}.{kind}", part)
    return str(root)


def _pictures(samples: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield (PNG, class) of pictures that are smooth with some noise, as photographs are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(samples):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((size, size))
        noise = rng.integers(0, 16, (size, size, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(np.asarray(coarse) // 2 + noise).save(out, "png")
        yield out.getvalue(), number % CLASSES


def _tar(path: Path, rows: list[tuple[bytes, int]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, (png, label) in enumerate(rows):
            for ending, data in (("png", png), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:07d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _tfrecord(path: Path, rows: list[tuple[bytes, int]]) -> None:
    with open(path, "wb") as file:
        for png, label in rows:
            features = _entry("image", _field(1, _field(1, png))) + _entry("label", _field(3, _field(
                1, _varint(label))))
            data = _field(1, features)
            length = struct.pack("<Q", len(data))
            file.write(length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data)))


def _entry(name: str, feature: bytes) -> bytes:
    """Return an entry of the map of tf.train.Features."""
    return _field(1, _field(1, name.encode()) + _field(2, feature))


def _field(number: int, data: bytes) -> bytes:
    """Return a field of protobuf that holds bytes, or another message."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _parquet(path: Path, rows: list[tuple[bytes, int]]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"image": [png for png, _ in rows], "label": [label for _, label in rows]}
    parquet.write_table(pyarrow.table(columns), path)
