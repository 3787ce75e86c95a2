"""Write a checkpoint of which every rank writes its shards, on a file system that all ranks share.

Owns the files and the notes between ranks: rank 0's order, every rank's answer, whatever happens to it, and rank 0's
seal. `hvdtrain.engine.saving` carries the notes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import MANIFEST_NAME, CheckpointError, FileEntry, Manifest, encode, file_name
from hvdtrain.checkpoint.snapshot import BLOCK_BYTES, open_new
from hvdtrain.checkpoint.store import CheckpointStore, Log, silent
from hvdtrain.checkpoint.tensors import Spec, layout, portable
from hvdtrain.checkpoint.weights import check_shards
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.run import Shard

LOOK_S = 3.0
"""How long a file of another rank may take to be seen: network file systems keep in mind that a name was not there."""


class ShardFile(NamedTuple):
    """File of one rank: its name, size and hash, and its arrays as in `Manifest`."""

    name: str
    entry: FileEntry
    shards: dict[str, list[Any]]


def write_shard(temp: Path, rank: int, shards: Sequence[Shard]) -> ShardFile:
    """Write a rank's shards into the directory ``temp`` as one durable file. OSError, `CheckpointError`."""
    group = f"shard-{rank:04d}"
    name = file_name(group)
    arrays = {key: portable(key, shard.values.reshape(-1), group)
              for shard in shards for key in [f"{shard.group}/{shard.name}"]}
    plan = layout({key: Spec(array.dtype, array.shape) for key, array in arrays.items()}, group)
    blocks = (arrays[key].view(np.uint8).data for key in plan.names)
    entry = files.write_durably(temp / name, plan.pieces(blocks))
    return ShardFile(name, entry, {f"{shard.group}/{shard.name}": [shard.begin, list(shard.shape)] for shard in shards})


def seal(temp: Path, directory: Path, step: int, written: Sequence[ShardFile], meta: Mapping[str, Any]) -> None:
    """Publish ``temp`` as ``directory`` if all files are there, in their sizes. OSError, `CheckpointError`."""
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
        raise CheckpointError(f"{path} is not visible as its rank wrote it, {n_bytes} bytes", "one file system "
                              "that all ranks share", "set checkpoint.layout: gathered")


Note = dict[str, Any]


def check_shared(control: Control, out: Path) -> None:
    """Raise `UserError` on every rank unless all ranks see the directory ``out`` of rank 0. Collective."""
    def put() -> str:
        if control.rank != 0:
            return ""
        try:
            return str(files.make_temp(Path(os.path.abspath(out))))
        except OSError as error:
            raise UserError(f"checkpoint.layout sharded: {error}", "a writable directory",
                            "choose another --out") from None

    token = control.bcast(agreed(control, put, "looking for a shared file system"))
    try:
        blind = [rank for rank, seen in enumerate(control.gather(sees(Path(token)))) if not seen]
    finally:
        if control.rank == 0:
            files.remove_quietly(Path(token))
    if blind:
        raise UserError(f"checkpoint.layout is sharded, and rank(s) {', '.join(map(str, blind))} do not "
                        f"see rank 0's {out}", "a directory on a file system that all ranks share",
                        "choose such an --out, or set checkpoint.layout: gathered")


def order(store: CheckpointStore, step: int, needed_bytes: int, log: Log = silent) -> Note:
    """Make the directory that the ranks are to write into; return its note, or the reason for none. Rank 0's part."""
    note: Note = {"step": step, "temp": "", "error": ""}
    try:
        store.begin()
        note["temp"] = str(open_new(store.path_of(step), needed_bytes,
                                    lambda needed_bytes: store.make_room(step, needed_bytes, log)))
    except (OSError, UserError) as problem:
        note["error"] = str(problem)
    return note


def answer(order: Note, rank: int, shards: Sequence[Shard], error: str, trainable: Collection[str]) -> Note:
    """Write this rank's shards as ordered; return a note of the file, or of the reason for none."""
    note: Note = {"step": order["step"], "error": error}
    if error or order["error"]:
        return note
    try:
        check_shards(shards, trainable)
        written = write_shard(Path(order["temp"]), rank, shards)
        note |= {"file": written.name, "bytes": written.entry.size_bytes, "sha256": written.entry.sha256,
                 "shards": written.shards}
    except (OSError, UserError) as problem:
        note["error"] = f"rank {rank}: {problem}"
    except Exception as problem:  # whatever it is, rank 0 must not wait for an answer
        note["error"] = f"rank {rank}: {type(problem).__name__}: {problem}"
    return note


def publish(store: CheckpointStore, order: Note, answers: Sequence[Note], meta: Mapping[str, Any],
            log: Callable[[str], None]) -> None:
    """Seal the files of all ranks; rank 0's part. Raises the first error, with nothing left behind."""
    step, temp = order["step"], Path(order["temp"])
    try:
        for note in (order, *answers):
            if note["error"]:
                raise UserError(note["error"].rstrip("."))
            if note["step"] != step:
                raise RuntimeError(f"a rank has written its state of step {note['step']} in the save of step {step}")
        written = [ShardFile(n["file"], FileEntry(n["bytes"], n["sha256"]), n["shards"]) for n in answers]
        seal(temp, store.path_of(step), step, written, meta)
    except BaseException:
        if order["temp"]:
            files.remove_quietly(temp)
        raise
    store.saved(step, log)


def needed(shards: Sequence[Shard], size: int) -> int:
    """Return about how many bytes ``size`` ranks write if each writes as much as this one."""
    return size * (sum(shard.values.nbytes for shard in shards) + 2 * BLOCK_BYTES)
