"""One checkpoint on disk: a directory of group files and a manifest, written whole, verified when read.

Owns the snapshot that goes in and comes out, and how it is written and read. ``store`` knows which are kept.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import (
    MANIFEST_NAME, MAX_MANIFEST_BYTES, CheckpointError, FileEntry, Manifest, decode, encode, file_name, group_name)
from hvdtrain.checkpoint.reading import Kept, opened
from hvdtrain.checkpoint.tensors import Content, Layout, Spec, layout, portable

BLOCK_BYTES = 4096
_DAMAGED = "use another checkpoint: this one is damaged"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State in memory: ``tensors[group][name]`` arrays of any shape, and JSON-able ``meta``. Implements `Content`.

    Arrays come back with the same dtype, shape and bits, in native byte order and C order, names sorted. In
    ``meta`` a tuple comes back as a list; keys must be text.
    """

    tensors: Mapping[str, Mapping[str, np.ndarray]]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def specs(self) -> dict[str, dict[str, Spec]]:
        """What arrays there are, by group and name."""
        found: dict[str, dict[str, Spec]] = {}
        for group, named in self.tensors.items():
            ready = {name: portable(name, array, group) for name, array in named.items()}
            found[group] = {name: Spec(array.dtype, array.shape) for name, array in ready.items()}
        return found

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the bytes of arrays; of one that is not C-contiguous, a copy for its turn."""
        for name in names:
            yield portable(name, self.tensors[group][name], group).reshape(-1).view(np.uint8).data


def write_snapshot(directory: Path, content: Content, *, step: int = 0,
                   make_room: Callable[[int], None] | None = None) -> Path:
    """Write state as the checkpoint ``directory``, which appears, or is replaced, whole or not at all.

    Every file is fsynced, then their directory, which is renamed into place, then the parent. Raises OSError
    (disk full, I/O error, permission) with nothing left behind and an older checkpoint of that name kept;
    CheckpointError for what cannot be stored and for a ``directory`` that is no checkpoint. ``make_room``: is given the
    bytes that are needed before any is written.
    """
    directory = Path(os.path.abspath(directory))
    step = _step(step)
    layouts = {group: layout(specs, group) for group, specs in content.specs().items()}
    # Placeholders of full length: meta is checked, and the manifest's size known, before anything is written.
    planned = {file_name(group): FileEntry(plan.size_bytes, "0" * 64) for group, plan in layouts.items()}
    manifest_bytes = len(encode(Manifest(step, planned, dict(content.meta))))
    sizes = [manifest_bytes, *(entry.size_bytes for entry in planned.values())]
    temp = open_new(directory, sum(size + BLOCK_BYTES for size in sizes), make_room)
    try:
        _fill(temp, content, step, layouts)
        files.publish(temp, directory)
    except BaseException:
        files.remove_quietly(temp)
        raise
    return directory


def open_new(directory: Path, needed_bytes: int, make_room: Callable[[int], None] | None = None) -> Path:
    """Make the hidden directory in which the checkpoint ``directory`` is written. OSError, CheckpointError."""
    _refuse_to_replace(directory)
    files.make_directories(directory.parent)
    if make_room is not None:
        make_room(needed_bytes)
    files.require_space(directory.parent, needed_bytes)
    return files.make_temp(directory.parent)


def read_snapshot(directory: Path) -> Kept:
    """Verify a checkpoint, whose arrays are then read as they are asked for.

    CheckpointError unless its files, and no others, are there to the bit as written.
    """
    directory = Path(directory)
    manifest = inspect(directory)
    check_listing(directory, manifest)
    for name, entry in manifest.files.items():
        _check_content(directory / name, entry)
    try:
        return opened(directory, manifest)
    except OSError as error:
        raise _unreadable(directory, error) from None


def inspect(directory: Path) -> Manifest:
    """Read and check the manifest only (kilobytes); CheckpointError says why a directory is no checkpoint."""
    directory = Path(directory)
    _require_directory(directory)
    path = directory / MANIFEST_NAME
    if not os.path.lexists(path):
        raise _no_manifest(directory)
    data = b""
    try:
        for chunk in files.read_chunks(path):
            data += chunk
            if len(data) > MAX_MANIFEST_BYTES:
                break
    except OSError as error:
        raise _unreadable(path, error) from None
    return decode(data, str(path))


def check_listing(directory: Path, manifest: Manifest) -> None:
    """Check names, kinds and sizes of a checkpoint's files against its manifest, without reading them."""
    try:
        found = {name: os.lstat(directory / name) for name in os.listdir(directory)}
    except OSError as error:
        raise _unreadable(directory, error) from None
    expected = set(manifest.files) | {MANIFEST_NAME}
    if missing := sorted(expected - set(found)):
        raise CheckpointError(
            got=f"{directory} lacks {', '.join(missing[:5])}",
            expected=f"the {len(expected)} files of this checkpoint",
            do=_DAMAGED,
        )
    if extra := sorted(set(found) - expected):
        raise CheckpointError(
            got=f"{directory} also holds {', '.join(map(repr, extra[:5]))}",
            expected="only the files its manifest lists",
            do="move the others away if you put them there",
        )
    for name, status in sorted(found.items()):
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CheckpointError(
                got=f"{directory / name} is {kind}",
                expected="the file itself",
                do="copy the real file in its place",
            )
        if name == MANIFEST_NAME:
            continue
        size_bytes = manifest.files[name].size_bytes
        if status.st_size != size_bytes:
            state = "truncated" if status.st_size < size_bytes else "too long"
            raise CheckpointError(
                got=f"{directory / name} is {state}: {status.st_size} bytes",
                expected=f"{size_bytes}",
                do=_DAMAGED,
            )


