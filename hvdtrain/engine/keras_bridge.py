"""Call Keras callbacks in a run of `hvdtrain.Trainer` as `keras.Model.fit` would, on every rank with the same numbers.

Stored state is left to `keras_callback_state`, the weights that callbacks see to `keras_measured_weights`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import keras
import numpy as np

from hvdtrain.backends.keras.compiled import setup_of
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.engine.average import averaged
from hvdtrain.engine.callbacks.history import History
from hvdtrain.engine.keras_callback_state import CallbackStates, decode, encode, numpy_of, writes
from hvdtrain.engine.keras_measured_weights import (
    FinalWeights,
    MeasuredSaves,
    check,
    measured,
    one_owner_of_rate,
    saves_after,
)
from hvdtrain.engine.keras_training_metrics import TrainingMetrics
from hvdtrain.engine.run import Run

NOT_NEEDED = ("MetricAverageCallback", "BroadcastGlobalVariablesCallback", "DivergenceGuardCallback")
"""Those of hvdtrain.keras for plain `model.fit`: a run does by itself what they do."""
STOP = "a Keras callback set model.stop_training"
"""Why a run stops where a callback asked for it."""


class Bridge(History):
    """An hvdtrain callback that drives Keras'.

    Order and names are those of `keras.Model.fit`. ``on_epoch_end``: "loss", the compiled metrics over the training
    batches as they passed, and each evaluated metric as "val_"; ``on_train_batch_end``: the mean loss of the epoch so
    far; ``on_test_batch_*``: no logs. `close` gives the model back.
    """

    state_key = "Bridge"

    def __init__(self, callbacks: Iterable[Any], run: Run) -> None:
        super().__init__()
        model = run.spec.model
        if not isinstance(model, keras.Model):
            raise UserError(f"Keras callbacks for a {type(model).__name__}", "a keras.Model, or hvdtrain's callbacks",
                            "write them as hvdtrain.Callback")
        given = list(callbacks)
        left_out = [type(c).__name__ for c in given if type(c).__name__ in NOT_NEEDED]
        self.callbacks = [c for c in given if type(c).__name__ not in NOT_NEEDED]
        self._mine = [c for c in self.callbacks if run.control.rank == 0 or not writes(c)]
        self.steers = bool(self.callbacks)
        self._writers = any(writes(c) for c in self.callbacks)
        self._model, self._setup, self._trained = model, setup_of(model), TrainingMetrics(model)
        self.renamed = self._trained.renamed
        self._compiled_optimizer: Any = None
        self._eval_feeds: dict[str, Feed] | None = None
        self.hears_test, self.test_batch = False, 0
        self._states, self._saves = CallbackStates(self.callbacks, run.note), MeasuredSaves(model, run)
        self.steps: dict[int, int] = {}
        self._final = FinalWeights(model)
        self._restored: dict[str, Any] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._state: dict[str, Any] = {}
        self._opened = self._ended = -1
        self._rate_before: float | None = None
        for name in left_out:
            run.note(f"{name} is not used: Trainer.fit does the same")
        if run.config.nan_guard == "skip" and any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in given):
            run.note("TerminateOnNaN with nan_guard: skip has no effect: callbacks get no loss of a skipped step; "
                     f"{run.config.max_skipped} of them in a row (max_skipped) end the run, nan_guard: stop the first")

    def fit_start(self, run: Run) -> None:
        """Hand model and parameters to the callbacks and tell them of the begin. Collective."""
        _check_alike(self.callbacks, run)
        check(self.callbacks, run)
        model = self._model
        self._saves.begin()
        self._compiled_optimizer = getattr(model, "optimizer", None)
        if self._setup.optimizer is not None and self._setup.optimizer is not self._compiled_optimizer:
            model.optimizer = self._setup.optimizer
        self._eval_feeds = run.eval_feeds
        run.eval_feeds = {name: cast(Feed, EvaluationFeed(feed, self, run, first=not i))
                          for i, (name, feed) in enumerate(run.eval_feeds.items())}
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
        resumed, self._restored = self._restored, {}
        self._states.begin()
        with unchanged(self._model, run) if resumed and self.callbacks else contextlib.nullcontext():
            self._tell("on_train_begin")
        self._states.begun()
        if resumed:
            self._take_up(resumed)
            model._initial_epoch = None
        else:
            _take_backup(self.callbacks, model, run)
        self._settle(run)

    def epoch_start(self, run: Run) -> None:
        """``on_epoch_begin``; of an epoch that a checkpoint had begun, with the rate from before. Collective."""
        super().epoch_start(run)
        resumed = self._trained.resumed
        self._trained.restart()
        if self._opened == self.epoch and run.state.cursor.epoch_step:
            self._trained.resume(resumed)
            copies = self._states.copies()
            with unchanged(self._model, run) if self.callbacks else contextlib.nullcontext():
                if self._rate_before is not None and _plain_rate(self._setup.optimizer) is not None:
                    self._setup.optimizer.learning_rate = self._rate_before
                self._tell("on_epoch_begin", self.epoch)
            self._states.restore(*copies)
        else:
            self._opened, self._rate_before = self.epoch, _plain_rate(self._setup.optimizer)
            self._tell("on_epoch_begin", self.epoch)
        self._settle(run)

    def step_start(self, run: Run) -> None:
        self._trained.keep()
        self._tell("on_train_batch_begin", run.state.cursor.epoch_step)

    def step_end(self, run: Run) -> None:
        super().step_end(run)
        if not run.updated:
            self._trained.take_back()
        batch = run.state.cursor.epoch_step - 1
        if saves_after(self.callbacks, batch, self._mine):
            run.written.sync(run)
        logs = {"loss": self.loss()} if self._weight else {}  # else TerminateOnNaN would end the run
        self._tell("on_train_batch_end", batch, logs)
        _wish(self._model, run)

    def test_begin(self, run: Run) -> None:
        """``on_test_begin``; metrics of training batches are put aside, since an evaluation counts in the same ones.

        The callbacks hear nothing of the evaluation of an epoch that was cut short.
        """
        self._trained.set_aside()
        self.hears_test, self.test_batch = not _cut_short(run), 0
        if self.hears_test:
            self._tell("on_test_begin")

    def eval_end(self, run: Run) -> None:
        if self.hears_test:
            with averaged(run.average):
                self._tell("on_test_end", self.renamed(run.state.metrics))

    def closed(self, run: Run, logs: dict[str, float]) -> None:
        """``on_epoch_end``, once for each epoch; not of one that was cut short. Collective."""
        if _cut_short(run) or self._ended == self.epoch:
            return
        self._ended, self.steps[self.epoch] = self.epoch, run.state.cursor.step
        with measured(self._model, run, self._writers) if self.callbacks else contextlib.nullcontext():
            self._tell("on_epoch_end", self.epoch, logs)
        self.history = {name: list(values) for name, values in self._model.history.history.items()}
        self._settle(run)

    def fit_end(self, run: Run) -> None:
        """Close an epoch in which a callback stopped the run, as Keras does; `History` alone closes any other."""
        super().fit_end(run)
        epochs = max((len(values) for values in self.history.values()), default=0)
        for values in self.history.values():
            values += [math.nan] * (epochs - len(values))

    def fit_saved(self, run: Run) -> None:
        """``on_train_end``, after the last checkpoint, which holds the weights of training. Collective."""
        with self._final.measured(run, self.callbacks, self.steps):
            if self._writers:
                run.leave()
            self._tell("on_train_end", {name: values[-1] for name, values in self.history.items()})
            if self._writers:
                run.join()
            self.close(run)

    def close(self, run: Run) -> None:
        """Give the model its methods and its compiled optimizer, and the run its evaluation feed back."""
        self._trained.end()
        self._saves.end()
        if self._eval_feeds is not None:
            run.eval_feeds, self._eval_feeds = self._eval_feeds, None
        if self._compiled_optimizer is not None:
            self._model.optimizer = self._compiled_optimizer

    def logs(self, run: Run) -> dict[str, float]:
        """Loss, metrics of the training batches over all ranks, metrics of the evaluation. Collective."""
        found = super().logs(run)
        return {"loss": found.pop("loss"), **self._trained.results(run.control), **found}

    def saving(self, run: Run) -> None:
        """Bring together what the callbacks hold, and the sums of an epoch that is not over. Collective."""
        totals = self._trained.totals(run.control) if self._unfinished else {}
        callbacks, self._arrays = self._states.changed()
        self._state = {
            **History.state_dict(self), "callbacks": callbacks, "opened": self._opened, "ended": self._ended,
            "steps": [list(pair) for pair in self.steps.items()], "rate_before": self._rate_before,
            "metrics": encode(totals, self._arrays, "metrics"),
            "stop": bool(self._model.stop_training) and run.state.stop != STOP}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the state."""
        return self._arrays

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Undo `arrays`; called before `load_state_dict`."""
        self._arrays = dict(arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._restored = dict(state)

    def _tell(self, method: str, *args: Any) -> None:
        for callback in self._mine:
            with one_owner_of_rate(callback, self._setup.optimizer):
                getattr(callback, method)(*args)

    def _take_up(self, state: dict[str, Any]) -> None:
        self._states.restore(state.get("callbacks", []), self._arrays)
        self._opened, self._ended = state.get("opened", -1), state.get("ended", -1)
        self._rate_before, self.steps = state.get("rate_before"), dict(map(tuple, state.get("steps", ())))
        self._trained.resume(decode(state.get("metrics", {}), self._arrays))
        self._model.stop_training = bool(state.get("stop")) or any(
            isinstance(c, keras.callbacks.EarlyStopping) and 0 < c.stopped_epoch and c.patience <= c.wait
            for c in self.callbacks)

    def _settle(self, run: Run) -> None:
        """Set the learning rate to rank 0's, unless a schedule rules it, and note a wish to stop. Collective."""
        _wish(self._model, run)
        optimizer = self._setup.optimizer
        held = getattr(optimizer, "_learning_rate", None)
        if held is None or callable(held):
            return
        own = float(optimizer.learning_rate)
        rate = run.control.bcast(own)
        if rate != own:
            optimizer.learning_rate = rate


