"""Average the logs of plain `keras.Model.fit` exactly over all ranks: `MetricAverageCallback`.

Owns when states are read and how they are combined: the states of metrics are summed over ranks and the metric
evaluates the sum (`hvdtrain.backends.keras.metrics`), since a mean of means or of AUCs is neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras.metrics import in_order, is_additive, result_of, vector
from hvdtrain.core.errors import UserError, count
from hvdtrain.keras import data
from hvdtrain.keras.data import check_losses


@dataclass
class Phase:
    """State of one pass over data: its dataset, metrics before a short last batch (None: no such), and averages."""

    shard: data.ShardedDataset | None = None
    before: dict[str, np.ndarray] | None = None
    mixed: bool = False
    logs: dict[str, Any] | None = None


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace the logs by those over all ranks, at the end of an epoch and of its validation. Collective.

    Put it before callbacks that read the logs. Exact for "loss", the losses of single outputs, and metrics whose states
    are counts or sums: all of Keras' but `hvdtrain.backends.keras.metrics.NOT_ADDITIVE`, subclasses of Mean and Sum,
    and classes with ``additive = True``. Others are averaged, weighted by samples, and named in a warning once. The
    scaling of `hvdtrain.keras.shard` is undone. ``device``: accepted as in Horovod, unused. ``process_set``: the ranks
    that count, all by default.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        self.device, self._process_set = device, process_set
        self._train: Phase | None = None
        self._test: Phase | None = None
        self._warned: set[str] = set()

    def on_train_begin(self, logs: dict | None = None) -> None:
        check_lengths(self.model, self.params, self._gather)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        data.forget()
        self._train, self._test = Phase(), None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._watch(self._train, batch)

    def on_test_begin(self, logs: dict | None = None) -> None:
        if self._train is not None and self._train.logs is None:
            self._train.logs = self._averages(self._train, "a validation after the epoch")
        data.forget()
        self._test = Phase()

    def on_test_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._watch(self._test, batch)

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._test is not None:
            self._test.logs = self._averages(self._test, "the end of a validation")
            _replace(logs, self._test.logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._train is None:
            return
        if self._train.logs is None:
            self._train.logs = self._averages(self._train, "no validation after the epoch")
        _replace(logs, self._train.logs)
        if self._test is not None and self._test.logs is not None:
            _replace(logs, {f"val_{name}": value for name, value in self._test.logs.items()})
        self._average_plainly(logs, self._train.logs)
        self._train = None

    def _watch(self, phase: Phase | None, batch: int) -> None:
        if phase is None or phase.before is not None:
            return
        if phase.shard is None:
            phase.shard = data.being_read()
            if phase.shard is None:
                return
            check_losses(self.model)
        last = len(phase.shard) - 1
        if phase.shard.total(last) != phase.shard.global_batch and batch + self._stride() > last:
            phase.mixed = batch != last
            phase.before = {name: vector(metric) for name, metric, _ in named_metrics(self.model)}

    def _stride(self) -> int:
        return int(getattr(self.model, "steps_per_execution", 1))

    def _averages(self, phase: Phase, when: str) -> dict[str, Any]:
        """Return every metric of the model over all ranks, which all are at ``when``; collective."""
        metrics = named_metrics(self.model)
        if phase.mixed:
            self._warn("steps_per_execution joins the short last batch with others: with unequal "
                       "shares the logs are approximate; give shard(..., drop_remainder=True), or a number that "
                       "divides the steps")
        mine: dict[str, np.ndarray] = {}
        samples = _samples(self.model)
        for name, metric, kind in metrics:
            if kind == "loss":
                mine[name] = _loss(metric, name, phase, samples)
            elif is_additive(metric):
                mine[name] = _state(metric, name, kind, phase)
            else:
                self._warn(f"{name} ({type(metric).__name__}) is averaged over the ranks, weighted by samples; "
                           "if its states may be added, give the class additive = True")
                value = float(np.mean(keras.tree.flatten(keras.tree.map_structure(np.asarray, metric.result()))[0]))
                mine[name] = np.array([value * samples, samples])
        summed = self._summed(mine, when)
        found = {}
        for name, metric, kind in metrics:
            total_k = summed[name]
            exact = kind != "loss" and is_additive(metric)
            found[name] = result_of(metric, total_k) if exact else float(total_k[0] / max(total_k[1], 1e-300))
        return found

    def _average_plainly(self, logs: Any, known: dict[str, Any]) -> None:
        """Average the logs of a custom train step, weighted by samples; names that ranks lack stay. Collective."""
        samples = _samples(self.model)
        mine = {name: np.array([float(value) * samples, samples]) for name, value in (logs or {}).items()
                if name.removeprefix("val_") not in known and name != "learning_rate" and np.ndim(value) == 0
                and np.asarray(value).dtype.kind in "biuf"}
        everyone = self._together("the end of the epoch", mine)
        shared = [name for name in mine if all(name in one for one in everyone)]
        for name in sorted({name for one in everyone for name in one} - set(shared)):
            those = [rank for rank, one in enumerate(everyone) if name in one]
            self._warn(f"{name} is in the logs of rank {', '.join(map(str, those))} only and is not averaged: "
                       "run the callback that adds it on every rank, or put it after MetricAverageCallback")
        if shared:
            self._warn(f"{', '.join(sorted(shared))}: no metric of the model; averaged over the ranks, weighted by "
                       "samples")
        for name in shared:
            total, weight = sum(one[name] for one in everyone)
            logs[name] = float(total / weight)

    def _summed(self, mine: dict[str, np.ndarray], when: str) -> dict[str, np.ndarray]:
        everyone = self._together(when, mine)
        other = next((r for r, one in enumerate(everyone) if list(one) != list(everyone[0])), None)
        if other is not None:
            raise UserError(f"rank 0 has the metrics {list(everyone[0])} and rank {other} has {list(everyone[other])}",
                            "the same on every rank", "compile in the same way on all ranks")
        return {name: sum(one[name] for one in everyone) for name in everyone[0]}

    def _together(self, when: str, mine: dict[str, np.ndarray]) -> list[Any]:
        """Return every rank's numbers; `UserError` unless all ranks are at ``when``; collective."""
        found = self._gather((when, mine))
        other = next((r for r, (theirs, _) in enumerate(found) if theirs != found[0][0]), None)
        if other is not None:
            raise UserError(f"rank 0 is at {found[0][0]} and rank {other} at {found[other][0]}",
                            "the same epochs and validations on every rank",
                            "give all ranks validation_data and validation_freq, or none")
        return [numbers for _, numbers in found]

    def _gather(self, mine: Any) -> list[Any]:
        if keras.backend.backend() == "tensorflow":
            from hvdtrain.tensorflow import functions

            return functions.gathered(mine, *(() if self._process_set is None else (self._process_set,)))
        from hvdtrain.cluster import boot

        control = boot.current_control()
        return [mine] if control is None else control.gather(mine)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


