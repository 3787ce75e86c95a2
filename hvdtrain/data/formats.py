"""Read samples by number from the shards of a format: `FileOptions` of ``data.args``, files, splits, damage, changes.

Owns what tars, TFRecords, JSON lines, Parquet and `datasets` have in common. `hvdtrain.data.cells` makes arrays of
values; the formats are in `hvdtrain.data.sets`.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import absolute, is_url
from hvdtrain.data import downloads
from hvdtrain.data.cells import PARTS, Cells, Damage, columns_of
from hvdtrain.data.index import Index, Stamp, changed, indexes
from hvdtrain.data.rows import ColumnNames
from hvdtrain.data.sources import ALL, Source, Unreadable, chosen
from hvdtrain.data.stream import Arrays
from hvdtrain.planning.batch.sampler import at_least

_TRIED = 100  # samples that are tried for the types of all, should the first ones be unreadable
_MOST_OPEN = 64  # files that a process keeps open


@dataclass(frozen=True)
class FileOptions:
    """Hold ``data.args`` of the formats that read files by ``files``.

    ``files``: a path or pattern (``DIR/*.tar``, ``{000..099}``), or a list of them; ``test``: the same for testing,
    else ``test_fraction`` of the samples, chosen by ``seed``; neither: no evaluation. ``x``, ``y``, ``weight``:
    columns. ``cache``: folder of indexes and downloads, the latter up to ``cache_gib``. ``size``, ``channels``,
    ``mean``, ``std``, ``layout``: of pictures, as of the set ``folder``. ``shape``, ``dtype``: of x without pictures.
    ``y_dtype``: of y.
    """

    files: Any = ""
    x: str = ""
    y: str = ""
    weight: str = ""
    test: Any = ""
    test_fraction: float = 0.0
    seed: int = 0
    cache: str = ""
    cache_gib: float = 100.0
    size: Any = 0
    channels: int = 3
    mean: Any = None
    std: Any = None
    layout: str = "channels_last"
    shape: Any = None
    dtype: str = ""
    y_dtype: str = ""

    @classmethod
    def of(cls, kind: str, args: Mapping[str, Any]) -> FileOptions:
        """Return ``args`` of the set ``kind``; `UserError` for an unknown one and without ``files``."""
        known = [each.name for each in fields(cls)]
        for arg in args:
            if arg not in known:
                raise UserError(f"{kind} takes no argument {arg!r}", nearest(arg, known), "correct data.args")
        made = cls(**args)
        if not made.files:
            raise UserError(f"{kind} needs the argument 'files'", "a path or a pattern such as 'DIR/*.tar'",
                            "set data.args.files")
        for name in (*PARTS, "cache"):
            if not isinstance(getattr(made, name), str):
                raise UserError(f"data.args.{name} is {getattr(made, name)!r}", "text", f"correct data.args.{name}")
        if made.test and made.test_fraction:
            raise UserError("data.args has test and test_fraction", "one of them", "remove the other")
        at_least("data.args.seed", made.seed, 0)
        if not isinstance(made.cache_gib, (int, float)) or isinstance(made.cache_gib, bool) or made.cache_gib <= 0:
            raise UserError(f"data.args.cache_gib is {made.cache_gib!r}", "a number of GiB above 0",
                            "correct data.args.cache_gib")
        return made

    def cells(self) -> Cells:
        return Cells(self.size, self.channels, self.mean, self.std, self.layout, self.shape, self.dtype,
                     self.y_dtype)

    def part(self, split: str) -> tuple[Any, str] | None:
        """Return (files, key) of ``split``, None where there is no such split."""
        if split == "test" and not (self.test or self.test_fraction) or split == ALL and self.test:
            return None
        return (self.test, "test") if split == "test" and self.test else (self.files, "files")


def listed(files: Any, key: str, endings: str, options: FileOptions) -> list[str]:
    """Return the files that ``data.args.files`` (or another ``key``) means, sorted; ``endings`` in words.

    Errors: `UserError` where a pattern means none.
    """
    found: set[str] = set()
    for pattern in files if isinstance(files, (list, tuple)) else [files]:
        if not isinstance(pattern, (str, os.PathLike)) or not os.fspath(pattern):
            raise UserError(f"data.args.{key} is {files!r}", "a path, a pattern, or a list of them",
                            f"correct data.args.{key}")
        for each in braces(os.fspath(pattern)):
            if is_url(each):
                found.update(downloads.local_copies(each, key, options.cache, options.cache_gib))
                continue
            path = str(absolute(os.path.expanduser(each)))
            there = [path] if os.path.isfile(path) else [one for one in glob.glob(path, recursive=True)
                                                         if os.path.isfile(one)]
            if not there:
                raise UserError(f"no file is {each}, of data.args.{key}", endings, f"correct data.args.{key}")
            found.update(there)
    return sorted(found)


def braces(pattern: str) -> list[str]:
    """Return a pattern with ``{000..012}`` and ``{a,b}`` spelled out, as shells and webdataset do.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    parts = []
    for part in re.split(r"(\{[^{}]*(?:\.\.|,)[^{}]*\})", pattern):
        span = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part)
        if span:
            low, high = int(span[1]), int(span[2])
            parts.append([f"{i:0{len(span[1])}d}" for i in range(low, high + 1)])
        else:
            parts.append(part[1:-1].split(",") if part.startswith("{") and part.endswith("}") else [part])
    return ["".join(each) for each in itertools.product(*parts)]


class FormatSource:
    """Read samples of a format by number.

    A subclass reads rows in `_values` and names their place in `_place`; each process that unpickles it calls `_open`.
    """

    fixed = True

    def __init__(self, options: FileOptions, split: str, n: int, names: Sequence[str]) -> None:
        if n == 0:
            raise UserError(f"data.args.files is {options.files!r}, which holds no sample", "at least one",
                            "correct data.args.files")
        self._cells, self._chosen = options.cells(), None
        if split != ALL and options.test_fraction:
            if n < 2:
                raise UserError("data.args.test_fraction with one sample", "at least 2 to hold one out", "remove it")
            self._chosen = np.flatnonzero(chosen(np.zeros(n, np.int8), options.test_fraction, options.seed, split))
        self._n = n if self._chosen is None else len(self._chosen)
        self.rows = ColumnNames()
        self.rows.note = "data: " + ", ".join(f"{part} is {name}" for part, name in zip(PARTS, names))
        self._open()
        self._learn(n, options)

    def _learn(self, n: int, options: FileOptions) -> None:
        """Take types and shapes from the first sample that can be read; raise the first `Unreadable` where none can."""
        failed: list[Unreadable] = []
        for row in range(min(n, _TRIED)):
            try:
                _, values = next(iter(self._values(np.array([row]))))
                self._cells.learn(_readable(values))
                break
            except Damage as damage:
                failed.append(Unreadable(row, self._place(row), str(damage)))
        else:
            raise failed[0]
        if self._cells.pictures:
            self.scale = self._cells.scale
            return
        for name in ("size", "mean", "std"):
            if getattr(options, name) not in (0, None):
                raise UserError(f"data.args.{name} is {getattr(options, name)!r}, and x is no picture",
                                "pictures, which alone are scaled and normalised", f"leave data.args.{name} out")

    def _open(self) -> None:
        """Make what no pickle holds."""
        self._lock = threading.Lock()
        self._files: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_files")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            file.close()

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        indices_n = np.asarray(indices_n)
        rows_n = indices_n if self._chosen is None else self._chosen[indices_n]
        samples: list[Any] = [None] * len(rows_n)
        with self._lock:
            for at, values in self._values(rows_n):
                row = int(rows_n[at])
                try:
                    samples[at] = self._cells.sample(_readable(values), partial(self._place, row))
                except Damage as damage:
                    self._check(row)
                    raise Unreadable(int(indices_n[at]), self._place(row), str(damage)) from None
        return self._cells.batch(samples)

    def _values(self, rows_n: np.ndarray) -> Iterator[tuple[int, Sequence[Any] | Damage]]:
        """Yield (position in ``rows_n``, values of that row), in any order."""
        raise NotImplementedError

    def _place(self, row: int) -> str:
        """Return the file of a row and the place in it."""
        raise NotImplementedError

    def _check(self, row: int) -> None:
        """Raise `UserError` where the file of a row has changed since the start."""


def _readable(values: Sequence[Any] | Damage) -> Sequence[Any]:
    if isinstance(values, Damage):
        raise values
    return values


class ShardFormat:
    """A format of shards. ``kind``: its name; ``endings``: what files it reads, in words. A pickle holds no state.

    A place is int64 (k,): the byte where the sample begins, -1 or what else the format needs, and more; -1 second:
    the sample is damaged.
    """

    kind: ClassVar[str]
    endings: ClassVar[str]

    def names(self, path: str) -> list[str]:
        """Return the columns of the first sample; [] for a shard without samples. `Damage`: it cannot be read."""
        raise NotImplementedError

    def scan(self, path: str, names: tuple[str, ...], target: Path) -> Index:
        """Return the index of a shard, which ``target`` will keep."""
        raise NotImplementedError

    def open(self, path: str, target: Path) -> Any:
        """Return what `values` reads from."""
        return open(path, "rb", buffering=0)

    def read(self, file: Any, place_k: Sequence[int]) -> Any:
        """Return what a file holds of one sample. `Damage`: it cannot be read."""
        return read_at(file, place_k[0], place_k[1])

    def values(self, found: Any, names: tuple[str, ...]) -> Sequence[Any]:
        """Return the values of a sample that `read` has returned. `Damage`: it is none."""
        raise NotImplementedError

    def identity(self, names: tuple[str, ...]) -> str:
        """Return what an index depends on."""
        return self.kind

    def fits(self, index: Index, target: Path) -> bool:
        """Return whether what `scan` has written beside the index is there."""
        return True


def source_of(form: ShardFormat, split: str, args: Mapping[str, Any]) -> Source | None:
    """Return the samples of ``split`` in the files of ``data.args``; None where there is no such split."""
    options = FileOptions.of(form.kind, args)
    part = options.part(split)
    if part is None:
        return None
    paths = listed(*part, form.endings, options)
    first = paths if part[1] == "files" else listed(options.files, "files", form.endings, options)
    return ShardSource(form, paths, options, split, _names(form, first, options))


def _names(form: ShardFormat, paths: Sequence[str], options: FileOptions) -> tuple[str, ...]:
    why = "no sample"
    for path in paths:
        try:
            if found := form.names(path):
                return columns_of(found, options.x, options.y, options.weight, path)
        except Damage as damage:
            why = f"no readable sample: {damage}"
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}", "a file that can be",
                            "correct data.args.files") from None
    raise UserError(f"{paths[0]} holds {why}", form.endings, "correct data.args.files")


class ShardSource(FormatSource):
    """Read samples of files that `hvdtrain.data.index` has indexed. Errors: `UserError` for a file that has changed."""

    def __init__(self, form: ShardFormat, paths: list[str], options: FileOptions, split: str,
                 names: tuple[str, ...]) -> None:
        self._form, self._paths, self._names = form, paths, names
        self._stamps = [Stamp.of(path) for path in paths]
        found, self._targets = indexes(paths, self._stamps, form.identity(names), options.cache,
                                       lambda path, target: form.scan(path, names, target), form.fits)
        self._damaged = {shard: index.damaged for shard, index in enumerate(found) if index.damaged}
        self._ends = np.cumsum([len(index.places_nk) for index in found])
        self._places = np.concatenate([index.places_nk for index in found])
        super().__init__(options, split, len(self._places), names)

    def _values(self, rows_n: np.ndarray) -> Iterator[tuple[int, Sequence[Any] | Damage]]:
        """Yield rows in the order of the files, each of which is checked after it was read."""
        shards_n = np.searchsorted(self._ends, rows_n, side="right")
        order = np.argsort(rows_n, kind="stable").tolist()
        places = self._places[rows_n].tolist()
        for shard, group in itertools.groupby(order, lambda at: int(shards_n[at])):
            file = self._file(shard)
            read = [(at, self._read(shard, file, places[at])) for at in group]
            self._check_shard(shard)
            for at, found in read:
                yield at, self._parsed(found)

    def _read(self, shard: int, file: Any, place_k: list[int]) -> Any:
        if place_k[1] < 0:
            return Damage(self._damaged[shard][place_k[0]])
        try:
            return self._form.read(file, place_k)
        except Damage as damage:
            return damage
        except OSError as error:
            return Damage(error.strerror or str(error))

    def _parsed(self, found: Any) -> Sequence[Any] | Damage:
        if isinstance(found, Damage):
            return found
        try:
            return self._form.values(found, self._names)
        except Damage as damage:
            return damage

    def _file(self, shard: int) -> Any:
        """Return the open file of a shard; the `_MOST_OPEN` used last stay open."""
        file = self._files.get(shard)
        if file is None:
            self._check_shard(shard)
            try:
                file = self._files[shard] = self._form.open(self._paths[shard], self._targets[shard])
            except OSError as error:
                raise UserError(f"{self._paths[shard]} cannot be read: {error.strerror or error}",
                                "the file as it was at the start of the run", "put it back") from None
            if len(self._files) > _MOST_OPEN:
                _, oldest = self._files.popitem(last=False)
                oldest.close()
        self._files.move_to_end(shard)
        return file

    def _place(self, row: int) -> str:
        return f"{self._paths[np.searchsorted(self._ends, row, side='right')]}, byte {self._places[row, 0]}"

    def _check(self, row: int) -> None:
        self._check_shard(int(np.searchsorted(self._ends, row, side="right")))

    def _check_shard(self, shard: int) -> None:
        if Stamp.of(self._paths[shard]) != self._stamps[shard]:
            raise changed(self._paths[shard])


def read_at(file: Any, offset: int, n: int) -> bytes:
    """Return ``n`` bytes from ``offset`` of a file. `Damage`: it ends before."""
    found = os.pread(file.fileno(), n, offset)
    while 0 < len(found) < n and (more := os.pread(file.fileno(), n - len(found), offset + len(found))):
        found += more  # Linux reads at most 2 GiB at once
    if len(found) < n:
        raise Damage(f"the file ends {n - len(found)} bytes before the sample does")
    return found
