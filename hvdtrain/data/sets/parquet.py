"""``parquet``: rows of Parquet files. The columns of x and y are unpacked once to Arrow files, which processes map.

Parquet decodes whole row groups, so a shuffled order would decode each group as often as it has rows.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import not_installed
from hvdtrain.core.units import GIB, format_bytes
from hvdtrain.data.formats import FileOptions, ShardFormat, source_of
from hvdtrain.data.index import Index, Stamp
from hvdtrain.data.sources import Source

CHECKED_PIECES, PIECE_BYTES = 16, 1 << 14
"""Pieces of an Arrow file that each process reads before it is used: all of up to 256 KiB, else a sample."""


def make(split: str, **args: Any) -> Source | None:
    """Return the rows of Parquet files; x and y are columns; `hvdtrain.data.formats.FileOptions`."""
    pyarrow("parquet")
    return source_of(ParquetFormat(FileOptions.of("parquet", args).cache_gib), split, args)


def pyarrow(kind: str) -> Any:
    """Return pyarrow; `UserError` where it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError:
        raise not_installed(f"data.name {kind}", "pyarrow", "parquet") from None


class ParquetFormat(ShardFormat):
    """Rows of Parquet files. A place: the byte where the row group begins, the Arrow file's batch, the row in it.

    ``most_gib``: of all Arrow files in a folder of indexes.
    """

    kind, endings = "parquet", "Parquet files, such as 'DIR/*.parquet'"

    def __init__(self, most_gib: float) -> None:
        self._most = int(most_gib * GIB)

    def names(self, path: str) -> list[str]:
        with _opened(path) as file:
            return list(file.schema_arrow.names) if file.metadata.num_rows else []

    def identity(self, names: tuple[str, ...]) -> str:
        return f"{self.kind} {' '.join(names)}"

    def scan(self, path: str, names: tuple[str, ...], target: Path) -> Index:
        arrow = pyarrow("parquet")
        with _opened(path) as parquet, whole_file(_unpacked(target)) as draft:
            lacking = [name for name in names if name not in parquet.schema_arrow.names]
            if lacking:
                raise UserError(f"{path} has no column {lacking[0]!r}", "the same columns in all files",
                                "correct data.args.files")
            schema = arrow.schema([parquet.schema_arrow.field(name) for name in names])
            places, damaged, batches = [np.zeros((0, 3), np.int64)], dict[int, str](), 0
            used = _bytes_beside(target)
            with arrow.OSFile(str(draft), "wb") as out, arrow.ipc.new_file(out, schema) as writer:
                for group in range(parquet.num_row_groups):
                    meta = parquet.metadata.row_group(group)
                    start, n = _start(meta), meta.num_rows
                    try:
                        table = parquet.read_row_group(group, columns=list(names)).select(list(names)).combine_chunks()
                    except (OSError, arrow.ArrowException) as error:
                        if isinstance(error, MemoryError) or getattr(error, "errno", None):
                            raise  # of this host and this moment, which no index may keep as damage
                        damaged[start] = f"row group {group} cannot be read: {' '.join(str(error).split())[:200]}"
                        places.append(np.tile(np.array([start, -1, 0]), (n, 1)))
                        continue
                    used += table.nbytes
                    if used > self._most:
                        raise _too_large(path, target.parent, used, self._most)
                    for batch in table.to_batches():
                        writer.write_batch(batch)
                        places.append(np.stack([np.full(len(batch), start), np.full(len(batch), batches),
                                                np.arange(len(batch))], axis=1))
                        batches += 1
        kept = Stamp.of(str(_unpacked(target)))
        return Index(np.concatenate(places), damaged, {"size": kept.size, "mtime_ns": kept.mtime_ns,
                                                       "crc32": _checksum(_unpacked(target))})

    def fits(self, index: Index, target: Path) -> bool:
        try:
            return (Stamp.of(str(_unpacked(target))) == Stamp(index.more["size"], index.more["mtime_ns"])
                    and _checksum(_unpacked(target)) == index.more["crc32"])
        except (UserError, OSError, KeyError):
            return False

    def open(self, path: str, target: Path) -> Any:
        return MappedArrow(_unpacked(target))

    def read(self, file: Any, place_k: Sequence[int]) -> list[Any]:
        _, batch, row = place_k
        return [column[row] for column in file.columns(batch)]

    def values(self, found: list[Any], names: tuple[str, ...]) -> Sequence[Any]:
        return [value_of(scalar) for scalar in found]


class MappedArrow:
    """Columns of an Arrow file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        arrow = pyarrow("parquet")
        self._map = arrow.memory_map(str(path))
        self._file = arrow.ipc.open_file(self._map)
        self._columns: dict[int, list[Any]] = {}

    def columns(self, batch: int) -> list[Any]:
        """Return the columns of a batch."""
        if batch not in self._columns:
            self._columns[batch] = self._file.get_batch(batch).columns
        return self._columns[batch]

    def close(self) -> None:
        self._columns.clear()  # the map ends with the last value that is in use


def value_of(scalar: Any) -> Any:
    """Return a scalar of pyarrow as bytes, an array, a number, or a dict of these; None for null."""
    if not scalar.is_valid:
        return None
    inner = getattr(scalar, "values", None)
    if callable(inner) or inner is None:  # of a struct, whose values are a view
        extension = getattr(scalar, "value", None)
        return _shaped(value_of(extension), scalar.type) if hasattr(extension, "is_valid") else scalar.as_py()
    if hasattr(inner, "type") and not hasattr(inner.type, "value_type") and not inner.null_count:
        return np.asarray(inner)
    return scalar.as_py()


def _shaped(value: Any, kind: Any) -> Any:
    """Return the flat values of a tensor in its fixed shape; the conversion of pyarrow ignores permutations."""
    shape = getattr(kind, "shape", None)
    if not isinstance(value, np.ndarray) or not shape:
        return value
    return value.reshape(shape).transpose(getattr(kind, "permutation", None) or range(len(shape)))


def _unpacked(target: Path) -> Path:
    return target.with_suffix(".arrow")


def _bytes_beside(target: Path) -> int:
    """Return the bytes of the other Arrow files in the folder, drafts of other processes too."""
    found = 0
    for each in target.parent.glob("*.arrow*"):
        with contextlib.suppress(OSError):  # another process replaces it
            found += each.stat().st_size if _unpacked(target).name not in each.name else 0
    return found


def _too_large(path: str, folder: Path, used: int, most: int) -> UserError:
    return UserError(f"the Arrow files in {folder} take {format_bytes(used)} and more with the columns of {path}, and "
                     f"data.args.cache_gib allows {format_bytes(most)}",
                     "room for all of them, since samples are read in random order",
                     "raise data.args.cache_gib, name fewer columns, or remove Arrow files of other data there")


def _checksum(path: Path) -> int:
    """Return a checksum of `CHECKED_PIECES` pieces spread over a file, its start and end among them."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for at in np.linspace(0, max(0, size - PIECE_BYTES), CHECKED_PIECES).astype(int).tolist():
            file.seek(at)
            crc = zlib.crc32(file.read(PIECE_BYTES), crc)
    return crc


def _opened(path: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile`. `UserError`: it is none, or its list of row groups is damaged."""
    arrow = pyarrow("parquet")
    try:
        return importlib.import_module("pyarrow.parquet").ParquetFile(path, page_checksum_verification=True)
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}", "a Parquet file",
                        "fix or remove it") from None


def _start(meta: Any) -> int:
    """Return the byte where a row group begins."""
    column = meta.column(0)
    found = [at for at in (column.dictionary_page_offset, column.data_page_offset) if at]
    return min(found) if found else 0
