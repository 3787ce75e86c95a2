"""Keep an index of each shard: where its samples are, so that any process can read any of them.

Owns the index files (checksum, staleness). The formats in `hvdtrain.data.sets` scan shards; `hvdtrain.data.kept` has
the lock and the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.data.kept import folder_of, make_all

FOLDER = ".hvdtrain-index"
_VERSION = 2  # of how indexes are made and kept


@dataclass(frozen=True)
class Stamp:
    """Size and time of change of a file, which tell whether it is the one that was read before."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """Return the stamp of ``path``; `UserError` for a missing file."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", "the file as it was at the start of the run",
                            "put it back, or correct data.args.files") from None
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Index:
    """Samples of one shard: ``places_nk``, int64 (n, k), is for its format; ``damaged``: row -> reason."""

    places_nk: np.ndarray
    damaged: dict[int, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """What else the format keeps, as JSON."""


def indexes(paths: Sequence[str], stamps: Sequence[Stamp], kind: str, cache: str,
            scan: Callable[[str, Path], Index], fits: Callable[[Index, Path], bool] = lambda index, target: True,
            ) -> tuple[list[Index], list[Path]]:
    """Return the index of each shard and the file that keeps it, made by ``scan(path, file)`` where there is none.

    ``kind``: format and settings on which an index depends. ``fits``: whether what the format keeps beside an index is
    there. Errors: `UserError` where no folder is writable, and for a shard that changes while it is scanned.
    """
    heads = [{"version": _VERSION, "kind": kind, "size": stamp.size, "mtime_ns": stamp.mtime_ns} for stamp in stamps]
    targets = [_target(path, kind, cache, head) for path, head in zip(paths, heads)]
    found: dict[int, Index] = {}

    def good(i: int) -> bool:
        if i not in found and (index := _read(targets[i], heads[i])) is not None and fits(index, targets[i]):
            found[i] = index
        return i in found

    def make(i: int) -> None:
        index = scan(paths[i], targets[i])
        if Stamp.of(paths[i]) != stamps[i]:
            raise changed(paths[i])
        _write(targets[i], heads[i], index)

    try:
        make_all(targets, good, make, "indexing a shard")
    except OSError as error:
        raise UserError(f"an index cannot be kept in {targets[0].parent}: {error.strerror or error}",
                        "a writable folder with free space", "set data.args.cache to one") from None
    return [found[i] for i in range(len(paths))], targets


def changed(path: str) -> UserError:
    """Return the error for a shard that another program writes to."""
    return UserError(f"{path} changed while it was in use", "files that do not change during a run",
                     "start the run again with the current file")


def _target(path: str, kind: str, cache: str, head: dict[str, Any]) -> Path:
    """Return the index file of a shard; beside the data its name is that of the shard, which may move with its folder.

    In a cache that several folders share, the name holds the shard's path too.
    """
    key = hashlib.sha256(kind.encode()).hexdigest()[:8]
    parent, name = os.path.split(path)
    near = f"{name}.{key}.index"
    folder = folder_of(Path(parent), FOLDER, "index", cache, near, lambda kept: _read(kept, head) is not None)
    if folder == Path(parent) / FOLDER:
        return folder / near
    return folder / f"{name}.{hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]}.{key}.index"


def _write(target: Path, head: dict[str, Any], index: Index) -> None:
    places_nk = np.ascontiguousarray(index.places_nk, "<i8")
    row = {**head, "shape": list(places_nk.shape), "damaged": {str(k): v for k, v in index.damaged.items()},
           "more": index.more}
    data = json.dumps(row).encode() + b"\n" + places_nk.tobytes()
    with whole_file(target) as draft, draft.open("xb") as file:
        file.write(b"%08x\n" % zlib.crc32(data))
        file.write(data)


def _read(target: Path, head: dict[str, Any]) -> Index | None:
    """Return a kept index; None where it is missing, damaged, or of another state of the shard."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = target.read_bytes()
        if int(text[:8], 16) != zlib.crc32(memoryview(text)[9:]):
            return None
        end = text.index(b"\n", 9)
        row = json.loads(text[9:end])
        if {name: row[name] for name in head} == head:
            places_nk = np.frombuffer(text, "<i8", offset=end + 1).reshape(row["shape"])
            return Index(places_nk, {int(k): v for k, v in row["damaged"].items()}, row["more"])
    return None


_PACKED = {b"\x1f\x8b": "gzip", b"(\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def refuse_packed(path: str) -> None:
    """Raise `UserError` for a compressed file, in which no sample can be sought."""
    with open(path, "rb") as file:
        start = file.read(6)
    packed = next((name for mark, name in _PACKED.items() if start.startswith(mark)), "")
    if packed:
        raise UserError(f"{path} is compressed with {packed}, so that single samples cannot be read",
                        "an uncompressed file (pictures are compressed already)", "decompress it")
