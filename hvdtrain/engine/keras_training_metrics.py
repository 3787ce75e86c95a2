"""The compiled metrics over an epoch's training batches, as `model.fit` shows them, summed over ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras.compiled import setup_of, split, widened, with_class_weight
from hvdtrain.backends.keras.metrics import vector, zeros_like_one
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.engine.run import Run


class TrainingMetrics:
    """Measures training batches as they pass, in the same metric objects in which an evaluation counts."""

    def __init__(self, model: Any) -> None:
        self._model, self._setup = model, setup_of(model)
        self._states: dict[str, np.ndarray] = {}
        self._losses: dict[str, Any] = {}
        self.resumed: dict[str, np.ndarray] = {}
        self._before: list[Any] = []

    def begin(self, run: Run) -> None:
        """Make the metrics by a sample of the data and have the task update them, where there are any."""
        setup, several = self._setup, len(getattr(self._model, "outputs", None) or ()) > 1
        if setup.metrics is None or not (setup.metrics or several):
            return
        if run.config.sync_batchnorm and run.control.size > 1:
            run.note("metrics of training batches are not computed with sync_batchnorm, where placeholders pass as "
                     "samples")
            return
        compile = run.parts.compile
        if run.control.agree(compile is not None and bool(compile.chosen)):  # whose code was made without them
            run.note("metrics of training batches are not computed with compile: auto, which runs the model through "
                     "XLA")
            return
        try:
            batch = run.feed.sample(1, run.state.cursor)
        except UserError:  # a stream at its end
            return
        batch = tuple(keras.ops.convert_to_tensor(array) for array in batch)
        x, y, weight = split(self._model, batch)
        outputs = self._model(x, training=False) if setup.outputs is None else setup.outputs
        names = list(setup.task.pairs(self._model, outputs, batch))[1:] if setup.task is not None else []
        if setup.class_weight is not None:
            weight = with_class_weight(setup.class_weight, y, weight)
        self._losses = {name: keras.metrics.Mean(name=name) for name in names}
        if run.mesh.place == run.mesh.depth - 1:  # of a partitioned model, others see no outputs
            setup.metrics.build(*zeros_like_one((y, widened(outputs), weight)))
        self._take()
        setup.follow = self._follow
        if self.take_back not in run.recovery.taken_back:
            run.recovery.taken_back.append(self.take_back)

    def keep(self) -> None:
        """Remember the states as they are before a step; nothing waits for a device."""
        self._before = [keras.ops.copy(v.value) for v in self._variables()] if self._setup.follow is not None else []

    def take_back(self) -> None:
        """Forget what has been counted since `keep`: the step is repeated, or skipped."""
        for variable, value in zip(self._variables(), self._before):
            variable.assign(value)

    def _variables(self) -> list[Any]:
        return [v for metric in (*self._setup.metrics.named.values(), *self._losses.values()) for v in metric.variables]

    def restart(self) -> None:
        self._states, self.resumed = {}, {}
        if self._setup.follow is not None:
            self._take()

    def set_aside(self) -> None:
        """Take the states out of the metrics, in which an evaluation counts next."""
        if self._setup.follow is not None:
            self._states = _added(self._states, self._take())

    def resume(self, totals: dict[str, np.ndarray]) -> None:
        """Count the batches before a checkpoint inside the epoch too, from what `totals` returned."""
        self.resumed = dict(totals)

    def totals(self, control: Control) -> dict[str, np.ndarray]:
        """Return the totals of the epoch so far over all ranks, which continue counting; collective."""
        if self._setup.follow is None:
            return {}
        everyone = control.gather(_added(self._states, self._take(reset=False)))
        names = dict.fromkeys(name for states in everyone for name in states)
        total = _added(*everyone, self.resumed)
        return {name: total[name] for name in names}

    def results(self, control: Control) -> dict[str, float]:
        """Each metric over all ranks' batches of the epoch, under Keras' name; collective."""
        if self._setup.follow is None:
            return {}
        self.set_aside()
        return self.renamed(self._setup.metrics.results(self.totals(control)))

    def renamed(self, found: dict[str, float]) -> dict[str, float]:
        """``found`` under the names that Keras has for the metrics."""
        names = getattr(self._setup.metrics, "keras_names", {})

        def renamed(name: str) -> str:
            of_set, slash, metric = name.rpartition("/")
            return names.get(name, f"{of_set}{slash}{names.get(metric, metric)}")
        return {renamed(name): value for name, value in found.items()}

    def end(self) -> None:
        """Measure no more."""
        self._setup.follow, self._before = None, []

    def _follow(self, y: Any, outputs: Any, sample_weight: Any = None, losses: dict[str, Any] | None = None) -> None:
        """Add a training batch as it passes; ``losses``: (sum, weight) of single outputs."""
        self._setup.metrics.update(y, widened(outputs), sample_weight)
        for name, (total, weight) in (losses or {}).items():
            value = keras.ops.divide_no_nan(keras.ops.stop_gradient(total), weight)
            self._losses[name].update_state(value, sample_weight=weight)

    def _take(self, reset: bool = True) -> dict[str, np.ndarray]:
        """Return the totals since the last call that reset them, those of single outputs' losses among them."""
        totals: dict[str, np.ndarray] = self._setup.metrics.take(reset)
        for name, mean in self._losses.items():
            totals[name] = vector(mean)
            if reset:
                mean.reset_state()
        return totals


def _added(*states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sums of totals by name."""
    names = dict.fromkeys(name for each in states for name in each)
    return {name: np.asarray(sum(each[name] for each in states if name in each)) for name in names}
