"""The weights that Keras callbacks see, write and leave behind: those whose metrics are reported.

Owns what stands in the model while callbacks hear of an epoch's or the training's end, the files that they write, and
the metrics of weights that they restore. When callbacks are called is left to `hvdtrain.engine.keras_bridge`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras.compiled import setup_of
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.average import averaged
from hvdtrain.engine.run import Run

SAVES = ("save", "save_weights", "export")
"""Methods of a model that write it; they write the model in its own types, and with ``ema`` the averages."""
SETS_RATE = ("LearningRateScheduler", "ReduceLROnPlateau", "LearningRateScheduleCallback")
"""Callbacks, and classes made of them, that set the learning rate."""


def check(callbacks: Sequence[Any], run: Run) -> None:
    """Refuse callbacks that rule what something else in this run rules; the same on every rank."""
    names = [(type(c).__name__, {base.__name__ for base in type(c).__mro__}) for c in callbacks]
    rate = next((name for name, bases in names if bases & set(SETS_RATE)), "")
    config, optimizer = run.config, setup_of(run.spec.model).optimizer
    ours = [f"schedule.name {config.schedule.name}"] if config.schedule.on else []
    ours += [f"schedule.warmup_steps {config.schedule.warmup_steps}"] if config.schedule.warmup_steps else []
    if optimizer is None:
        ours += [f"optimizer.name {config.optimizer.name}, an optimizer that is not Keras'"]
    elif not ours and callable(getattr(optimizer, "_learning_rate", None)):
        ours += ["a schedule of the compiled optimizer"]
    if rate and ours:
        raise UserError(f"the Keras callback {rate} sets the learning rate together with {' and '.join(ours)}",
                        "one source of the learning rate", f"leave out {rate}, or the schedule and the warm-up, and "
                        "compile the model with an optimizer whose learning rate is a number")
    backup = next((name for name, bases in names if "BackupAndRestore" in bases), "")
    if backup and run.average is not None:
        raise UserError(f"the Keras callback {backup} with ema: its file does not hold the moving average",
                        "checkpoints of hvdtrain", f"leave out {backup} and resume with resume: auto, or set ema: 0")


@contextlib.contextmanager
def one_owner_of_rate(callback: Any, optimizer: Any) -> Iterator[None]:
    """Make Keras' error for a callback that sets the rate of a scheduled optimizer a `UserError`."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        assigns = isinstance(error, AttributeError) and str(error.name).startswith("assign") \
            and keras.ops.is_tensor(error.obj) and callable(getattr(optimizer, "_learning_rate", None))
        if not assigns and "LearningRateSchedule" not in str(error):
            raise
        raise UserError(f"the Keras callback {type(callback).__name__} sets the learning rate together with a schedule",
                        "one source of the learning rate", "leave out one of the two") from error


def saves_after(callbacks: Sequence[Any], batch: int, mine: Sequence[Any]) -> bool:
    """Return whether a ModelCheckpoint with a number as ``save_freq`` writes after ``batch``; the same on every rank.

    Counts on ranks other than 0 as Keras does on rank 0, where the callback is among ``mine``.
    """
    due = False
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            counts = callback._batches_seen_since_last_saving, callback._last_batch_seen
            due |= callback._should_save_on_batch(batch)
            if callback in mine:  # which counts by itself
                callback._batches_seen_since_last_saving, callback._last_batch_seen = counts
    return due


@contextlib.contextmanager
def measured(model: Any, run: Run, writers: bool) -> Iterator[None]:
    """Have the weights in the model that an evaluation measures: with ``ema`` the averages. Collective.

    ``writers``: a callback writes on rank 0 alone, where the model is to be as its user made it. `UserError` where a
    callback changes the averages, which training does not continue from.
    """
    if writers:
        run.written.sync(run)
        run.leave()
    with averaged(run.average):
        before = model.get_weights() if run.average is not None else []
        yield
        changed = run.average is not None and not _equal(before, model.get_weights())
    if writers:
        run.join()
    if run.average is not None and run.control.agree(changed):
        raise UserError("a Keras callback changed the weights at the end of an epoch, where with ema the model holds "
                        "their average", "weights that callbacks only read there",
                        "change weights in on_epoch_begin or on_train_batch_end, or set ema: 0")


