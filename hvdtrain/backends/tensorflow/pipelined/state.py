"""State of a rank's blocks of a partitioned Keras model, under the names of the whole: for checkpoints and exchanges.

Owns the names: a variable's place in the whole model's order and its path (`hvdtrain.backends.tensorflow.state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.buffers import Buffers
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.optim import Optimization, alike, instead
from hvdtrain.backends.tensorflow.pipelined.deferred import Part
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head
from hvdtrain.parallel.parts import GroupBuffers, ReplicaGroup


class PartState(state.ModelState):
    """Implements `hvdtrain.core.protocols.ModelState` for this rank's blocks. ``of_optimizer``: names of its state."""

    def __init__(self, *given: Any, names: Names, of_optimizer: Sequence[str]) -> None:
        super().__init__(*given)
        self._of_model = [names.weight(v) for v in self._model.weights]
        self._of_optimizer = list(of_optimizer)

    def _named(self, group: str, variables: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._of_model if group == "model" else self._of_optimizer, variables))

    def _assign(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        pairs = _matched("model", self._of_model, self._model.weights, groups["model"])
        if self._opt.slices is None:
            pairs += _matched("optimizer", self._of_optimizer, self._opt.optimizer.variables, groups["optimizer"])
        for variable, array in pairs:
            state.assign(variable, array)
        if self._opt.slices is None:
            self._opt.resume(rest)

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        for variable, array in _matched("model", self._of_model, self._model.weights, arrays):
            state.assign(variable, array)
        self._restart()

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        """Return this rank's needs of a checkpoint whose optimizer's state is that of the whole model."""
        places = {name[:5] for name in self._of_optimizer}
        return super().wanted([head for head in heads if head.name[:5] in places])


def _matched(what: str, names: Sequence[str], variables: Sequence[Any],
             got: Mapping[str, np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Return each variable with its array, found by its place; `UserError` for the first that does not fit."""
    given = {name[:5]: (name, array) for name, array in got.items()}
    pairs = []
    for name, variable in zip(names, variables):
        other, array = given.get(name[:5], ("", None))
        if array is None or state.without_counters(other) != state.without_counters(name):
            raise UserError(f"the checkpoint's {what} lacks {name}", f"the variables of this {what}",
                            "resume with the model and optimizer of that run")
        if tuple(array.shape) != tuple(variable.shape):
            raise UserError(f"checkpoint variable {other} has shape {tuple(array.shape)}",
                            f"{tuple(variable.shape)}, as in this {what}",
                            "resume with the model and model_args of that run")
        pairs.append((variable, array))
    return pairs


class Names:
    """Names of the variables of ``whole``, of which a rank keeps some. Made before others are released."""

    def __init__(self, whole: keras.Model) -> None:
        self.trainable = list(whole.trainable_variables)
        self._weights = _numbers(whole.weights)
        self._params = _numbers(self.trainable)

    def weight(self, variable: keras.Variable) -> str:
        return f"{self._weights[id(variable)]:05d}/{variable.path}"

    def param(self, variable: keras.Variable) -> str:
        return f"{self._params[id(variable)]:05d}/{variable.path}"

    def of_optimizer(self, own: Any, variables: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the names of the state of optimizer ``own`` over some ``variables``, and the variable of each.

        That is None for state of none of them (the rate). Builds nothing, by variables without contents. Errors:
        `UserError` for state that has no variable.
        """
        _, places = _skeleton(own, self.trainable, self._params)
        held, labels = _skeleton(own, variables, self._params)
        known = {label: place for place, label in enumerate(places)}
        if any(label not in known for label in labels):
            raise UserError(f"optimizer {type(own).__name__} with a partitioned model: its state cannot be "
                            "divided by variable", "an optimizer with slots for each variable",
                            "use SGD, Adam or AdamW")
        of = {self._params[id(v)]: v for v in variables}
        return ([f"{known[label]:05d}/{v.path}" for label, v in zip(labels, held)],
                [of.get(owner) for owner, _ in labels])

    def slots(self, own: Any) -> float:
        """Return the number of tensors that an optimizer like ``own`` holds for each parameter."""
        _, labels = _skeleton(own, self.trainable, self._params)
        return sum(owner >= 0 for owner, _ in labels) / len(self.trainable)


def _skeleton(own: Any, variables: Sequence[Any], numbers: dict[int, int]) -> tuple[list[Any], list[Any]]:
    """Return (the state of an optimizer like ``own`` over ``variables``, without contents; the label of each)."""
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
    """Return the label of each variable of an optimizer: (number of its owner or -1, how many before)."""
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
    """Return a variable of the name and shape (or ``shape``) of another, without contents."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    with tf.device("/CPU:0"):
        made = keras.Variable(tf.zeros([0], dtype), dtype=dtype)
    made._shape = tuple(variable.shape) if shape is None else shape
    made._name, made._path = variable.name, variable.path
    return made


class PartBuffers(GroupBuffers, Buffers):
    """Implements `hvdtrain.core.protocols.Buffers` for ``part``: one `Buffers` for the blocks of each group of ranks.

    ``layers``: of the whole model. ``owners``: the trainable variable of each of the optimizer's, or None (the rate).
    """

    groups: Sequence[Buffers]

    def __init__(self, part: Part, opt: Optimization, replicas: Sequence[ReplicaGroup], layers: Sequence[Any],
                 owners: Sequence[keras.Variable | None]) -> None:
        super().__init__(part, opt, Transport(replicas[0].wire, Ops()), part.whole)
        self._owners = list(owners)
        self.groups = [Buffers(Part(part.whole, [layers[i] for i in each.blocks]), opt, Transport(each.wire, Ops()),
                               part.whole) for each in replicas]

    def begin(self) -> None:
        super().begin()
        for group in self.groups:
            group.begin()

    def saw(self, samples: int) -> None:
        for group in self.groups:
            group.saw(samples)

    def discard(self) -> None:
        Buffers.discard(self)
        super().discard()

    def restart(self) -> None:
        for group in self.groups:
            group.restart()

    def share(self) -> None:
        """Give every rank the weights and the optimizer's state of the lowest that has them; seed generators stay."""
        opt = self._opt
        opt.build()
        base_lr = tf.Variable(np.nan if opt.base_lr is None else opt.base_lr, trainable=False, dtype=tf.float64)
        for group in self.groups:
            if group._transport.size == 1:
                continue
            mine = {id(v) for v in group._model.weights}
            alike = [v for place, (v, owner) in enumerate(zip(opt.optimizer.variables, self._owners))
                     if place not in (opt.slices or ()) and (owner is None or id(owner) in mine)]
            group._from_root([*group._model.weights, *alike, base_lr], "initial")
        opt.base_lr = None if np.isnan(base_lr.numpy()) else float(base_lr.numpy())
