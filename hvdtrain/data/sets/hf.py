"""``hf``: rows of a dataset of the package ``datasets``: a folder of ``save_to_disk``, or files that it reads."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import absolute, not_installed
from hvdtrain.data.cells import Damage, columns_of
from hvdtrain.data.formats import FileOptions, FormatSource, listed
from hvdtrain.data.index import Stamp, changed
from hvdtrain.data.sets.parquet import value_of
from hvdtrain.data.sources import ALL, Source

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
"""Endings of files -> builders of ``datasets``."""
_ENDINGS = f"a folder that save_to_disk wrote, or files that end in {', '.join(BUILDERS)}"


def make(split: str, **args: Any) -> Source | None:
    """Return rows of ``files``: a folder of ``save_to_disk``, or files that ``datasets.load_dataset`` reads.

    A folder of a ``DatasetDict`` has its own test split: "validation", else "test". ``cache``: that of ``datasets``.
    """
    options = FileOptions.of("hf", args)
    part = options.part(split)
    found = _loaded(options.files, "files", options)
    own = None
    if isinstance(found, Mapping):
        if "train" not in found:
            raise UserError(f"{options.files} has the splits {', '.join(found)}", "a split train", "save one")
        found, own = found["train"], found.get("validation", found.get("test"))
    names = columns_of(found.column_names, options.x, options.y, options.weight, str(options.files))
    if split == "test" and own is not None and part is None:
        return ArrowRows(own, options, ALL, names)
    if part is None or split == ALL and own is not None:
        return None
    if part[1] == "test":
        found = _loaded(options.test, "test", options)
    return ArrowRows(found, options, split, names)


def _loaded(files: Any, key: str, options: FileOptions) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise not_installed("data.name hf", "datasets", "datasets") from None
    folder = absolute(Path(files).expanduser()) if isinstance(files, (str, os.PathLike)) else Path()
    try:
        if isinstance(files, (str, os.PathLike)) and folder.is_dir():
            return datasets.load_from_disk(str(folder))
        paths = listed(files, key, _ENDINGS, options)
        endings = {os.path.splitext(path)[1] for path in paths}
        builder = BUILDERS.get(min(endings)) if len(endings) == 1 else None
        if builder is None:
            raise UserError(f"data.args.{key} means files that end in {', '.join(sorted(endings))}",
                            nearest(min(endings), list(BUILDERS)), f"correct data.args.{key}")
        with _without_bars(datasets):
            return datasets.load_dataset(builder, data_files=paths, split="train", cache_dir=options.cache or None)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        said = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"data.args.{key} {files} cannot be loaded by datasets: {said}", _ENDINGS,
                        f"correct data.args.{key}") from None


@contextlib.contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """Keep ``datasets`` from showing progress bars of every rank."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


class ArrowRows(FormatSource):
    """Rows of a `datasets.Dataset`, whose Arrow files each process maps."""

    def __init__(self, dataset: Any, options: FileOptions, split: str, names: Sequence[str]) -> None:
        self._dataset = dataset.select_columns(list(names)).with_format("arrow")
        self._names = tuple(names)
        self._paths = [str(each["filename"]) for each in dataset.cache_files]
        self._stamps = [Stamp.of(path) for path in self._paths]
        super().__init__(options, split, len(dataset), names)

    def _values(self, rows_n: np.ndarray) -> Iterator[tuple[int, Sequence[Any] | Damage]]:
        try:
            table = self._dataset[rows_n.tolist()]
        except OSError as error:
            self._check(0)
            raise UserError(f"{self._paths[0]} cannot be read: {error}", "the files as they were at the start",
                            "put them back") from None
        columns = [table.column(name) for name in self._names]
        for at in range(len(rows_n)):
            yield at, [value_of(column[at]) for column in columns]
        self._check(0)

    def _place(self, row: int) -> str:
        return f"row {row} of {self._paths[0] if self._paths else 'the dataset'}"

    def _check(self, row: int) -> None:
        for path, stamp in zip(self._paths, self._stamps):
            if Stamp.of(path) != stamp:
                raise changed(path)