class MeasuredSaves:
    """Makes the model's own `SAVES` write what was measured, from the begin to the end of a fit."""

    def __init__(self, model: Any, run: Run) -> None:
        self._model, self._run = model, run

    def begin(self) -> None:
        """Take the place of the methods."""
        for name in SAVES:
            plain = getattr(type(self._model), name)
            vars(self._model)[name] = functools.wraps(plain)(functools.partial(self._save, plain))

    def end(self) -> None:
        """Give the methods back."""
        for name in SAVES:
            vars(self._model).pop(name, None)

    def _save(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(averaged(self._run.average))
            for transform in self._run.parts.transforms:
                if hasattr(transform, "as_built"):
                    stack.enter_context(transform.as_built(self._model))
            return plain(self._model, *args, **kwargs)


class FinalWeights:
    """The weights that a fit ends with, where ``on_train_end`` makes them others than those of training.

    They are measured again, so that the model in memory, its file and the metrics are of the same weights. `release`
    and `hold` exchange them with those of training, for a checkpoint that is asked for later.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state: Any = None
        self._of_training: list[np.ndarray] = []
        self._final: list[np.ndarray] = []

    @contextlib.contextmanager
    def measured(self, run: Run, callbacks: Sequence[Any], steps: dict[int, int]) -> Iterator[None]:
        """Measure the weights that callbacks leave, by each epoch's last step in ``steps``. Collective."""
        if run.parts.layout is not None:  # no rank has all of the model, and no Keras callback is there
            yield
            return
        optimizer = setup_of(self._model).optimizer
        restored = getattr(run.parts.state, "finalized", False)  # best weights, in place of averages
        before = self._model.get_weights()
        if run.average is not None and not run.state.requeue:
            run.average.hold()
            run.services.final.append(run.average)
            before = self._model.get_weights()
        elif getattr(optimizer, "use_ema", False) and not (restored or run.state.requeue):
            optimizer.finalize_variable_values(optimizer._trainable_variables)
        told = self._model.get_weights()
        yield
        found = self._model.get_weights()
        if not run.control.agree(not _equal(before, found)):
            return
        by_callback = run.control.agree(not _equal(told, found))
        run.parts.buffers.share()  # rank 0's weights are those of the file
        self._of_training, self._state = before, run.parts.state
        self._state.finalized = True
        run.services.final.append(self)
        if not run.state.requeue:
            self._measure(run, *(restored_by(callbacks, steps) if by_callback else ("use_ema", None)))

    def _measure(self, run: Run, by: str, step: int | None) -> None:
        state = run.state
        state.findings.metrics_at = state.findings.weights_at = state.cursor.step if step is None else step
        whose = f"weights of step {step}, which {by} has restored" if step is not None else \
            "moving average of the weights (use_ema)" if by else "weights that a Keras callback has set in on_train_end"
        if run.eval_feeds:
            state.metrics = loop.measure_all(run)
            run.record("eval", epoch=state.cursor.epoch, metrics=dict(state.metrics),
                       samples_per_s=state.samples_per_s, unread=run.setup.eval_unread)
        run.note(f"the final model has the {whose}; the final metrics are of these weights, checkpoints hold those "
                 f"of step {state.cursor.step}")

    def release(self) -> None:
        """Put the weights of training into the model."""
        self._final, self._state.finalized = self._model.get_weights(), False
        self._model.set_weights(self._of_training)

    def hold(self) -> None:
        self._state.finalized = True
        self._model.set_weights(self._final)


def _equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


def restored_by(callbacks: Sequence[Any], steps: dict[int, int]) -> tuple[str, int | None]:
    """Return the class and the step of the best epoch of the last callback that restores its best weights."""
    found = [(type(c).__name__, steps.get(c.best_epoch)) for c in callbacks
             if isinstance(c, keras.callbacks.EarlyStopping) and c.restore_best_weights and c.best_weights is not None]
    return found[-1] if found else ("", None)
