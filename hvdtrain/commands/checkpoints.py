"""``python -m hvdtrain checkpoints RUN``: list, verify, remove and export, without any framework."""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    OpenCheckpoint,
    files,
    read_snapshot,
    weights,
)
from hvdtrain.checkpoint.downloads import refuse
from hvdtrain.checkpoint.manifest import MANIFEST_NAME
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.checkpoint.snapshot import check_listing, inspect
from hvdtrain.checkpoint.store import ListedCheckpoint, best_of
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.resolve import absolute
from hvdtrain.core.terminal import say
from hvdtrain.core.units import format_bytes

LISTED, WHOLE = "complete by names and sizes", "complete and verified"
"""States of a good checkpoint: not read to its end, and read."""

HEADERS = ("step", "written", "size", "layout", "ranks", "state")


@dataclass(frozen=True)
class CheckpointRow:
    """Checkpoint or other entry: ``state`` in words; ``good``: usable as far as was seen."""

    path: Path
    state: str
    step: int = -1
    written: str = ""
    size_bytes: int = -1
    layout: str = ""
    ranks: str = ""
    good: bool = False
    damaged: bool = False

    def cells(self) -> list[str]:
        return [str(self.step) if self.step >= 0 else self.path.name, self.written,
                format_bytes(self.size_bytes) if self.size_bytes >= 0 else "", self.layout, self.ranks, self.state]


def main(argv: list[str]) -> int:
    """Run the command; return 1 where ``--verify`` found a checkpoint that is not whole."""
    args = arguments(argv)
    root = root_of(args.run)
    if args.export:
        return _export(root, args)
    if args.prune:
        return _prune(root, args.prune)
    rows = look(root, args.verify)
    if not rows:
        raise UserError(f"{root} holds no checkpoints", "a run with checkpoints", "name another run")
    terminal.show(str(root), HEADERS, [row.cells() for row in rows])
    return int(args.verify and any(row.damaged for row in rows))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options; `UserError` for those that do not go together."""
    args = _parser().parse_args(argv)
    asked: Sequence[str] = [name for name in ("verify", "prune", "export") if getattr(args, name)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} together with --{asked[1]}", "one of them",
                        "call the command twice; --prune and --export always verify what they keep and write")
    if args.prune is not None and args.prune < 1:
        raise UserError(f"--prune is {args.prune}", "1 or more checkpoints to keep", "correct --prune")
    if args.step is not None and not args.export:
        raise UserError("--step without --export", "the checkpoint to export", "add --export FILE")
    if args.average and not args.export:
        raise UserError("--average without --export", "a file to write the average to", "add --export FILE")
    return args


def root_of(run: str) -> Path:
    """Return the directory of checkpoints that RUN means, a run's own or the run's. Errors: `UserError`."""
    refuse("RUN", run)
    path = absolute(run)
    if not path.is_dir():
        raise UserError(f"there is no directory {run}", "the directory of a run", "correct RUN")
    inner = RunDirectory(path).checkpoints
    if inner.is_dir() or path.name == RunDirectory.CHECKPOINTS or any(path.glob("step-*")):
        return inner if inner.is_dir() else path
    raise UserError(f"{run} holds no checkpoints", "the directory of a run with checkpoints", "correct RUN")


def look(root: Path, verify: bool) -> list[CheckpointRow]:
    """Return rows of all that lies in ``root``, newest step first, then what is no checkpoint.

    Another process may save and remove meanwhile: what has gone when it is looked at is skipped.
    """
    store = CheckpointStore(root, 1)
    found = store.everything()
    rows = [row for row in (_row(one, verify) for one in found) if row is not None]
    newest = next((row.path for row in rows if row.good), None)
    best = {} if newest is None else best_of(inspect(newest).meta, {row.step for row in rows if row.good})
    rows = [replace(row, state=f"{row.state}; best by {', '.join(best[row.step])}") if row.good and row.step in best
            else row for row in rows]
    known = {one.path for one in found}
    left = {one.path: one for one in files.leftovers(root) if one.path not in known}
    for path in sorted(root.iterdir()):
        if path in left:
            gone = files.writer_is_gone(left[path])
            state = ("left over from an interrupted save; the next save removes it" if gone else
                     f"being written by process {left[path].pid} on host {left[path].host}")
            rows.append(CheckpointRow(path, state))
        elif path not in known:
            rows.append(CheckpointRow(path, "not written by hvdtrain: ignored"))
    return rows


def _row(one: ListedCheckpoint, verify: bool) -> CheckpointRow | None:
    """Return the row of one checkpoint; None where it has gone meanwhile."""
    aside = "moved aside by an interrupted save, and used if nothing newer exists: " if one.hidden else ""
    try:
        if one.error is not None:
            raise one.error
        manifest = inspect(one.path)
        row = _described(one.path, manifest)
        check_listing(one.path, manifest)
        if verify:
            read_snapshot(one.path)
    except CheckpointError as error:
        if not os.path.lexists(one.path):
            return None
        state = f"{aside}incomplete: {error.got}".replace(f"{one.path}/", "").replace(str(one.path), "it")
        return CheckpointRow(one.path, state, one.step, damaged=True)
    return replace(row, state=aside + (WHOLE if verify else LISTED), good=True)


def _described(path: Path, manifest: Manifest) -> CheckpointRow:
    meta: dict[str, Any] = manifest.meta
    try:
        manifest_bytes, written = os.lstat(path / MANIFEST_NAME).st_size, os.lstat(path / MANIFEST_NAME).st_mtime
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "a checkpoint", "check its permissions") from None
    size = manifest_bytes + sum(entry.size_bytes for entry in manifest.files.values())
    return CheckpointRow(path, "", manifest.step, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)), size,
                         "sharded" if manifest.shards else "gathered", str(meta.get("world_size", "")))


def _prune(root: Path, keep: int) -> int:
    """Remove the good checkpoints that are older than the ``keep`` newest that are whole to the last byte."""
    folder = root.parent if root.name == RunDirectory.CHECKPOINTS else root
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock_run(lock, root)
        kept, going = sorted_out(root, keep)
        for path in going:
            files.discard(path)
            say(f"removed {path}")
    except OSError as error:
        raise UserError(f"{root}: {error}", "a writable directory", "check its permissions") from None
    finally:
        os.close(lock)
    if not kept:
        say("nothing is removed: no checkpoint here is complete")
        return 0
    spared = [row.path.name for row in look(root, False) if not row.good]
    say(f"kept {', '.join(path.name for path in kept)}, verified as complete"
        + (f"; not removed, since they are not valid checkpoints: {', '.join(spared)}" if spared else ""))
    return 0


def sorted_out(root: Path, keep: int) -> tuple[list[Path], list[Path]]:
    """Return (the ``keep`` newest and the best checkpoints, each read and whole; other good ones, which may go).

    Nothing may be removed before ``keep`` whole ones were found; damaged ones are neither.
    """
    kept: dict[int, Path] = {}
    going: list[ListedCheckpoint] = []
    for one in CheckpointStore(root, 1).everything():
        again = one.step in kept  # one moved aside by a save that died, whose successor is whole
        row = _row(one, verify=len(kept) < keep and not again)
        if row is None or not row.good:
            continue
        if again or len(kept) == keep:
            going.append(one)
        else:
            kept[one.step] = one.path
    newest = next(iter(kept.values()), None)
    best = {} if newest is None else best_of(inspect(newest).meta, {*kept, *(one.step for one in going)})
    for one in [one for one in going if one.step in best and one.step not in kept]:
        going.remove(one)
        if (row := _row(one, verify=True)) is not None and row.good:
            kept[one.step] = one.path
    return list(kept.values()), [one.path for one in going]


def _lock_run(lock: int, root: Path) -> None:
    """Keep jobs from training in the run meanwhile; `UserError` where one does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"a job is training in {root.parent}, and removes old checkpoints itself",
                        "a run without a job", "wait for its end, or set its checkpoint.keep") from None
    except OSError:  # a file system without locks: two jobs are not told from each other there either
        return


