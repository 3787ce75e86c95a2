"""``webdataset``: tars in which files of one key form a sample (``000.jpg``, ``000.cls``), read through an index.

The layout is webdataset's: the key ends at the first dot of a file's name, and a sample's files follow one another.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.cells import Damage
from hvdtrain.data.formats import ShardFormat, read_at, source_of
from hvdtrain.data.index import Index, refuse_packed
from hvdtrain.data.sources import Source

_NUMBERS = ("cls", "cls2", "class", "index", "inx", "id", "count")
"""Endings of files that hold a whole number as text, as webdataset reads them."""
_TEXTS = ("txt", "text", "transcript")
_NOTES = re.compile(r"(?:\./)?__[^/]*__($|/)")  # names that webdataset leaves out
_BLOCK = 512  # bytes of a tar's header, and of the zeros at its end
_PIECE = 1 << 20  # bytes after the end that are looked at together

Members = dict[str, tuple[int, int]]
"""Ending -> (first byte, bytes) of a sample's files."""


def make(split: str, **args: Any) -> Source | None:
    """Return the samples of tars: x and y are endings, ``jpg;png`` one of several, ``json.label`` a value in JSON.

    Without ``x`` and ``y``: a picture, else the first ending, and then cls, else the first other one.
    """
    return source_of(TarFormat(), split, args)


class TarFormat(ShardFormat):
    """Samples of tars. A place: first byte and length of the file of x, then of y."""

    kind, endings = "webdataset", "tars, such as 'DIR/*.tar'"

    def names(self, path: str) -> list[str]:
        for _, _, members in _samples(path):
            if members:
                return list(members)
        return []

    def identity(self, names: tuple[str, ...]) -> str:
        return f"{self.kind} {' '.join(names)}"

    def scan(self, path: str, names: tuple[str, ...], target: Path) -> Index:
        places, damaged, size = list[list[int]](), dict[int, str](), os.path.getsize(path)
        for start, why, members in _samples(path):
            found = [_member(members, name) for name in names]
            lacking = [name for name, one in zip(names, found) if one is None]
            place = [number for one in found if one is not None for number in one]
            if not why and lacking:
                why = f"the sample has no file that ends in .{lacking[0]}, but {', '.join(members)}"
            elif not why and max(at + n for at, n in zip(place[::2], place[1::2])) > size:
                why = "the tar is truncated here"
            if why:
                damaged[start], place = why, [start, -1] + [0] * (2 * len(names) - 2)
            places.append(place)
        return Index(np.array(places, np.int64).reshape(-1, 2 * len(names)), damaged)

    def read(self, file: Any, place_k: Sequence[int]) -> list[bytes]:
        return [read_at(file, at, n) for at, n in zip(place_k[::2], place_k[1::2])]

    def values(self, found: list[bytes], names: tuple[str, ...]) -> Sequence[Any]:
        return [_value(data, name) for data, name in zip(found, names)]


def _samples(path: str) -> Iterator[tuple[int, str, Members]]:
    """Yield (byte where it begins, damage or "", files) of each sample, and a damaged one where a tar ends too early.

    Python's tarfile takes a damaged header after the first one for the end of the tar.
    """
    refuse_packed(path)
    start, key, members = 0, "", Members()
    why, twice, end = "", "", 0
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them
                found = re.match(r"((?:.*/|)[^./][^./]*)\.([^/]*)$", member.name, re.DOTALL)
                if not member.isreg() or found is None or _NOTES.match(member.name):
                    continue
                if member.sparse:  # type: ignore[attr-defined]
                    raise UserError(f"{path} holds {member.name} as a sparse file", "files that are stored whole",
                                    "make the tar without --sparse")
                if found[1] != key and members:
                    yield start, twice, members
                if found[1] != key:
                    start, key, members, twice = member.offset, found[1], {}, ""
                ending = found[2].lower()
                twice = twice or (f"the sample has two files that end in .{ending}" if ending in members else "")
                members[ending] = (member.offset_data, member.size)
            end = tar.offset  # type: ignore[attr-defined]
    except tarfile.TarError as error:
        end, why = os.path.getsize(path), str(error)
    if members:
        yield start, twice, members
    with open(path, "rb") as file:
        if os.pread(file.fileno(), _BLOCK, end) != bytes(_BLOCK):
            yield end, f"the tar is truncated or damaged here, and what follows cannot be read{why and f' ({why})'}", {}
            return
        file.seek(end)
        while piece := file.read(_PIECE):
            if piece.count(0) < len(piece):
                yield end, "the tar ends here, but not its file, as if another tar had been appended", {}
                return


def _member(members: Members, name: str) -> tuple[int, int] | None:
    endings = [*name.split(";"), name.partition(".")[0]] if name not in members else [name]
    return next((members[ending] for ending in endings if ending in members), None)


def _value(data: bytes, name: str) -> Any:
    """Return what a file holds: a number, text, a value in JSON, or bytes."""
    ending = name.partition(";")[0]
    inside = ending.partition(".")
    try:
        if ending in _NUMBERS:
            return int(data)
        if ending in _TEXTS:
            return data.decode()
        if inside[0] == "json":
            found = json.loads(data)
            return found.get(inside[2]) if inside[2] and isinstance(found, Mapping) else found
    except ValueError as error:  # UnicodeDecodeError is one
        raise Damage(f"its .{ending} cannot be read: {error}") from None
    return data
