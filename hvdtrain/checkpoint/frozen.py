"""Frozen weights of a checkpoint in a file of their own, which later checkpoints share while its bytes are the same.

Owns which arrays count as frozen. `hvdtrain.checkpoint.files.write_or_link` compares and links; a reader finds the
arrays in the group "model" (`hvdtrain.checkpoint.snapshot.open_checkpoint`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import FileEntry, file_name
from hvdtrain.checkpoint.stream import in_order
from hvdtrain.core.comparison import plain_name
from hvdtrain.core.protocols.run import Given, Place, Shard

MODEL, GROUP = "model", "model-frozen"
LEAST_BYTES = 1 << 16
"""Bytes of an array below which it stays with the others: buffers, such as statistics of BatchNorm, change."""

Write = Callable[..., FileEntry]


def ordered(given: Sequence[Given], place: Place | None, trainable: Collection[str] | None) -> list[Shard]:
    """Return the shards of a rank `in_order`, those of large weights that are not ``trainable`` in `GROUP`.

    ``trainable``: names; None: no group of their own, where each rank writes a file of all that it has.
    """
    def grouped(shard: Shard) -> Shard:
        n_bytes = math.prod(shard.shape) * shard.values.dtype.itemsize
        apart = trainable is not None and shard.group == MODEL and n_bytes >= LEAST_BYTES and (
            plain_name(shard.name) not in trainable)
        return replace(shard, group=GROUP) if apart else shard

    return in_order(grouped(shard) for each in given for shard in each.shards(place))


def group_of(group: str) -> str:
    """Return the group to which the arrays of a file's ``group`` belong."""
    return MODEL if group == GROUP else group


def shared_bytes(sizes: dict[str, int], earlier: Path | None) -> int:
    """Return the bytes that a checkpoint with files of ``sizes`` likely shares with the checkpoint ``earlier``."""
    size, file = sizes.get(file_name(GROUP), 0), file_name(GROUP)
    try:
        return size if earlier is not None and (earlier / file).lstat().st_size == size else 0
    except OSError:
        return 0


def writer(group: str, earlier: Path | None) -> Write:
    """Return what writes the file of ``group``: for frozen weights a link, where those of ``earlier`` are the same."""
    if group != GROUP or earlier is None:
        return files.write_durably
    return lambda path, pieces: files.write_or_link(path, pieces, earlier / path.name)
