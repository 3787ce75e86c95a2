"""A checkpoint that every rank writes its part of, on a file system that all of them share.

Owns the files of the shards, and the order in which a checkpoint is made of them; `reading` makes them whole again.
Who tells whom is `saving`'s: one rank calls `open_new` and `seal`, each calls `write_shard` in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import MANIFEST_NAME, CheckpointError, FileEntry, Manifest, encode, file_name
from hvdtrain.checkpoint.tensors import Spec, layout, portable
from hvdtrain.core.protocols.run import Shard

LOOK_S = 3.0
"""How long a file of another rank may take to be seen: network file systems keep in mind that a name was not there."""


class Written(NamedTuple):
    """One rank's file: its name, size and hash, and what its arrays are, as `Manifest` holds it."""

    name: str
    entry: FileEntry
    shards: dict[str, list[Any]]


def shard_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return file_name(f"shard-{rank:04d}")


def write_shard(temp: Path, rank: int, shards: Sequence[Shard]) -> Written:
    """Write a rank's shards into the directory ``temp`` as one durable file. OSError, `CheckpointError`."""
    name, group = shard_file(rank), f"shard-{rank:04d}"
    arrays = {key: portable(key, shard.values.reshape(-1), group)
              for shard in shards for key in [f"{shard.group}/{shard.name}"]}
    plan = layout({key: Spec(array.dtype, array.shape) for key, array in arrays.items()}, group)
    blocks = (arrays[key].view(np.uint8).data for key in plan.names)
    entry = files.write_durably(temp / name, plan.pieces(blocks))
    return Written(name, entry, {f"{shard.group}/{shard.name}": [shard.begin, list(shard.shape)] for shard in shards})


def seal(temp: Path, directory: Path, step: int, written: Sequence[Written], meta: Mapping[str, Any]) -> None:
    """Make ``temp``, which holds all files of ``written``, the checkpoint ``directory``. OSError, `CheckpointError`.

    Each file must be there in its size: a rank that sees another file system has written it elsewhere.
    """
    for one in written:
        _require(temp / one.name, one.entry.size_bytes)
    manifest = Manifest(step, {one.name: one.entry for one in written}, dict(meta),
                        {one.name: one.shards for one in written})
    files.write_durably(temp / MANIFEST_NAME, [memoryview(encode(manifest))])
    files.fsync_directory(temp)
    files.publish(temp, directory)


def sees(path: Path, n_bytes: int = -1) -> bool:
    """Return whether a file is seen here, of ``n_bytes`` if that is 0 or more, within `LOOK_S`."""
    ends_at = time.monotonic() + LOOK_S
    while True:
        try:
            if os.lstat(path).st_size == n_bytes or n_bytes < 0:
                return True
        except OSError:
            pass
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.05)


def _require(path: Path, n_bytes: int) -> None:
    if not sees(path, n_bytes):
        raise CheckpointError(f"{path} is not there as its rank wrote it, {n_bytes} bytes", "one file system, the same "
                              "for all ranks", "set checkpoint.layout: gathered")