def _wish(model: Any, run: Run) -> None:
    if model.stop_training:
        run.want_stop(STOP)


def _cut_short(run: Run) -> bool:
    """Return whether a stop that no callback asked for has cut the epoch at hand short; the same on every rank."""
    return run.stopping() and run.state.cursor.epoch_step > 0 and run.state.stop != STOP


def _plain_rate(optimizer: Any) -> float | None:
    """Return the learning rate of now; None where a schedule or nobody rules it."""
    held = getattr(optimizer, "_learning_rate", None)
    return None if held is None or callable(held) else float(optimizer.learning_rate)


@contextlib.contextmanager
def unchanged(model: Any, run: Run) -> Iterator[None]:
    """Undo changes of weights, optimizer and generators by events that a checkpoint contains already."""
    optimizer: Any = getattr(model, "optimizer", None)
    variables = [*model.weights, *(optimizer.variables if getattr(optimizer, "built", False) else ())]
    values = [numpy_of(v) for v in variables]
    rate, generators = _plain_rate(optimizer), run.parts.state.rank_state()
    yield
    for variable, value in zip(variables, values):
        if numpy_of(variable).tobytes() != value.tobytes():
            variable.assign(value)
    if rate is not None and _plain_rate(optimizer) != rate:
        optimizer.learning_rate = rate
    run.parts.state.load_rank(generators)


