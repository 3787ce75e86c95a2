"""Read a user's own objects by number: anything with ``__len__`` and ``__getitem__``, whose items are samples or, of
Keras' ``PyDataset``, batches.

Owns which objects these are and how single samples become arrays. Names of columns are `hvdtrain.data.rows`'; the
backends' ``data.py`` convert tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.rows import ColumnNames, by_field
from hvdtrain.data.sources import is_array, refuse_strings
from hvdtrain.data.stream import Arrays

_FRAMEWORKS = ("keras", "tf_keras", "tensorflow", "torch")
_OF_BATCHES, _IN_ORDER = {"PyDataset", "Sequence"}, {"IterableDataset"}
"""Classes of frameworks that are indexed but hold no samples by number: batches, or nothing by number."""

_FEWEST = 4
"""Fewest samples of a list: two or three elements are (train, test), (x, y) or (x, y, sample_weight)."""


def indexed(obj: Any) -> bool:
    """Return whether ``obj`` gives samples by number. Errors: `UserError` for objects that give columns."""
    kind = type(obj)
    if isinstance(obj, list):
        return len(obj) >= _FEWEST and _is_row(obj[0])
    if isinstance(obj, (str, bytes, bytearray, memoryview, tuple, Mapping, type)) or is_array(obj) or not (
            hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        return False
    if _own(kind) & (_IN_ORDER | _OF_BATCHES):
        return False
    if hasattr(obj, "keys") or hasattr(obj, "columns"):
        raise UserError(f"the data is a {kind.__module__}.{kind.__qualname__}, which is indexed by column",
                        "samples by number, or a dict of arrays",
                        "convert it, such as {name: numpy.asarray(table[name]) for name in names}")
    return True


def of_batches(obj: Any) -> bool:
    """Return whether ``obj`` is a dataset of Keras, whose items are batches."""
    return bool(_own(type(obj)) & _OF_BATCHES)


def _own(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] in _FRAMEWORKS}


class PyDatasetStream:
    """A `keras.utils.PyDataset`: its items 0 .. num_batches-1 are one epoch, read by one thread in this process.

    `on_epoch_begin` is called before an epoch and `on_epoch_end` once between two epochs, as Keras does; a resumed run
    calls `on_epoch_end` once for every epoch that is behind it. ``workers`` and ``use_multiprocessing`` are not used.
    """

    def __init__(self, dataset: Any, rows: ColumnNames, to_array: Callable[[Any], np.ndarray]) -> None:
        self.dataset, self.rows, self._to_array = dataset, rows.for_source(), to_array
        self.epochs_behind = self._begin = self._next = 0
        if self._batches() is None:
            raise UserError("the PyDataset has no end: num_batches is None", "a finite number of batches",
                            "return the batches of one epoch from __len__")

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        """Yield the items of ``epoch``; an epoch that is behind already is read as the dataset stands now."""
        while self.epochs_behind < epoch:
            self.dataset.on_epoch_end()
            self.epochs_behind += 1
        getattr(self.dataset, "on_epoch_begin", int)()
        self._next, self._begin = self._begin, 0
        while self._next < self._batches():
            self._next += 1
            yield self.rows.arrays(self.dataset[self._next - 1], self._to_array)

    def state_dict(self) -> dict[str, int]:
        """Return the place after the latest chunk."""
        return {"batch": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Have the next epoch that is opened begin at ``state``."""
        self._begin = state["batch"]

    def _batches(self) -> Any:
        return self.dataset.num_batches if hasattr(self.dataset, "num_batches") else len(self.dataset)


class ObjectSource:
    """Samples of a user's object, stacked as numpy arrays; ``to_array`` converts one stacked column.

    A sample is what `hvdtrain.data.rows.ColumnNames` takes. Python floats become float32, integers int64.
    """

    of_user = True

    def __init__(self, samples: Any, rows: ColumnNames, to_array: Callable[[Any], np.ndarray] = np.asarray) -> None:
        self.samples, self.rows, self._to_array = samples, rows.for_source(), to_array
        self._types: list[np.dtype] = []

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        rows = [tidy(self.samples[i]) for i in indices_n.tolist()]
        arrays = self.rows.arrays(stacked(rows), self._to_array)
        refuse_other_types(self._types, arrays)
        return arrays


