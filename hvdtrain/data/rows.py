"""Resolve rows with named columns: which column is x, y or the sample weight, or the whole row for a task.

Owns the names and the order of a row's arrays in a flat batch. The backends' ``data.py`` convert arrays;
`hvdtrain.data.layout` has the structure of nested inputs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import ArraySource, innermost, is_array
from hvdtrain.data.stream import Arrays

INPUTS = ("x", "image", "images", "img", "pixel_values", "input", "inputs", "input_ids", "feature", "features", "data")
TARGETS = ("y", "label", "labels", "target", "targets")
WEIGHTS = ("sample_weight", "sample_weights", "weight", "weights")
PLAIN = ({"x"}, {"x", "y"}, {"x", "y", "sample_weight"})
"""Columns that a task, too, gets as a tuple in this order."""
TASK = "task(model, batch), which gets each batch as a dict"


class NamedBatch(dict):
    """A batch of named columns, as a task gets it."""

    def __missing__(self, name: Any) -> Any:
        raise UserError(f"the task asks for batch[{name!r}] of rows with the columns {_listed(self)}",
                        "one of these names", "correct the task, or return tuples from the data")


class ColumnNames:
    """Take the columns of rows by name and flatten them, in the same order whatever the order of a row.

    ``whole``: a task gets each batch with its names. ``inputs``, ``outputs``: those of a Keras model, whose nested x
    and y are flattened where ``nests``. ``columns``: those that the task reads, if known; others are left out.
    ``collate``: puts rows together to a batch. ``layout``: the structure of nested inputs. ``note``: one line about the
    columns' meaning. The last two are known once a row has been read.
    """

    def __init__(self, whole: bool = False, inputs: Sequence[str] = (), outputs: Sequence[str] = (),
                 nests: bool = False, columns: Collection[str] = (),
                 collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.columns, self.collate = columns, collate
        self.whole, self.inputs, self.outputs, self.nests = whole, tuple(inputs), tuple(outputs), nests
        self.layout: Any = None
        self.note = ""
        self.x_first = True
        self._names: dict[int, tuple[str, ...]] = {}

    def for_source(self) -> ColumnNames:
        """Return these settings for one source; the names that a task gets stay common to all."""
        return copy.copy(self)

    def arrays(self, row: Any, to_array: Callable[[Any], np.ndarray]) -> Arrays:
        """Return a sample or batch as a flat tuple; `UserError` for columns of unclear meaning."""
        parts = self.parts(row)
        if self.nests and len(parts) <= 3 and not self._names.get(len(parts)):
            from hvdtrain.data.layout import flat, nested

            if any(nested(part) for part in parts):
                layout, parts = flat(parts)
                self.layout = self.layout or layout
        return tuple(to_array(part) for part in parts)

    def parts(self, row: Any) -> list[Any]:
        """Return [x[, y[, sample_weight]]], or all columns of a row for a task, x, y and weight first if known."""
        if isinstance(row, tuple) and hasattr(row, "_asdict") and not self.whole:
            row = row._asdict()
        row = by_field(row)
        if not isinstance(row, Mapping):
            row = list(row) if isinstance(row, (tuple, list)) else [row]
            if self.whole:
                self._keep_names((), len(row))
            elif len(row) == 3:
                self.note = "data: a sample is (x, y, sample weight), by position"
            return row
        if self.whole and set(row) not in PLAIN:
            return self._for_task({name: row[name] for name in row if name in self.columns} or row)
        x, y = (tuple(names) if all(name in row for name in names) else () for names in (self.inputs, self.outputs))
        rest = [name for name in row if name not in x + y]
        x, y = x or _one_of(rest, INPUTS), y or _one_of(rest, TARGETS)
        weight = _one_of(rest, WEIGHTS)
        if {*x, *y, *weight} != set(row) or not x or weight and not y:
            raise self._unclear(row)
        if self.whole:
            self._keep_names((), len(row))
        kinds = {"x": x, "y": y, "the sample weight": weight}
        self.note = "data: " + ", ".join(f"{kind} is {', '.join(names)}" for kind, names in kinds.items() if names)
        return [_columns(row, names) for names in kinds.values() if names]

    def packed(self, batch: Sequence[Any]) -> Any:
        """Return a flat batch as a task gets it: a `NamedBatch` where its columns have names."""
        names = self._names.get(len(batch))
        return NamedBatch(zip(names, batch)) if names else batch

    def of_model_file(self, spec: Any) -> Any:
        """Return ``spec`` with functions that get batches by name."""
        def named(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
            if function is None:
                return None

            @functools.wraps(function)
            def by_name(*args: Any, **more: Any) -> Any:
                return function(*args[:-1], self.packed(args[-1]), **more)
            return by_name
        return replace(spec, task=named(spec.task), weight=named(spec.weight), metrics=named(spec.metrics),
                       predict=named(spec.predict), rows=self)

    def learn(self, other: ColumnNames) -> None:
        """Copy the names that a worker has found in the rows that it read."""
        self.layout, self.note, self.x_first = other.layout, other.note, other.x_first
        self._names.update(other._names)

    def _for_task(self, row: Mapping[str, Any]) -> list[Any]:
        x, y, weight = (_one_of(row, group) for group in (INPUTS, TARGETS, WEIGHTS))
        self.x_first = bool(x)
        names = (*x, *y, *weight, *sorted(set(row).difference(x, y, weight), key=str))
        self._keep_names(names)
        self.note = f"data: the task gets each batch as a dict of {', '.join(names)}"
        return [row[name] for name in names]

    def _keep_names(self, names: tuple[str, ...], n: int = 0) -> None:
        """Keep the names of a task's batch of ``n`` arrays, () for a tuple; they must not change later."""
        n = n or len(names)
        if self._names.setdefault(n, names) != names:
            of = [f"the columns {_listed(each)}" if each else "no names" for each in (names, self._names[n])]
            raise UserError(f"rows of {n} arrays have {of[0]}", f"{of[1]}, as before",
                            "give training and evaluation data the same columns")

    def _unclear(self, row: Mapping[str, Any]) -> UserError:
        own = f"the model's inputs {_listed(self.inputs)}, or " if self.inputs else ""
        return UserError(f"rows have the columns {_listed(row)}, which are not used by position",
                         f"{own}x (or {', '.join(INPUTS[1:])}), y (or {', '.join(TARGETS[1:])}), sample_weight (or "
                         f"{', '.join(WEIGHTS[1:])}), each at most once and no others",
                         f"rename or drop columns, return (x, y) tuples, or give the model file a {TASK}")


