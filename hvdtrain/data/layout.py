"""Flatten nested x, y and sample weights of Keras to the flat tuple of arrays that a feed cuts, and pack them again.

Owns that order, and the names of nested outputs. Imports Keras for nested data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import ArraySource, check_names, is_array
from hvdtrain.data.stream import Arrays


class BatchLayout:
    """The structures of nested x and y; batches have no weights, one array, or one for each output."""

    def __init__(self, x: Any, y: Any = None) -> None:
        import keras

        self._x, self._y = (keras.tree.map_structure(lambda leaf: 0, part) if part is not None else None
                            for part in (x, y))
        self.n_x = len(keras.tree.flatten(x))
        self.n_y = 0 if y is None else len(keras.tree.flatten(y))

    def pack(self, batch: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return (x, y, sample_weight) of a flat batch; None for each that it lacks."""
        import keras

        pack = keras.tree.pack_sequence_as
        n_w = len(batch) - self.n_x - self.n_y
        if n_w < 0 or n_w not in (0, 1, self.n_y):
            raise UserError(f"a batch has {len(batch)} arrays", f"{self.n_x} of x, {self.n_y} of y, and none, 1 or "
                            f"{self.n_y} of sample weights", "give the evaluation data x and y as the training data's")
        x = pack(self._x, list(batch[:self.n_x]))
        y = pack(self._y, list(batch[self.n_x:self.n_x + self.n_y])) if self.n_y else None
        weights = list(batch[self.n_x + self.n_y:])
        if n_w == 1:
            return x, y, weights[0]
        return x, y, pack(self._y, weights) if n_w else None

    def inputs(self, batch: Sequence[Any]) -> Any:
        """Return x of a flat batch, which may lack y."""
        import keras

        return keras.tree.pack_sequence_as(self._x, list(batch[:self.n_x]))


def nested(part: Any) -> bool:
    """Return whether ``part`` is a dict, tuple or list of columns rather than one column."""
    return isinstance(part, Mapping) or (
        isinstance(part, (tuple, list)) and bool(part) and all(is_array(p) or nested(p) for p in part))


def flat(parts: Sequence[Any]) -> tuple[BatchLayout, list[Any]]:
    """Return the layout of (x[, y[, sample_weight]]) and its leaves in order."""
    import keras

    x, y, weight = [*parts, None, None][:3]
    layout = BatchLayout(x, y)
    leaves = [leaf for part in (x, y) if part is not None for leaf in keras.tree.flatten(part)]
    if isinstance(weight, Mapping) and isinstance(y, Mapping):
        ones = keras.tree.flatten(y)[:1]
        weight = {name: weight.get(name, np.ones(len(ones[0]), np.float32)) for name in y}
    return layout, leaves + ([] if weight is None else keras.tree.flatten(weight))


class Columns:
    """Nested arrays as a `Source`, checked when their length is first asked for, so inside the run."""

    fixed = True  # as `hvdtrain.data.sources.ArraySource.fixed`

    def __init__(self, parts: Sequence[Any]) -> None:
        if not 1 <= len(parts) <= 3:
            raise UserError(f"the data has {len(parts)} parts", "(x, y) or (x, y, sample_weight)",
                            "put several inputs into one dict or tuple x")
        self._parts = tuple(parts)
        self._source: ArraySource | None = None
        self.layout, self._leaves = flat(self._parts)

    def __len__(self) -> int:
        return len(self._arrays())

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        return self._arrays().fetch(indices_n)

    @property
    def arrays(self) -> Arrays:
        """Return all samples, flat."""
        return self._arrays().arrays

    def _arrays(self) -> ArraySource:
        if self._source is None:
            self._source = ArraySource([np.asarray(leaf) for leaf in self._leaves])
        return self._source


def named(data: Any) -> Any:
    """Return ``data`` with nested (x, y[, sample_weight]) as `Columns`; a pair of other things is (train, test)."""
    if isinstance(data, Mapping) and "x" in data:
        splits = [[data[name + end] for name in ("x", "y", "sample_weight") if name + end in data]
                  for end in ("", "_test")]
        if not any(nested(part) for split in splits for part in split):
            return data
        check_names(data, "the data")
        return tuple(Columns(split) for split in splits) if splits[1] else Columns(splits[0])
    if not isinstance(data, (tuple, list)) or not 2 <= len(data) <= 3:
        return data
    inputs = any(isinstance(part, Mapping) and "x" not in part for part in data)
    if len(data) == 2 and not inputs and not any(is_array(part) for part in data):
        return tuple(named(part) for part in data)
    return Columns(data) if any(nested(part) for part in data) else data


OUTPUT = "output"
"""Name of a model's only output; of several in a tuple ``output_0``, ``output_1``, ..."""


def named_outputs(found: Any, to_array: Callable[[Any], np.ndarray], name: str = "") -> dict[str, np.ndarray]:
    """Return the tensors of a model's outputs by name: keys of mappings, places in tuples, joined by dots; None is
    left out.

    Errors: `UserError` for anything that is neither a tensor nor holds tensors.
    """
    if isinstance(found, Mapping):
        items = [(f"{name}.{key}" if name else str(key), value) for key, value in found.items()]
    elif isinstance(found, (tuple, list)):
        items = [(f"{name}.{i}" if name else f"{OUTPUT}_{i}", value) for i, value in enumerate(found)]
    elif is_array(found):
        return {name or OUTPUT: to_array(found)}
    else:
        raise UserError(f"the model's output {name or OUTPUT} is a {type(found).__name__}",
                        "tensors, or a dict or tuple of tensors",
                        "return tensors from the model, or give the model file a predict(model, batch)")
    arrays: dict[str, np.ndarray] = {}
    for key, value in items:
        more = {} if value is None else named_outputs(value, to_array, key)
        if same := arrays.keys() & more.keys():
            raise UserError(f"two of the model's outputs have the name {min(same)}", "a name for each",
                            "rename a key of the outputs")
        arrays |= more
    return arrays