def _check_alike(callbacks: list[Any], run: Run) -> None:
    """Refuse callbacks that differ between ranks, whose models they would change differently."""
    found = run.control.gather([type(c).__name__ + (f" with save_freq {c.save_freq}" if hasattr(c, "save_freq") else "")
                                for c in callbacks])
    other = next((r for r, names in enumerate(found) if names != found[0]), None)
    if other is not None:
        raise UserError(f"rank 0 has the Keras callbacks {found[0]} and rank {other} has {found[other]}",
                        "the same on every rank", "give all ranks all of them: writers run on rank 0 alone, and "
                        "any other with the attribute where = \"root\"")


def _take_backup(callbacks: list[Any], model: Any, run: Run) -> None:
    if not any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        return
    epoch = int(run.control.bcast(getattr(model, "_initial_epoch", None) or 0))
    model._initial_epoch = None
    run.parts.buffers.share()
    if epoch:
        steps = epoch * (run.feed.steps_per_epoch or 0) or int(model.optimizer.iterations)
        run.state.cursor = Cursor(epoch, steps, 0, 0)
        run.note(f"BackupAndRestore resumes at epoch {epoch}")


class EvaluationFeed:
    """An evaluation feed that tells Keras' callbacks of each batch. ``first``: not of a further named set."""

    def __init__(self, feed: Any, bridge: Bridge, run: Run, first: bool) -> None:
        self._feed, self._bridge, self._run, self._first = feed, bridge, run, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def eval_epoch(self) -> Iterator[Any]:
        """Yield the feed's batches, between ``on_test_begin`` and the event EVAL_END."""
        bridge = self._bridge
        if self._first:
            bridge.test_begin(self._run)
        tell: Callable[..., None] = bridge._tell if bridge.hears_test else _nothing
        batches = self._feed.eval_epoch()
        try:
            for index, batch in enumerate(batches, bridge.test_batch):
                tell("on_test_batch_begin", index)
                yield batch
                tell("on_test_batch_end", index)
                bridge.test_batch = index + 1
        finally:
            batches.close()


def _nothing(*args: Any) -> None:
    """Tell nobody."""