def by_field(row: Any) -> Any:
    """Return a dataclass instance as a dict of its fields; anything else unchanged."""
    if not is_dataclass(row) or isinstance(row, type):
        return row
    return {field.name: getattr(row, field.name) for field in fields(row)}


def rows_of(spec: Any, collate: Callable[[list[Any]], Any] | None = None) -> ColumnNames:
    """Return the column names for the model of ``spec``; ``collate``: a data collator."""
    keras = any(c.__name__ == "Model" and c.__module__.startswith("keras.") for c in type(spec.model).__mro__)
    inputs, outputs = _ends(spec.model) if keras else ((), ())
    return ColumnNames(spec.task is not None, inputs, outputs, keras, spec.columns, collate)


def of_data(data: Any) -> ColumnNames:
    """Return the column names of a source or stream, which may be wrapped."""
    rows = getattr(innermost(data), "rows", None)
    return rows if isinstance(rows, ColumnNames) else ColumnNames()


def note_of(data: Any, task: bool) -> str:
    """Describe x, y and weight in one line; "" where the order is clear. ``task``: it decides."""
    source = innermost(data)
    rows = getattr(source, "rows", None)
    if isinstance(rows, ColumnNames):
        return rows.note
    three = isinstance(source, ArraySource) and len(source.arrays) == 3
    return "data: the arrays are x, y and sample weight, in this order" if three and not task else ""


def columns(obj: Any, rows: ColumnNames, to_array: Callable[[Any], np.ndarray]) -> ArraySource | None:
    """Return a dict of whole columns as a source; None for anything else."""
    if not isinstance(obj, Mapping) or not obj or not all(map(is_array, obj.values())):
        return None
    source = ArraySource(rows.arrays(obj, to_array))
    source.rows, source.layout = rows, rows.layout
    return source


def _ends(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a functional Keras model's inputs and outputs; () for another model."""
    try:
        inputs, outputs = model.input, model.output
        return tuple(inputs if isinstance(inputs, Mapping) else (i.name for i in model.inputs)), tuple(
            outputs if isinstance(outputs, Mapping) else model.output_names)
    except (AttributeError, ValueError):
        return (), ()


def _one_of(row: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the single one of ``names`` in ``row``; () for none and for several."""
    found = tuple(name for name in names if name in row)
    return found if len(found) == 1 else ()


def _columns(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return {name: row[name] for name in names} if len(names) > 1 else row[names[0]]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
