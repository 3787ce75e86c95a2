"""What a checkpoint holds of a rank's part of a Keras model, under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.pipelined.names import Names
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head, Place


class PartState(state.ModelState):
    """Implements `hvdtrain.core.protocols.ModelState` over what this rank holds. ``of_optimizer``: names of its
    state."""

    def __init__(self, *given: Any, names: Names, of_optimizer: Sequence[str]) -> None:
        super().__init__(*given)
        self._of_model = [names.weight(v) for v in self._model.weights]
        self._of_optimizer = list(of_optimizer)

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Return groups "model" and "optimizer" of this rank's blocks; optimizer, base rate and loss scale."""
        own = self._opt.optimizer
        groups = {"model": self._arrays("model", self._of_model, self._model.weights, place)}
        if self._opt.slices is None:
            groups["optimizer"] = self._arrays("optimizer", self._of_optimizer, own.variables, place)
        return groups, self.rest()

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state` from arrays among which are this rank's."""
        own = type(self._opt.optimizer).__name__
        if rest.get("optimizer", own) != own:
            raise UserError(f"the checkpoint was made with {rest['optimizer']}", own,
                            "resume with the optimizer of that run")
        pairs = _matched("model", self._of_model, self._model.weights, groups["model"])
        if self._opt.slices is None:
            pairs += _matched("optimizer", self._of_optimizer, self._opt.optimizer.variables, groups["optimizer"])
        for variable, array in pairs:
            state.assign(variable, array)
        if self._opt.slices is None:
            self._opt.resume(rest)
        else:
            self._rests = [rest]
        self._scale.load(rest)
        self._restart()

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        """Return what this rank needs of a checkpoint whose optimizer's state is that of the whole model."""
        places = {name[:5] for name in self._of_optimizer}
        return super().wanted([head for head in heads if head.name[:5] in places])

    def _slices(self) -> Iterator[tuple[str, Any, tuple[int, ...], int, int]]:
        for name, (_, *rest) in zip(self._of_optimizer, super()._slices()):
            yield (name, *rest)

    def _arrays(self, group: str, names: Sequence[str], variables: Sequence[Any],
                place: Place | None) -> dict[str, np.ndarray]:
        if place is None:
            return {name: state.to_numpy(v) for name, v in zip(names, variables)}
        return {name: state.copied(state.view(v), group, name, place) for name, v in zip(names, variables)}


def _matched(what: str, names: Sequence[str], variables: Sequence[Any],
             got: Mapping[str, np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Each variable with its array, found by its place; `UserError` for the first that does not fit."""
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
