"""The names that a rank's variables have in the whole model: of its weights, its parameters and its optimizer's state.

A name is the variable's place in the whole model's order and its path (`hvdtrain.backends.tensorflow.state`). What an
optimizer over the whole model would hold is found out with variables that hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.optim import alike, instead
from hvdtrain.core.errors import UserError


class Names:
    """Names of the variables of ``whole``, of which a rank keeps some. Made before others are released."""

    def __init__(self, whole: keras.Model) -> None:
        self.trainable = list(whole.trainable_variables)
        self._weights = _numbers(whole.weights)
        self._params = _numbers(self.trainable)

    def weight(self, variable: keras.Variable) -> str:
        """Return the name among all weights."""
        return f"{self._weights[id(variable)]:05d}/{variable.path}"

    def param(self, variable: keras.Variable) -> str:
        """Return the name among the trainable variables."""
        return f"{self._params[id(variable)]:05d}/{variable.path}"

    def of_optimizer(self, own: Any, variables: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the names of what the optimizer ``own`` holds over some ``variables``, and the variable of each.

        That is None where it is of none of them (the rate). Builds nothing.
        Errors: `UserError` for one whose state cannot be told by variable.
        """
        _, places = _skeleton(own, self.trainable, self._params)
        held, labels = _skeleton(own, variables, self._params)
        known = {label: place for place, label in enumerate(places)}
        if any(label not in known for label in labels):
            raise UserError(f"optimizer {type(own).__name__} with a model that is cut over ranks: its state cannot be "
                            "told by variable", "an optimizer with slots for each variable", "use SGD, Adam or AdamW")
        of = {self._params[id(v)]: v for v in variables}
        return ([f"{known[label]:05d}/{v.path}" for label, v in zip(labels, held)],
                [of.get(owner) for owner, _ in labels])

    def slots(self, own: Any) -> float:
        """Return how many tensors an optimizer like ``own`` holds for each parameter."""
        _, labels = _skeleton(own, self.trainable, self._params)
        return sum(owner >= 0 for owner, _ in labels) / len(self.trainable)


def _skeleton(own: Any, variables: Sequence[Any], numbers: dict[int, int]) -> tuple[list[Any], list[Any]]:
    """(what an optimizer like ``own`` would hold over ``variables``, without contents; the label of each)."""
    made = alike(own)
    hollow = [_hollow(v) for v in variables]
    number_of = {id(h): numbers[id(v)] for h, v in zip(hollow, variables)}
    add, owners = made.add_variable_from_reference, dict[int, int]()

    def without_contents(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        owners[len(made.variables)] = number_of[id(reference_variable)]
        return add(_hollow(reference_variable, (0,)), *args, **kwargs)

    with instead(made, "add_variable_from_reference", without_contents):
        made.build(hollow)
    return made.variables, _labels(made, owners)


def _labels(own: Any, owners: dict[int, int]) -> list[tuple[int, int]]:
    """What tells each variable of an optimizer from the others: (number of whose it is or -1, how many before)."""
    seen: dict[int, int] = {}
    labels = []
    for place in range(len(own.variables)):
        owner = owners.get(place, -1)
        labels.append((owner, seen.get(owner, 0)))
        seen[owner] = labels[-1][1] + 1
    return labels


def _numbers(variables: Sequence[Any]) -> dict[int, int]:
    return {id(v): i for i, v in enumerate(variables)}


def _hollow(variable: Any, shape: tuple[int, ...] | None = None) -> keras.Variable:
    """A variable of the name and shape (or ``shape``) of another, which holds nothing."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    with tf.device("/CPU:0"):
        made = keras.Variable(tf.zeros([0], dtype), dtype=dtype)
    made._shape = tuple(variable.shape) if shape is None else shape
    made._name, made._path = variable.name, variable.path
    return made
