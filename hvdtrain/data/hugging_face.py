"""A ``datasets.Dataset`` as a source: rows by index, columns by name, memory-mapped as they are on disk.

Knows the package by the names of its classes. `hvdtrain.data.collate` has rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.collate import Collated
from hvdtrain.data.rows import ColumnNames
from hvdtrain.data.stream import Arrays
from hvdtrain.data.stream_reading import files_identity

OWN_FORMAT = "custom"
"""Format of a dataset with a transform of the user's, which makes the columns when they are read."""


def adapted(obj: Any, seed: int, rows: ColumnNames,
            to_array: Callable[[Any], np.ndarray]) -> DatasetRows | Collated | None:
    """Return a dataset as a source, collated where ``rows`` has a collator; None for anything else."""
    if not any((c.__module__, c.__name__) == ("datasets.arrow_dataset", "Dataset") for c in type(obj).__mro__):
        return None
    return DatasetRows(obj, rows, to_array) if rows.collate is None else Collated(obj, rows, seed, to_array)


_BY_SAMPLE = {"ExamplesIterable", "ArrowExamplesIterable", "RebatchedArrowExamplesIterable", "SelectColumnsIterable",
              "MappedExamplesIterable", "FilteredExamplesIterable", "BufferShuffledExamplesIterable",
              "InterleavedShardsExamplesIterable", "FormattedExamplesIterable", "RepeatExamplesIterable"}
"""Stages of a ``datasets.IterableDataset`` that give the same samples whichever files they are given together."""


def files_of(dataset: Any) -> int:
    """Return how many files of a stream its ``shard(num_shards, index)`` can divide without a change of its samples.

    0 for a ``datasets.IterableDataset`` with ``take``, ``skip``, a batched map or indices, or divided already.
    """
    if not any((c.__module__, c.__name__) == ("datasets.iterable_dataset", "IterableDataset")
               for c in type(dataset).__mro__):
        return int(getattr(dataset, "num_shards", 0)) if callable(getattr(dataset, "shard", None)) else 0
    stage = getattr(dataset, "_ex_iterable", None)
    if stage is None or getattr(dataset, "_distributed", None) is not None:
        return 0
    while stage is not None:
        across = (getattr(stage, name, False) for name in ("batched", "with_indices", "drop_last_batch"))
        if type(stage).__name__ not in _BY_SAMPLE or any(across):
            return 0
        stage = getattr(stage, "ex_iterable", None)
    return int(getattr(dataset, "num_shards", 0))


_OF_USER = {"MappedExamplesIterable", "FilteredExamplesIterable"}
"""Stages that call a function of the user's, which may ask for the rank, draw numbers or read other files."""

_OF_FILES = {f"datasets.packaged_modules.{kind}.{kind}" for kind in ("arrow", "csv", "json", "parquet", "text")}
"""Modules whose samples the listed files and the configuration determine; that of generators is none of these."""


def identity_of(dataset: Any) -> str:
    """Return a text that ranks with the same samples in the same order share; "" where only reading can tell.

    Known of a ``datasets.IterableDataset`` that reads files by the package itself, without a function of the user's.
    """
    stage = getattr(dataset, "_ex_iterable", None)
    if stage is None or not files_of(dataset) or getattr(dataset, "_starting_state_dict", None) is not None:
        return ""
    facts: list[Any] = [repr(getattr(dataset, name, None)) for name in ("_formatting", "features")]
    while (inner := getattr(stage, "ex_iterable", None)) is not None:
        if type(stage).__name__ in _OF_USER:
            return ""
        facts += [type(stage).__name__, {name: value for name, value in vars(stage).items()
                                         if name != "ex_iterable" and "state_dict" not in name}]
        stage = inner
    reader = getattr(stage, "generate_tables_fn", None) or getattr(stage, "generate_examples_fn", None)
    module, settings = getattr(reader, "__module__", ""), repr(getattr(getattr(reader, "__self__", None), "config", ""))
    files = files_identity(_texts(stage.kwargs)) if module in _OF_FILES else ""
    if not files or " at 0x" in settings:  # of a function of the user's
        return ""
    from datasets.fingerprint import Hasher

    facts += [module, settings, files]
    return str(Hasher.hash(facts))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within dicts, lists and tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


class DatasetRows:
    """Columns of numbers of a ``datasets.Dataset``; those of text, and those that the model does not take, are left
    out. A pickle of it names the Arrow files, which each process maps. ``of_user``: a function of the user's makes
    the columns, which may draw random numbers.
    """

    def __init__(self, dataset: Any, rows: ColumnNames, to_array: Callable[[Any], np.ndarray]) -> None:
        self.rows, self._to_array = rows.for_source(), to_array
        shown = dataset.format["columns"]
        taken = [name for name in shown if not _is_text(dataset.features[name])
                 and (not rows.columns or name in rows.columns)]
        self.of_user = own = dataset.format["type"] == OWN_FORMAT
        if not taken and not own:
            raise UserError(f"the dataset has the columns {', '.join(shown)}, of which the model takes none",
                            "columns of numbers" + (" that the model takes, such as input_ids" if rows.columns else ""),
                            "tokenize texts first: dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), "
                            "batched=True)")
        self._left_out = [] if own else [name for name in shown if name not in taken]
        self._dataset = dataset if own else dataset.with_format("numpy", columns=taken)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        batch = self._dataset[indices_n.tolist()]
        found = self.rows.arrays({name: self._column(name, values) for name, values in batch.items()}, self._to_array)
        if self._left_out and "left out" not in self.rows.note:
            self.rows.note += f"{'; ' if self.rows.note else 'data: '}left out: {', '.join(self._left_out)}"
        return found

    @staticmethod
    def _column(name: str, values: Any) -> Any:
        ragged = isinstance(values, np.ndarray) and values.dtype.hasobject
        if ragged or isinstance(values, list) and len({np.shape(value) for value in values}) > 1:
            raise UserError(f"rows of the column {name!r} have different lengths",
                            "rows of one length, or a data collator",
                            "give fit(collate=...) or data.collate such as transformers.DataCollatorWithPadding("
                            "tokenizer), or pad in dataset.map")
        return np.stack(values) if isinstance(values, list) and isinstance(values[0], np.ndarray) else (
            np.asarray(values) if isinstance(values, list) and np.isscalar(values[0]) else values)


def _is_text(feature: Any) -> bool:
    """Return whether a column holds strings, or lists of strings."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    return getattr(feature, "dtype", "") in ("string", "large_string")
