"""What the ranks tell each other while each writes its shard: rank 0's order, every rank's answer, rank 0's seal.

Owns those notes, JSON-able, and that a rank answers whatever happens to it, so that nobody waits for one that has
failed. Does not carry them: `saving` does, over a channel or, where there is none, by the control plane.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import FileEntry
from hvdtrain.checkpoint.sharded import Written, seal, sees, write_shard
from hvdtrain.checkpoint.snapshot import BLOCK_BYTES, open_new
from hvdtrain.checkpoint.store import CheckpointStore, Log, silent
from hvdtrain.checkpoint.weights import check_shards
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.run import Shard

Note = dict[str, Any]


def check_shared(control: Control, out: Path) -> None:
    """Raise `UserError` on every rank unless all ranks see the directory ``out`` of rank 0. Collective.

    Rank 0 puts a file there for as long as the others look.
    """
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
        raise UserError(f"checkpoint.layout is sharded, and rank(s) {', '.join(map(str, blind))} do not see {out} as "
                        "rank 0 has it", "a directory on a file system that all ranks share",
                        "choose such an --out, or set checkpoint.layout: gathered")


def order(store: CheckpointStore, step: int, needed_bytes: int, log: Log = silent) -> Note:
    """Make the directory that the ranks are to write into, or say why not; rank 0's part."""
    note: Note = {"step": step, "temp": "", "error": ""}
    try:
        store.begin()
        note["temp"] = str(open_new(store.path_of(step), needed_bytes,
                                    lambda needed_bytes: store.make_room(step, needed_bytes, log)))
    except (OSError, UserError) as problem:
        note["error"] = str(problem)
    return note


def answer(order: Note, rank: int, shards: Sequence[Shard], error: str, trainable: Collection[str]) -> Note:
    """Write this rank's shards as ordered; return what was written, or why nothing was."""
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
    except Exception as problem:  # noqa: BLE001  (whatever it is, rank 0 must not wait for an answer)
        note["error"] = f"rank {rank}: {type(problem).__name__}: {problem}"
    return note


def publish(store: CheckpointStore, order: Note, answers: Sequence[Note], meta: Mapping[str, Any],
            log: Callable[[str], None]) -> None:
    """Seal what all ranks have written; rank 0's part. Raises the first error, with nothing left behind."""
    step, temp = order["step"], Path(order["temp"])
    try:
        for note in (order, *answers):
            if note["error"]:
                raise UserError(note["error"].rstrip("."))
            if note["step"] != step:
                raise RuntimeError(f"a rank has written its state of step {note['step']} in the save of step {step}")
        written = [Written(n["file"], FileEntry(n["bytes"], n["sha256"]), n["shards"]) for n in answers]
        seal(temp, store.path_of(step), step, written, meta)
    except BaseException:
        if order["temp"]:
            files.remove_quietly(temp)
        raise
    store.saved(step, log)


def needed(shards: Sequence[Shard], size: int) -> int:
    """Return about how many bytes ``size`` ranks write if each writes as much as this one."""
    return size * (sum(shard.values.nbytes for shard in shards) + 2 * BLOCK_BYTES)
