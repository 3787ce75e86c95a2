"""``jsonl``: files of JSON lines, one object a sample, read by line through an index of offsets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.cells import Damage
from hvdtrain.data.formats import ShardFormat, read_at, source_of
from hvdtrain.data.index import Index, refuse_packed
from hvdtrain.data.sources import Source

_PIECE = 1 << 22  # bytes that are searched for ends of lines at a time
_BLANK = 2  # longest line that is looked at for being blank: a carriage return and a blank


def make(split: str, **args: Any) -> Source | None:
    """Return the samples of JSON lines: x and y are numbers or lists; `hvdtrain.data.formats.FileOptions`."""
    return source_of(JsonlFormat(), split, args)


class JsonlFormat(ShardFormat):
    """Lines of JSON objects. A place: the byte where the line begins, its length."""

    kind, endings = "jsonl", "JSON lines, such as 'DIR/*.jsonl'"

    def names(self, path: str) -> list[str]:
        refuse_packed(path)
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    return list(_row(line))
        return []

    def scan(self, path: str, names: tuple[str, ...], target: Path) -> Index:
        refuse_packed(path)
        ends, size, last = [np.zeros(1, np.int64)], 0, b"\n"
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == 10) + (size + 1))
                size, last = size + len(piece), piece[-1:]
            if last != b"\n":
                ends.append(np.array([size]))
            bounds = np.concatenate(ends)
            places_nk = np.stack([bounds[:-1], np.diff(bounds)], axis=1)
            short = np.flatnonzero(places_nk[:, 1] <= _BLANK).tolist()
            blank = [i for i in short if not read_at(file, *map(int, places_nk[i])).strip()]
        return Index(np.delete(places_nk, blank, axis=0))

    def values(self, found: bytes, names: tuple[str, ...]) -> Sequence[Any]:
        row = _row(found)
        return [row.get(name) for name in names]


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise Damage(f"it is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise Damage(f"it is a JSON {type(row).__name__}, not an object with names")
    return row
