"""Keep the last checkpoints of a run in one directory: list, resume from and remove; `snapshot` writes them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.checkpoint import files, frozen
from hvdtrain.checkpoint.manifest import MANIFEST_NAME, CheckpointError, Manifest
from hvdtrain.checkpoint.snapshot import OpenCheckpoint, check_listing, inspect, read_snapshot, write_snapshot
from hvdtrain.checkpoint.tensors import Content
from hvdtrain.core.errors import UserError

_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)


class StoredCheckpoint(NamedTuple):
    """A checkpoint in a store: the step its manifest names, and its path."""

    step: int
    path: Path


class ListedCheckpoint(NamedTuple):
    """A directory that may be a checkpoint; ``hidden`` if moved aside, ``error`` if its manifest is bad."""

    step: int
    hidden: bool
    path: Path
    error: CheckpointError | None


Log = Callable[[str], None]
StoredList = list[StoredCheckpoint]
StoredNames = list[str]


def silent(_text: str) -> None:
    pass


def best_of(meta: Mapping[str, Any], steps: Collection[int]) -> dict[int, list[str]]:
    """Return the metrics by step of the best checkpoints among ``steps``, by the ``meta`` of the newest checkpoint.

    Of each metric the first of its steps that is there, since the save of a better one may have failed.
    """
    found: dict[int, list[str]] = {}
    for metric, candidates in meta.get("best", {}).items():
        for step in [step for step in candidates if step in steps][:1]:
            found.setdefault(step, []).append(metric)
    return found


class CheckpointStore:
    """Save to ``root/step-00000120`` and keep the last ``keep``; one process at a time writes to a root.

    Checkpoints that the newest one's meta names as the "best" (metric -> steps) are never removed (`best_of`).
    """

    def __init__(self, root: Path, keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UserError(f"keep {keep!r}", "a whole number of at least 1", "set keep: 1")
        self.root = Path(os.path.abspath(root))
        self.keep = keep
        self._warned_newer = False
        self._inspected: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}

    def path_of(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, content: Content, step: int, log: Log = silent) -> Path:
        """Write a checkpoint, then remove older ones down to ``keep``; return its path.

        Raises what ``write_snapshot`` raises, and older checkpoints are then untouched. Failing to remove old ones is
        only logged. Checkpoints of a later step (the run started over) and damaged or foreign directories stay.
        """
        self.begin()
        newest = self.list()[-1:] if frozen.GROUP in content.specs() else []
        saved = write_snapshot(self.path_of(step), content, step=step, earlier=newest[0].path if newest else None,
                               make_room=lambda needed_bytes: self.make_room(step, needed_bytes, log))
        self.saved(step, log)
        return saved

    def make_room(self, step: int, needed_bytes: int, log: Log = silent) -> None:
        """Remove checkpoints before ``step``, never the newest whole one, if that gives the needed room."""
        lacking = needed_bytes - files.free_bytes(self.root)
        if lacking <= 0 or lacking > sum(files.tree_bytes(stored.path) for stored in self._removable(step, 1)):
            return
        while lacking > 0 and (path := self.drop_oldest(step)) is not None:
            lacking = needed_bytes - files.free_bytes(self.root)
            log(f"note: not enough space for the checkpoint of step {step}: the oldest one, {path.name}, was removed")

    def drop_oldest(self, before: int = sys.maxsize) -> Path | None:
        """Remove the oldest whole checkpoint before a step, not the newest or best; return its path. OSError."""
        removable = self._removable(before, 1)
        if not removable:
            return None
        self._inspected.pop(removable[0].path, None)
        files.discard(removable[0].path)
        return removable[0].path

    def begin(self) -> None:
        """Clean up after writers that died, before a checkpoint is written."""
        if self.root.is_dir():
            self._clean_up()

    def saved(self, step: int, log: Log = silent) -> None:
        """Remove checkpoints before the one of ``step``, which was just written, down to ``keep``."""
        try:
            self._sweep()
            stored = self.list()
            self._prune(step, stored)
            self._warn_newer(step, stored, log)
        except (OSError, CheckpointError) as error:
            log(f"the checkpoint of step {step} is saved, but older ones could not be removed: {error}")

    def list(self) -> StoredList:
        """Return checkpoints with a good manifest, oldest step first; clocks and directory names do not count."""
        found = (one for one in self.everything() if not one.hidden and one.error is None)
        return [StoredCheckpoint(one.step, one.path) for one in found][::-1]

    def names(self) -> StoredNames:
        """Return the names of all that is named like a checkpoint, whole or damaged, oldest step first."""
        return [one.path.name for one in self.everything()][::-1]

    def latest_whole(self, log: Log) -> tuple[Path, OpenCheckpoint] | None:
        """Verify and open the newest whole checkpoint, logging why newer ones are not used; None if there is none.

        Changes nothing on disk. The path is a hidden one where a crash fell between the two renames of a replaced step.
        CheckpointError only where ``root`` itself cannot be listed.
        """
        for one in self.everything():
            try:
                if one.error is not None:
                    raise one.error
                return one.path, read_snapshot(one.path)
            except CheckpointError as reason:
                log(f"checkpoint {one.path.name} is not used: {reason}")
        return None

    def everything(self) -> tuple[ListedCheckpoint, ...]:
        """List all named like checkpoints, newest step (the manifest's, else the name's) first."""
        try:
            names = os.listdir(self.root) if self.root.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be listed ({error})", "a directory of checkpoints",
                                  "check its permissions") from None
        places = [(name, False, self.root / name) for name in names]
        places += [(left.target, True, left.path) for left in self._leftovers("aside")]
        found = [self._candidate(name, hidden, path) for name, hidden, path in places if _STEP.fullmatch(name)]
        return tuple(sorted(found, key=lambda one: (one.step, not one.hidden, one.path.name), reverse=True))

    def _candidate(self, name: str, hidden: bool, path: Path) -> ListedCheckpoint:
        try:
            return ListedCheckpoint(self._inspect(path).step, hidden, path, None)
        except CheckpointError as error:
            return ListedCheckpoint(int(name.removeprefix("step-")), hidden, path, error)

    def _inspect(self, path: Path) -> Manifest:
        """Read a manifest, unless the file has not changed since it was read. CheckpointError."""
        try:
            status = os.lstat(path / MANIFEST_NAME)
        except OSError:
            return inspect(path)
        now = status.st_ino, status.st_size, status.st_mtime_ns
        if self._inspected.get(path, (None,))[0] != now:
            self._inspected[path] = now, inspect(path)
        return self._inspected[path][1]

    def _looks_whole(self, path: Path) -> bool:
        try:
            check_listing(path, self._inspect(path))
        except CheckpointError:
            return False
        return True

    def _leftovers(self, kind: str) -> tuple[files.Leftover, ...]:
        found = files.leftovers(self.root) if self.root.is_dir() else []
        return tuple(left for left in found if left.kind == kind)

    def _clean_up(self) -> None:
        """Clean up after dead writers: remove rubbish, restore the name of a checkpoint left aside."""
        for left in self._leftovers("tmp"):
            if files.writer_is_gone(left):
                files.remove_quietly(left.path)
        for left in self._leftovers("aside"):
            home = self.root / left.target
            if files.writer_is_gone(left) and not os.path.lexists(home):
                with contextlib.suppress(OSError):  # it is still found where it is
                    os.rename(left.path, home)
                    files.fsync_directory(self.root)

    def _sweep(self) -> None:
        """Remove old checkpoints that dead writers left aside after their successors were in place."""
        for left in self._leftovers("aside"):
            if files.writer_is_gone(left) and os.path.lexists(self.root / left.target):
                files.discard(left.path)

    def _prune(self, saved_step: int, stored: StoredList) -> None:
        """Keep the checkpoint just saved and the ``keep - 1`` before it that look whole."""
        for old in self._removable(saved_step + 1, self.keep, stored):
            self._inspected.pop(old.path, None)
            files.discard(old.path)

    def _removable(self, before: int, keep: int, among: StoredList | None = None) -> StoredList:
        """Return whole checkpoints before a step, oldest first, without the newest ``keep`` and the best ones."""
        listed = self.list() if among is None else among
        whole = [stored for stored in listed if stored.step < before and self._looks_whole(stored.path)]
        best = best_of(self._inspect(whole[-1].path).meta, {stored.step for stored in whole}) if whole else {}
        return [stored for stored in whole[: max(0, len(whole) - keep)] if stored.step not in best]

    def _warn_newer(self, saved_step: int, listed: StoredList, log: Log) -> None:
        newest = max((stored.step for stored in listed), default=saved_step)
        if newest > saved_step and not self._warned_newer:
            self._warned_newer = True
            log(f"{self.root} already holds a checkpoint of step {newest}, later than step {saved_step} "
                "that was just saved; a resume would use the later one. Move it away if this run starts over")
