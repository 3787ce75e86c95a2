"""The compiled metrics over the training batches of an epoch, as `model.fit` shows them.

Owns when they are measured, kept aside and summed over the ranks; `states` has the metrics. Knows no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.keras.compiled import setup_of, split, widened, with_class_weight
from hvdtrain.protocols import Control

if TYPE_CHECKING:
    from hvdtrain.run import Run


class TrainingMetrics:
    """Measures training batches as they pass, in the same metric objects in which an evaluation counts."""

    def __init__(self, model: Any) -> None:
        self._model, self._setup = model, setup_of(model)
        self._states: dict[str, np.ndarray] = {}

    def begin(self, run: Run) -> None:
        """Make the metrics by a sample of the data and have the task update them, where there are any."""
        setup, several = self._setup, len(getattr(self._model, "outputs", None) or ()) > 1
        if setup.metrics is None or not (setup.metrics or several):
            return
        if run.config.sync_batchnorm and run.control.size > 1:
            run.note("metrics of training batches are left out with sync_batchnorm, where stand-ins pass as samples")
            return
        try:
            batch = run.feed.sample(1, run.state.cursor)
        except UserError:  # a stream at its end
            return
        batch = tuple(keras.ops.convert_to_tensor(array) for array in batch)
        x, y, weight = split(self._model, batch)
        outputs = self._model(x, training=False)
        names = list(setup.task.pairs(self._model, outputs, batch))[1:] if setup.task is not None else []
        if setup.class_weight is not None:
            weight = with_class_weight(setup.class_weight, y, weight)
        setup.metrics.prepare(y, widened(outputs), weight, names)
        setup.follow = setup.metrics.follow

    def restart(self) -> None:
        """Forget all batches: an epoch begins."""
        self._states = {}
        if self._setup.follow is not None:
            self._setup.metrics.take_followed()

    def set_aside(self) -> None:
        """Take the states out of the metrics, in which an evaluation counts next; once an epoch."""
        if self._setup.follow is not None and not self._states:
            self._states = self._setup.metrics.take_followed()

    def results(self, control: Control) -> dict[str, float]:
        """Each metric over all ranks' batches of the epoch, under Keras' name; collective."""
        if self._setup.follow is None:
            return {}
        self.set_aside()
        everyone = control.gather(self._states)
        names = list(dict.fromkeys(name for states in everyone for name in states))
        summed = {name: sum(s[name] for s in everyone if name in s) for name in names}
        return self.renamed(self._setup.metrics.results(summed))

    def renamed(self, found: dict[str, float]) -> dict[str, float]:
        """``found`` under the names that Keras has for the metrics."""
        names = getattr(self._setup.metrics, "keras_names", {})
        return {names.get(name, name): value for name, value in found.items()}

    def end(self) -> None:
        """Measure no more."""
        self._setup.follow = None