def _fill(temp: Path, content: Content, step: int, layouts: Mapping[str, Layout]) -> None:
    entries = {}
    for group, plan in layouts.items():
        name = file_name(group)
        entries[name] = files.write_durably(temp / name, plan.pieces(content.blocks(group, plan.names)))
    data = encode(Manifest(step, entries, dict(content.meta)))
    files.write_durably(temp / MANIFEST_NAME, [memoryview(data)])
    files.fsync_directory(temp)


def _step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(
            got=f"step {step!r}", expected="a whole number of at least 0", do="give the global step"
        )
    return number


def _refuse_to_replace(directory: Path) -> None:
    """Refuse to replace what could be somebody's work: only a directory of nothing but our names may go."""
    if not os.path.lexists(directory):
        return
    if directory.is_dir() and not directory.is_symlink():
        names = sorted(os.listdir(directory))
        strangers = [name for name in names if name != MANIFEST_NAME and group_name(name) is None]
        if not strangers:
            return
        got = f"{directory} exists and holds {', '.join(map(repr, strangers[:5]))}"
    else:
        got = f"{directory} exists and is not a directory"
    raise CheckpointError(got=got, expected="a free name, or a checkpoint to replace", do="move it away")


def _require_directory(directory: Path) -> None:
    try:
        mode = os.lstat(directory).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            got=f"{directory} does not exist", expected="a checkpoint directory", do="check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from None
    if stat.S_ISLNK(mode):
        raise CheckpointError(
            got=f"{directory} is a symbolic link",
            expected="the checkpoint directory itself",
            do="give the real path",
        )
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            got=f"{directory} is a file",
            expected="a checkpoint directory",
            do="give the directory, not a file in it",
        )


def _no_manifest(directory: Path) -> CheckpointError:
    try:
        state = "holds no manifest.json" if os.listdir(directory) else "is empty"
    except OSError as error:
        return _unreadable(directory, error)
    return CheckpointError(
        got=f"{directory} {state}",
        expected="a whole checkpoint; this is another program's directory, or damaged",
        do="give a directory such as step-00000120 that hvdtrain wrote",
    )


def _check_content(path: Path, entry: FileEntry) -> None:
    digest = hashlib.sha256()
    try:
        for chunk in files.read_chunks(path):
            digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            got=f"{path} was changed: it hashes to {digest.hexdigest()}",
            expected=f"{entry.sha256} as noted in the manifest",
            do=_DAMAGED,
        )


def _unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return CheckpointError(
            got=f"{path} is a symbolic link", expected="the file itself", do="copy the real file in its place"
        )
    return CheckpointError(
        got=f"{path} cannot be read ({error})",
        expected="a readable checkpoint",
        do="check its permissions and disk",
    )