def check_lengths(model: Any, params: dict[str, Any], gather: Callable[[Any], list[Any]]) -> None:
    """Raise `UserError` on every rank where known numbers of batches or epochs differ. Collective."""
    optimizer = getattr(model, "optimizer", None)
    if not hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_hvd_exchange") \
            and not hasattr(optimizer, "_hvd_exchange"):
        return
    found = gather({key: params.get(key) for key in ("steps", "epochs")})
    for key, noun, do in (("steps", ("batch", "batches"),
                           "use hvd.shard(x, y, global_batch=...), or give fit steps_per_epoch"),
                          ("epochs", ("epoch",), "give fit the same epochs on all ranks")):
        numbers = [one[key] for one in found]
        other = next((r for r, n in enumerate(numbers) if n != numbers[0] and None not in (n, numbers[0])), None)
        if other is not None:
            raise UserError(f"rank {other} has {count(numbers[other], *noun)}, rank 0 has {numbers[0]}",
                            "the same number on every rank, since each step waits for all ranks", do)


def named_metrics(model: Any) -> list[tuple[str, Any, str]]:
    """Return (name in the logs, metric, kind) of a model; kind: "loss", "plain", or "weighted" by sample weights."""
    found: list[tuple[str, Any, str]] = []
    tracker, compiled = (getattr(model, name, None) for name in ("_loss_tracker", "_compile_metrics"))
    of_outputs = {id(metric) for metric in getattr(getattr(model, "_compile_loss", None), "metrics", ())}
    for metric in model.metrics:
        if id(metric) == id(compiled):
            found += [(name, one, "weighted" if weighted else "plain")
                      for name, one, _, weighted in (in_order(metric) if metric.built else [])]
        else:
            is_loss = id(metric) == id(tracker) or id(metric) in of_outputs
            found.append((metric.name, metric, "loss" if is_loss else "plain"))
    return found


def _state(metric: Any, name: str, kind: str, phase: Phase) -> np.ndarray:
    """Return this rank's state without the scaling and the placeholders of `ShardedDataset`."""
    now_k = vector(metric)
    shard = phase.shard
    if shard is None:
        return now_k

    def undone(step: int) -> float:
        mine = shard.count(step)
        scale = mine * shard.size / shard.total(step) if kind == "weighted" else 1.0
        return 1.0 / scale if mine else 0.0

    if phase.before is None:
        return now_k * undone(0)
    before_k = phase.before.get(name, np.zeros_like(now_k))
    return before_k * undone(0) + (now_k - before_k) * undone(len(shard) - 1)


def _loss(metric: Any, name: str, phase: Phase, samples: float) -> np.ndarray:
    """Return [sum, weight] of this rank's loss, of the global batch's W samples with a `ShardedDataset`."""
    now_k, shard = vector(metric), phase.shard
    if shard is None and name == "loss":
        return now_k
    if shard is None:  # Keras weighs the losses of single outputs by batches, where a graph leaves their size open
        return np.array([now_k[0] / now_k[1] * samples, samples]) if now_k[1] else np.zeros(2)
    steps, parts = len(shard), []
    if phase.before is None:
        parts = [(now_k, float(shard.global_batch * steps))]
    else:
        before_k = phase.before.get(name, np.zeros_like(now_k))
        short = shard.total(steps - 1)
        parts = [(before_k, float(shard.global_batch * (steps - 1))), (now_k - before_k, float(short))]
    sums = [(total / count * weight, weight) for (total, count), weight in parts if count]
    return np.array([sum(s for s, _ in sums), sum(w for _, w in sums)])


def _samples(model: Any) -> float:
    tracker = getattr(model, "_loss_tracker", None)  # since the metrics were reset; 1 without a tracked loss
    return float(vector(tracker)[1]) or 1.0 if tracker is not None else 1.0


def _replace(logs: dict | None, found: dict[str, Any]) -> None:
    for name in logs or {}:
        if name in found:
            logs[name] = found[name]  # type: ignore[index]
