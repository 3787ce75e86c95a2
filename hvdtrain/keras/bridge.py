"""Call Keras callbacks in a run of `hvdtrain.Trainer` as `keras.Model.fit` would.

Owns who runs where and what becomes of what they change. Callbacks run on every rank with the same numbers, so that
what they change (weights, the rate) changes alike; those that only write, on rank 0. The rate is rank 0's at the
begin of a fit and at both ends of an epoch. ``model.stop_training`` on any rank is a wish that all ranks settle by a
vote (law 6): after an epoch at once, after a batch with the next one. Knows no backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from hvdtrain.callbacks.history import History
from hvdtrain.data.cursor import Cursor
from hvdtrain.errors import UserError
from hvdtrain.keras.compiled import setup_of
from hvdtrain.keras.training_metrics import TrainingMetrics

WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "BackupAndRestore", "RemoteMonitor", "ProgbarLogger",
           "OrbaxCheckpoint")
"""Keras callbacks, and classes made of them, that run on rank 0 alone; so does any with ``where = "root"``."""
NOT_NEEDED = ("MetricAverageCallback", "BroadcastGlobalVariablesCallback", "DivergenceGuardCallback")
"""Those of hvdtrain.keras for plain `model.fit`: a run does by itself what they do."""


def writes(callback: Any) -> bool:
    """Whether a Keras callback runs on rank 0 alone."""
    said = getattr(callback, "where", None)
    names = {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith("keras.")}
    return said == "root" if said in ("root", "all") else bool(names & set(WRITERS))


class Bridge(History):
    """An hvdtrain callback that drives Keras'.

    Order and names are those of `keras.Model.fit`. ``on_epoch_end``: "loss", the compiled metrics over the training
    batches as they passed, and each evaluated metric as "val_"; ``on_train_batch_end``: the mean loss of the epoch so
    far; ``on_test_batch_*``: no logs. `close` gives the model back.
    """

    def __init__(self, callbacks: Iterable[Any], run: Any) -> None:
        super().__init__()
        model = run.spec.model
        if not isinstance(model, keras.Model):
            raise UserError(f"Keras callbacks for a {type(model).__name__}", "a keras.Model, or hvdtrain's callbacks",
                            "write them as hvdtrain.callbacks.base.Callback")
        given = list(callbacks)
        left_out = [type(c).__name__ for c in given if type(c).__name__ in NOT_NEEDED]
        self._all = [c for c in given if type(c).__name__ not in NOT_NEEDED]
        self._mine = [c for c in self._all if run.control.rank == 0 or not writes(c)]
        self._writers = any(writes(c) for c in self._all)
        self._model, self._setup, self._trained = model, setup_of(model), TrainingMetrics(model)
        self._compiled_optimizer: Any = None
        self._eval_feed: Any = None
        self._at_begin: list[dict[str, Any]] = []
        self._restored: list[Any] = []
        for name in left_out:
            run.note(f"{name} is left out: Trainer.fit does by itself what it does")

    # --- what a run tells ------------------------------------------------------------------------------------------

    def fit_start(self, run: Any) -> None:
        """Hand model and parameters to the callbacks and tell them of the begin. Collective."""
        self._check_alike(run)
        model = self._model
        self._compiled_optimizer = getattr(model, "optimizer", None)
        if self._setup.optimizer is not None and self._setup.optimizer is not self._compiled_optimizer:
            model.optimizer = self._setup.optimizer
        if run.eval_feed is not None:
            self._eval_feed, run.eval_feed = run.eval_feed, Watched(run.eval_feed, self)
        self._trained.begin(run)
        params = {"verbose": 0, "epochs": run.config.epochs, "steps": run.feed.steps_per_epoch}
        model.stop_training = False
        model._initial_epoch = None
        if not any(isinstance(c, keras.callbacks.History) for c in self._mine):
            self._mine.append(keras.callbacks.History())
        model.history = next(c for c in self._mine if isinstance(c, keras.callbacks.History))
        for callback in self._mine:
            callback.set_params(params)
            callback.set_model(model)
        self._tell("on_train_begin")
        self._take_up()
        self._take_backup(run)
        self._settle(run)

    def epoch_start(self, run: Any) -> None:
        """``on_epoch_begin``. Collective."""
        super().epoch_start(run)
        self._trained.restart()
        self._tell("on_epoch_begin", self.epoch)
        self._settle(run)

    def step_start(self, run: Any) -> None:
        """``on_train_batch_begin``."""
        self._trained.keep()
        self._tell("on_train_batch_begin", run.state.cursor.epoch_step)

    def step_end(self, run: Any) -> None:
        """``on_train_batch_end``; a skipped step counts in no metric."""
        super().step_end(run)
        if not run.updated:
            self._trained.take_back()
        logs = {"loss": self.loss()} if self._weight else {}  # else TerminateOnNaN would end the run
        self._tell("on_train_batch_end", run.state.cursor.epoch_step - 1, logs)
        self._wish(run)

    def test_begin(self) -> None:
        """``on_test_begin``; metrics of training batches are put aside, since an evaluation counts in the same ones."""
        self._trained.set_aside()
        self._tell("on_test_begin")

    def eval_end(self, run: Any) -> None:
        """``on_test_end``, with the metrics under Keras' names."""
        super().eval_end(run)
        self._evaluated = self._trained.renamed(self._evaluated)
        self._tell("on_test_end", dict(self._evaluated))

    def closed(self, run: Any, logs: dict[str, float]) -> None:
        """``on_epoch_end``. Collective."""
        if self._writers:
            run.parts.buffers.sync()
            run.leave()
        self._tell("on_epoch_end", self.epoch, logs)
        self.history = {name: list(values) for name, values in self._model.history.history.items()}
        if self._writers:
            run.join()
        self._settle(run)

    def fit_end(self, run: Any) -> None:
        """``on_train_end``, also of an epoch that was cut short. Collective."""
        super().fit_end(run)
        if self._writers:
            run.leave()
        self._tell("on_train_end", {name: values[-1] for name, values in self.history.items()})
        if self._writers:
            run.join()
        self.close(run)

    def close(self, run: Any) -> None:
        """Give the model its compiled optimizer and the run its evaluation feed back."""
        self._trained.end()
        if self._eval_feed is not None:
            run.eval_feed, self._eval_feed = self._eval_feed, None
        if self._compiled_optimizer is not None:
            self._model.optimizer = self._compiled_optimizer

    def logs(self, run: Any) -> dict[str, float]:
        """Loss, metrics of the training batches over all ranks, metrics of the evaluation. Collective."""
        found = super().logs(run)
        return {"loss": found.pop("loss"), **self._trained.results(run.control), **found}

    def continued(self, run: Any) -> None:
        """Keep what the callbacks have counted, which ``on_train_begin`` sets back."""
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The numbers and words that each callback has changed since training began: best value, patience used."""
        changed = [{k: v for k, v in _plain(c).items() if k not in before or before[k] != v}
                   for c, before in zip(self._all, self._at_begin)]
        return {"callbacks": [[type(c).__name__, own] for c, own in zip(self._all, changed)]} if any(changed) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; given to the callbacks once training has begun, where Keras' set themselves back."""
        self._restored = list(state.get("callbacks", []))

    # --- how ---------------------------------------------------------------------------------------------------------

    def _tell(self, method: str, *args: Any) -> None:
        for callback in self._mine:
            getattr(callback, method)(*args)

    def _wish(self, run: Any) -> None:
        if self._model.stop_training:
            run.want_stop("a Keras callback set model.stop_training")

    def _settle(self, run: Any) -> None:
        """Set the learning rate to rank 0's, unless a schedule rules it, and note a wish to stop. Collective."""
        self._wish(run)
        optimizer = self._setup.optimizer
        held = getattr(optimizer, "_learning_rate", None)
        if held is None or callable(held):
            return
        own = float(optimizer.learning_rate)
        rate = run.control.bcast(own)
        if rate != own:
            optimizer.learning_rate = rate

    def _check_alike(self, run: Any) -> None:
        """Callbacks that are not the same on all ranks would change the ranks' models unlike."""
        found = run.control.gather([type(c).__name__ for c in self._all])
        other = next((r for r, names in enumerate(found) if names != found[0]), None)
        if other is not None:
            raise UserError(f"rank 0 has the Keras callbacks {found[0]} and rank {other} has {found[other]}",
                            "the same on every rank", "give all ranks all of them: writers run on rank 0 alone, and "
                            "any other with the attribute where = \"root\"")

    def _take_up(self) -> None:
        self._at_begin = [_plain(c) for c in self._all]
        for callback, (name, values) in zip(self._all, self._restored):
            if type(callback).__name__ == name:
                vars(callback).update(values)

    def _take_backup(self, run: Any) -> None:
        """Go on where rank 0's BackupAndRestore has begun, on all ranks."""
        if not any(isinstance(c, keras.callbacks.BackupAndRestore) for c in self._all):
            return
        model = self._model
        epoch = int(run.control.bcast(getattr(model, "_initial_epoch", None) or 0))
        model._initial_epoch = None
        run.parts.buffers.share()
        if epoch:
            steps = epoch * (run.feed.steps_per_epoch or 0) or int(model.optimizer.iterations)
            run.state.cursor = Cursor(epoch, steps, 0, 0)
            run.note(f"BackupAndRestore goes on at epoch {epoch}")


def _plain(callback: Any) -> dict[str, Any]:
    """A callback's public attributes that JSON can hold, but ``min_delta``, whose sign Keras turns."""
    found = {}
    for name, value in vars(callback).items():
        if name.startswith("_") or name == "min_delta":
            continue
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (bool, int, str)) or isinstance(value, float) and math.isfinite(value):
            found[name] = value
    return found


class Watched:
    """An evaluation feed that tells Keras' callbacks of each batch; all else is the feed's."""

    def __init__(self, feed: Any, bridge: Bridge) -> None:
        self._feed, self._bridge = feed, bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def eval_epoch(self) -> Iterator[Any]:
        """The feed's, between ``on_test_begin`` and the event EVAL_END."""
        self._bridge.test_begin()
        batches = self._feed.eval_epoch()
        try:
            for index, batch in enumerate(batches):
                self._bridge._tell("on_test_batch_begin", index)
                yield batch
                self._bridge._tell("on_test_batch_end", index)
        finally:
            batches.close()
