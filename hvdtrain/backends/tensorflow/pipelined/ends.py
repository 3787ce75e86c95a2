"""What a task is given in place of a model of which this rank has only the first or the last chunk.

Owns how a task gets there: called on the first chunk's rank it is left as soon as it calls the model, with the input
that it gives; on the last chunk's rank the model's output is what the last chunk makes of what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.pipelined.cargo import Crossing
from hvdtrain.core.errors import UserError

UNDO = "leave pipeline out"


class _Reached(BaseException):
    """The task has called the model. No Exception, so that no task takes it for an error of the model."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x = x


class ModelPlaceholder:
    """Stands for ``model`` in a task, which may call it and read plain values (numbers, words) and ``losses``.

    It is equal to its model, so that `hvdtrain.backends.keras.compiled.setup_of` finds the model's set-up.
    """

    def __init__(self, model: keras.Model, place: str = "cut over ranks", undo: str = UNDO) -> None:
        self._model, self._place, self._undo = model, place, undo
        self.losses: list[tf.Tensor] = []

    def __hash__(self) -> int:
        return hash(self._model)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._model

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if value is None or isinstance(value, (bool, int, float, str, tuple, dict)):
            return value
        raise UserError(f"the task uses model.{name} of a model that is {self._place}", "a task that calls model(x) "
                        "and reads plain values", f"compute it inside a block, or {self._undo}")


class First(ModelPlaceholder):
    """Gives `input_of` the input of the model."""

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """Leave the task."""
        raise _Reached(x)


class Last(ModelPlaceholder):
    """Called, it gives the model's output. ``run``: the last chunk; ``calls``: how often it may be called in a pass.
    """

    def __init__(self, model: keras.Model, run: Callable[[Any, Crossing, bool], Crossing]) -> None:
        super().__init__(model)
        self._run = run
        self._came = Crossing(None, [])
        self.called, self._most = 0, 1
        self._x: list[Any] = []

    def take(self, came: Crossing, calls: int = 1) -> None:
        """Take what came into the last chunk, before a task runs."""
        self._came, self.called, self._most, self._x = came, 0, calls, []

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """Run the last chunk. A further call must be of the same input, which this rank has not got."""
        leaves = tf.nest.flatten(x)
        same = not self.called or len(leaves) == len(self._x) and all(a is b for a, b in zip(leaves, self._x))
        self.called, self._x = self.called + 1, leaves
        if self.called > self._most or not same:
            raise UserError("the task calls a model that is cut over ranks more than once for a batch", "a single call",
                            f"put what it calls for into one forward pass, or {UNDO}")
        made = self._run(x, self._came, bool(training))
        self.losses = made.losses
        return made.value


def input_of(task: Callable[[Any, Any, bool], Any], first: First, batch: Sequence[Any], training: bool) -> Any:
    """Return what the task calls the model with for a flat ``batch``."""
    try:
        task(first, batch, training)
    except _Reached as reached:
        return reached.x
    raise UserError("the task does not call the model", "a task that calls model(x)", "mend the model file's task")
