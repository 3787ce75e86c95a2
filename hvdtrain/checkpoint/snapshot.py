"""Write one checkpoint, a directory of group files and a manifest; verify it, and read its arrays on demand.

`hvdtrain.checkpoint.store` decides which checkpoints are kept. Values are read, not mapped: pages of a mapped file
would count as this process's memory.
"""

from __future__ import annotations

import errno
import hashlib
import math
import operator
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import files, frozen
from hvdtrain.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    FileEntry,
    Manifest,
    damaged,
    decode,
    encode,
    encode_meta,
    file_name,
    group_name,
)
from hvdtrain.checkpoint.stream import Tensor, pieces_of, tensors_of
from hvdtrain.checkpoint.tensors import Content, FileLayout, Spec, layout, portable, read_header
from hvdtrain.core.protocols.run import Head

BLOCK_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State in memory: ``tensors[group][name]`` arrays of any shape, and JSON-able ``meta``. Implements `Content`.

    Arrays come back with the same dtype, shape and bits, in native byte order and C order, names sorted. In ``meta`` a
    tuple comes back as a list; keys must be text.
    """

    tensors: Mapping[str, Mapping[str, np.ndarray]]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def specs(self) -> dict[str, dict[str, Spec]]:
        found: dict[str, dict[str, Spec]] = {}
        for group, named in self.tensors.items():
            ready = {name: portable(name, array, group) for name, array in named.items()}
            found[group] = {name: Spec(array.dtype, array.shape) for name, array in ready.items()}
        return found

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        for name in names:
            yield portable(name, self.tensors[group][name], group).reshape(-1).view(np.uint8).data


def write_snapshot(directory: Path, content: Content, *, step: int = 0,
                   make_room: Callable[[int], None] | None = None, earlier: Path | None = None) -> Path:
    """Write state as the checkpoint ``directory``, which appears, or is replaced, atomically.

    Every file is fsynced, then their directory, which is renamed into place, then the parent. Raises OSError (disk
    full, I/O error, permission) with nothing left behind and an older checkpoint of that name kept; CheckpointError for
    state that cannot be stored and for a ``directory`` that is no checkpoint. ``make_room``: gets the needed bytes
    beforehand. ``earlier``: a checkpoint whose file of frozen weights may be shared (`hvdtrain.checkpoint.frozen`).
    """
    directory = Path(os.path.abspath(directory))
    step = _step(step)
    layouts = {group: layout(specs, group) for group, specs in content.specs().items()}
    # Placeholders of full length: meta is checked, and the manifest's size known, before anything is written.
    planned = {file_name(group): FileEntry(plan.size_bytes, "0" * 64) for group, plan in layouts.items()}
    meta = encode_meta(dict(content.meta))
    manifest_bytes = len(encode(Manifest(step, planned), meta))
    sizes = [manifest_bytes, *(entry.size_bytes for entry in planned.values())]
    shared = frozen.shared_bytes({name: entry.size_bytes for name, entry in planned.items()}, earlier)
    temp = open_new(directory, sum(size + BLOCK_BYTES for size in sizes) - shared, make_room)
    try:
        _fill(temp, content, step, layouts, meta, earlier)
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


def read_snapshot(directory: Path) -> OpenCheckpoint:
    """Open a checkpoint; CheckpointError unless its files, and no others, are there to the bit as written."""
    directory = Path(directory)
    manifest = inspect(directory)
    check_listing(directory, manifest)
    for name, entry in manifest.files.items():
        _check_content(directory / name, entry)
    try:
        return open_checkpoint(directory, manifest)
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
        raise damaged(f"{directory} lacks {', '.join(missing[:5])}", f"the {len(expected)} files of this checkpoint")
    if extra := sorted(set(found) - expected):
        raise CheckpointError(f"{directory} also holds {', '.join(map(repr, extra[:5]))}",
                              "only the files its manifest lists", "move the others away if you put them there")
    for name, status in sorted(found.items()):
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CheckpointError(f"{directory / name} is {kind}", "the file itself",
                                  "copy the real file in its place")
        if name == MANIFEST_NAME:
            continue
        size_bytes = manifest.files[name].size_bytes
        if status.st_size != size_bytes:
            state = "truncated" if status.st_size < size_bytes else "too long"
            raise damaged(f"{directory / name} is {state}: {status.st_size} bytes", f"{size_bytes}")


def _fill(temp: Path, content: Content, step: int, layouts: Mapping[str, FileLayout], meta: bytes,
          earlier: Path | None) -> None:
    entries = {}
    for group, plan in layouts.items():
        name = file_name(group)
        entries[name] = frozen.writer(group, earlier)(temp / name, plan.pieces(content.blocks(group, plan.names)))
    data = encode(Manifest(step, entries), meta)
    files.write_durably(temp / MANIFEST_NAME, [memoryview(data)])
    files.fsync_directory(temp)


def _step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"step {step!r}", "a whole number of at least 0", "give the global step")
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
    raise CheckpointError(got, "a free name, or a checkpoint to replace", "move it away")


def _require_directory(directory: Path) -> None:
    try:
        mode = os.lstat(directory).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory} does not exist", "a checkpoint directory",
                              "check the path") from None
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from None
    if stat.S_ISLNK(mode):
        raise CheckpointError(f"{directory} is a symbolic link", "the checkpoint directory itself",
                              "give the real path")
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{directory} is a file", "a checkpoint directory",
                              "give the directory, not a file in it")


def _no_manifest(directory: Path) -> CheckpointError:
    try:
        state = "holds no manifest.json" if os.listdir(directory) else "is empty"
    except OSError as error:
        return _unreadable(directory, error)
    return CheckpointError(f"{directory} {state}",
                           "a complete checkpoint; this directory is another program's, or damaged",
                           "give a directory such as step-00000120 that hvdtrain wrote")


def _check_content(path: Path, entry: FileEntry) -> None:
    digest = hashlib.sha256()
    try:
        for chunk in files.read_chunks(path):
            digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest.hexdigest() != entry.sha256:
        raise damaged(f"{path} was changed: it hashes to {digest.hexdigest()}",
                      f"{entry.sha256} as noted in the manifest")


def _unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a symbolic link", "the file itself",
                               "copy the real file in its place")
    return CheckpointError(f"{path} cannot be read ({error})", "a readable checkpoint",
                           "check its permissions and disk")


Places = dict[tuple[int, str, str], tuple[Path, int]]
"""By number of file, group and name: the file, and the byte at which the values begin there."""


class TensorGroup(Mapping[str, np.ndarray]):
    """Arrays by name, sorted; each access reads the file again."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], places: Places) -> None:
        self.name, self._tensors, self._places = name, {key: tensors[key] for key in sorted(tensors)}, places

    def called(self, names: Mapping[str, str]) -> TensorGroup:
        """Return these arrays under other names; ``names``: those here by new names."""
        new = {old: new for new, old in names.items()}
        places = {(source, group, new.get(name, name) if group == self.name else name): place
                  for (source, group, name), place in self._places.items()}
        return TensorGroup(self.name, {new.get(name, name): tensor for name, tensor in self._tensors.items()}, places)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        spec = self._tensors[name].spec
        flat = np.empty(math.prod(spec.shape), spec.dtype)
        self.read(name, 0, flat)
        return flat.reshape(spec.shape)

    def specs(self) -> dict[str, Spec]:
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def heads(self) -> list[Head]:
        """Return each array as one shard without its values."""
        return [Head(self.name, name, spec.shape, spec.dtype.str, 0, math.prod(spec.shape))
                for name, spec in self.specs().items()]

    def read(self, name: str, begin: int, into: np.ndarray) -> None:
        """Fill ``into`` (n,) with elements [begin, begin + n) of an array in row-major order. CheckpointError."""
        self._read(name, begin * into.itemsize, into.view(np.uint8).data)

    def blocks(self, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the bytes of arrays, end to end, each piece valid until the next."""
        for name in names:
            for low, high in pieces_of(self._tensors[name].spec.n_bytes):
                piece = np.empty(high - low, np.uint8).data
                self._read(name, low, piece)
                yield piece

    def _read(self, name: str, first: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of an array from ``first`` on, from all shards of it."""
        itemsize, last = self._tensors[name].spec.dtype.itemsize, first + len(memory)
        for source, one in self._tensors[name].parts:
            begin = one.begin * itemsize
            low, high = max(first, begin), min(last, begin + one.n * itemsize)
            if low >= high:
                continue
            path, offset = self._places[source, self.name, name]
            try:
                files.read_into(path, offset + low - begin, memory[low - first:high - first])
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error})", "a readable checkpoint",
                                      "check its permissions and disk") from None