def _export(root: Path, args: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, by default of the newest whole one."""
    path, snapshot = chosen(root, args.step)
    target = Path(args.export)
    target = target if target.name.endswith(".safetensors") else target / weights.FILE
    try:
        tensors = weights.write(snapshot, Path(os.path.abspath(target)), args.average)
    except OSError as error:
        raise UserError(f"{target} could not be written: {error}", "a writable place with room",
                        "choose another") from None
    what = "moving average, " if args.average else ""
    more = "" if args.average or not weights.has_average(snapshot) else "; --average writes their moving average"
    say(f"wrote {what}{count(tensors, 'tensor')} of {path.name} to {target}{more}")
    return 0


def chosen(root: Path, step: int | None) -> tuple[Path, OpenCheckpoint]:
    """Return the checkpoint of ``step``, or the newest whole one; `UserError` where none is or it is damaged."""
    store = CheckpointStore(root, 1)
    if step is None:
        found = store.latest_whole(say)
        if found is None:
            raise UserError(f"{root} holds no complete checkpoint", "at least one that is", "list them with python -m "
                                                                                            "hvdtrain checkpoints")
        return found
    for one in store.everything():
        if one.step == step:
            return one.path, read_snapshot(one.path)
    steps = ", ".join(sorted({str(one.step) for one in store.everything()}, key=int))
    raise UserError(f"there is no checkpoint of step {step}", f"one of {steps}" if steps else "one (there is none)",
                    "correct --step")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain checkpoints", allow_abbrev=False,
        description="List the checkpoints of a run: step, time, size, layout, ranks, and "
                    "completeness. Exit status 0; 1 if --verify found an incomplete one; 2 for an error.")
    parser.add_argument("run", metavar="RUN", help="a run's directory, or its checkpoints directory")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its SHA-256")
    parser.add_argument("--prune", type=int, metavar="N",
                        help="keep the newest N complete checkpoints (verified first) and remove "
                             "older ones; damaged or foreign directories stay")
    parser.add_argument("--export", metavar="PATH",
                        help="write the weights to PATH/model.safetensors, or to "
                             "PATH if it ends in .safetensors, with the names of the model's framework")
    parser.add_argument("--average", action="store_true",
                        help="export the moving average of a run with ema instead of the weights")
    parser.add_argument("--step", type=int, help="step of the checkpoint to export (default: the newest complete one)")
    return parser
