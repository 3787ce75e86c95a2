"""Datasets and loaders of grain as sources and streams of numpy arrays.

Knows the package by the names of its classes. `hvdtrain.data.objects` puts samples together.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.objects import ObjectSource, stacked, tidy
from hvdtrain.data.rows import ColumnNames
from hvdtrain.data.stream import Arrays
from hvdtrain.data.stream_reading import chunk_sizes

_BATCHES = ("Batch", "Rebatch")
_OTHERS = ("FlatMap", "Pack", "FirstFit", "BestFit", "ConcatThenSplit", "Source", "Range")
"""Starts of class names whose elements are batches, and of those whose elements are not their parents'."""


def adapted(obj: Any, rows: ColumnNames, to_array: Callable[[Any], np.ndarray]) -> MapRows | GrainStream | None:
    """Return a dataset or loader of grain as a source or stream; None for anything else.

    A ``MapDataset`` of samples: a source. One of batches, or with a filter, an ``IterDataset`` and a ``DataLoader``: a
    stream. Errors: `UserError` for data without an end, and for a share of the data.
    """
    kinds = {base.__name__ for base in type(obj).__mro__ if base.__module__.partition(".")[0] == "grain"}
    if not kinds & {"MapDataset", "IterDataset", "DataLoader"}:
        return None
    chain = list(_nodes(getattr(obj, "_dataset", obj) if "DataLoader" in kinds else obj))
    _check_loader(obj)
    if any(_endless(node) for node in chain):
        raise UserError(f"the {type(obj).__qualname__} of grain has no end", "the elements of one epoch",
                        "leave .repeat() out, since the trainer repeats; or set num_epochs=1 in the sampler")
    batched = _is_batched(chain[0])
    if "MapDataset" not in kinds:
        return GrainStream(obj, batched, rows, to_array)
    if batched or any(type(node).__name__ == "FilterMapDataset" for node in chain):
        return GrainStream(obj.to_iter_dataset(), batched, rows, to_array)
    return None if rows.collate is not None else MapRows(obj, rows, to_array)


class MapRows(ObjectSource):
    """Samples of a ``MapDataset`` by number; each epoch has its own random numbers, as in ``dataset.repeat()``."""

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        return self.fetch_in(indices_n, 0)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        """Return the samples as they are in ``epoch``, the same in all of a class of the user's own."""
        known = all(type(node).__module__.startswith("grain.") for node in _nodes(self.samples))
        return super().fetch(indices_n + epoch * len(self.samples) if known else indices_n)


class GrainStream:
    """An ``IterDataset`` or ``DataLoader``: one iteration is one epoch, in the same order each time."""

    def __init__(self, data: Any, batched: bool, rows: ColumnNames, to_array: Callable[[Any], np.ndarray]) -> None:
        self.rows, self._data, self._batched, self._to_array = rows.for_source(), data, batched, to_array
        self._elements: Any = None
        self._begin: Any = None

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        self._elements = elements = iter(self._data)
        begin, self._begin = self._begin, None
        try:
            if begin is not None:
                elements.set_state(begin)
            for n in itertools.repeat(1) if self._batched else chunk_sizes():
                if not (chunk := list(itertools.islice(elements, n))):
                    return
                batch = chunk[0] if self._batched else stacked([tidy(sample) for sample in chunk])
                yield self.rows.arrays(batch, self._to_array)
        finally:
            self._elements = None
            getattr(elements, "close", int)()

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the latest chunk; None for the start."""
        return {"state": None if self._elements is None else self._elements.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch that is opened begin at ``state``."""
        self._begin = state["state"]


def _nodes(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is made of, outermost first."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _nodes(parent)


def _endless(node: Any) -> bool:
    kind = type(node).__name__
    if kind == "RepeatIterDataset":
        return getattr(node, "_num_epochs", 1) is None
    return hasattr(type(node), "__len__") and len(node) >= sys.maxsize


def _is_batched(node: Any) -> bool:
    """Return whether the elements are batches: some node makes them, and those after it keep what they get."""
    kind, parents = type(node).__name__, getattr(node, "parents", ())
    if kind.startswith(_BATCHES):
        return True
    return not kind.startswith(_OTHERS) and bool(parents) and all(map(_is_batched, parents))


def _check_loader(obj: Any) -> None:
    """Refuse a ``DataLoader`` that reads a share of its data."""
    shards = getattr(getattr(obj, "_shard_options", None), "shard_count", 1)
    if shards > 1:
        raise UserError(f"the DataLoader of grain reads one of {shards} shards",
                        "a loader of the whole data on every rank",
                        "give it shard_options=grain.sharding.NoSharding(): the trainer divides each global batch")