class OpenCheckpoint:
    """A checkpoint on disk: implements `Content`. ``tensors``: its groups, of which nothing is in memory."""

    def __init__(self, tensors: Mapping[str, TensorGroup], meta: Mapping[str, Any]) -> None:
        self.tensors, self.meta = tensors, meta

    def called(self, names: Mapping[tuple[str, str], str]) -> OpenCheckpoint:
        """Return this checkpoint with other names; ``names``: those here by (group, new name)."""
        return OpenCheckpoint({name: group.called({new: old for (of, new), old in names.items() if of == name})
                     for name, group in self.tensors.items()}, self.meta) if names else self

    def specs(self) -> dict[str, dict[str, Spec]]:
        return {name: group.specs() for name, group in self.tensors.items()}

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        return self.tensors[group].blocks(names)


def open_checkpoint(directory: Path, manifest: Manifest) -> OpenCheckpoint:
    """Return the checkpoint in ``directory``, whose files have been verified. OSError, `CheckpointError`."""
    heads_F: list[list[Head]] = []
    places: Places = {}
    for i, file in enumerate(manifest.files):
        arrays = read_header(directory / file)
        shards = manifest.shards.get(file)
        if shards is not None and set(shards) != set(arrays):
            raise damaged(f"{directory / file} holds arrays that differ from its manifest", "the same")
        heads_F.append([])
        for key, (spec, offset) in arrays.items():
            group, name, begin, shape = frozen.group_of(str(group_name(file))), key, 0, spec.shape
            if shards is not None:
                (begin, shape), (group, _, name) = shards[key], key.partition("/")
            heads_F[-1].append(Head(group, name, tuple(shape), spec.dtype.str, begin, math.prod(spec.shape)))
            places[i, group, name] = directory / file, offset
    found = tensors_of(heads_F)
    groups = list(found) if manifest.shards else list(dict.fromkeys(
        frozen.group_of(str(group_name(file))) for file in manifest.files))
    return OpenCheckpoint({name: TensorGroup(name, found.get(name, {}), places) for name in groups}, manifest.meta)