def refuse_other_types(types: list[np.dtype], arrays: Arrays) -> None:
    """Keep the types of the first arrays in ``types``; raise `UserError` for arrays of others.

    Else the type of a batch would depend on the samples in it: of whole numbers, or of floats too.
    """
    found = [array.dtype for array in arrays]
    if not types:
        types += found
    if found != types:
        kinds = [", ".join(map(str, each)) for each in (types, found)]
        raise UserError(f"samples have the types {kinds[0]}, others {kinds[1]}", "one type in each column",
                        "cast them in __getitem__")


def tidy(sample: Any) -> Any:
    """Return a sample with lists of numbers within it as arrays, and dataclasses as dicts.

    Errors: `UserError` for a list of numbers in place of a tuple of columns, and for images of Pillow and None.
    """
    sample = by_field(sample)
    if isinstance(sample, list) and _numbers(sample):
        raise UserError(f"a sample is a list of {len(sample)} numbers", "a tuple of columns, (x, y), or one array",
                        "return (x, y), or numpy.asarray(x, numpy.float32)")
    return _tidy(sample, top=True)


def _tidy(part: Any, top: bool = False) -> Any:
    if isinstance(part, Mapping):
        return {name: _tidy(value) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        if not top and _numbers(part):
            return _array_of(part)
        values = [_tidy(value) for value in part]
        return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
    if part is None or hasattr(part, "getbands"):
        kind = "None" if part is None else f"a Pillow image ({part.mode}, {part.width} x {part.height})"
        raise UserError(f"samples cannot be collated: one holds {kind}", "arrays, tensors or numbers",
                        "return an array, such as numpy.asarray(image, numpy.float32) / 255, with its channels where "
                        "the model has them")
    return part


def _numbers(part: Sequence[Any]) -> bool:
    """Return whether a list or tuple holds numbers only, in lists of any depth."""
    return bool(part) and all(isinstance(each, (int, float, np.number, np.bool_)) or isinstance(each, (list, tuple))
                              and _numbers(each) for each in part)


def _array_of(part: Any) -> np.ndarray:
    try:
        array = np.asarray(part)
    except ValueError:
        raise UserError("a sample holds lists of different lengths", "one length", "pad them") from None
    leaf = part
    while isinstance(leaf, (list, tuple)):
        leaf = leaf[0]
    return array.astype(np.float32) if array.dtype == np.float64 and not isinstance(leaf, np.float64) else array


def stacked(samples: list[Any]) -> Any:
    """Return samples of one structure with their arrays stacked; `UserError` where they differ."""
    first = samples[0]
    if isinstance(first, (Mapping, tuple, list)):
        keys = [_keys(sample) for sample in samples]
        if any(each != keys[0] for each in keys):
            other = next(each for each in keys if each != keys[0])
            raise UserError(f"one sample has the columns {keys[0]}, another {other}",
                            "the same columns in all samples", "correct __getitem__")
        columns = [stacked([sample[key] for sample in samples]) for key in keys[0]]
        if isinstance(first, Mapping):
            return dict(zip(keys[0], columns))
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    refuse_strings([first], "a sample")
    arrays = [_leaf(sample) for sample in samples]
    kinds = {(array.dtype, array.shape) for array in arrays}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds)[:4])
        raise UserError(f"samples of one batch have the types and shapes {shown}", "one type and shape for all samples",
                        "pad, crop or cast them in __getitem__")
    return np.stack(arrays)


def _keys(sample: Any) -> list[Any]:
    if isinstance(sample, Mapping):
        return sorted(sample, key=str)
    return list(range(len(sample))) if isinstance(sample, (tuple, list)) else []


def _leaf(part: Any) -> np.ndarray:
    return np.asarray(part, np.float32) if type(part) is float else np.asarray(part)


def _is_row(sample: Any) -> bool:
    return isinstance(sample, (tuple, Mapping)) or is_dataclass(sample) and not isinstance(sample, type)
