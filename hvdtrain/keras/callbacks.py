"""Horovod's Keras callbacks on Keras 3: broadcast, best checkpoint, learning rates; and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import tensorflow as hvd
from hvdtrain.core.errors import UserError
from hvdtrain.keras.exchange import exchange_of, tf_variable
from hvdtrain.keras.guard import DivergenceGuard, frozen_weights, stops_early
from hvdtrain.tensorflow import functions

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "DivergenceGuardCallback",  # noqa: F822
           "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback"]


def __getattr__(name: str) -> Any:
    if name != "MetricAverageCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    from hvdtrain.keras.metrics import MetricAverageCallback

    return MetricAverageCallback


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give every rank the weights, BatchNorm statistics and optimizer state of ``root_rank``, at the start of fit.

    Before the first batch; what exists only later (slots of optimizers of a custom train step, a model that builds
    itself in its first call) is broadcast after it. Random generators (dropout) and metrics stay each rank's own.
    ``device``: where the broadcast is placed. ``local_variables``: those that each rank keeps. Collective.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        self._local: set[Any] = set()
        single = isinstance(local_variables, (tf.Variable, keras.Variable))
        for variable in [local_variables] if single else list(local_variables or ()):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        if not isinstance(var, (tf.Variable, keras.Variable)):
            raise UserError(f"{type(var).__name__} in local_variables", "variables", "give layer.weights, not layers")
        self._local.add(tf_variable(var).ref())

    def on_train_begin(self, logs: dict | None = None) -> None:
        from hvdtrain.keras.metrics import check_lengths

        check_lengths(self.model, self.params, functions.gathered)
        exchange = exchange_of(getattr(self.model, "optimizer", None))
        if exchange is not None and not self.broadcast_done and not self.model.built:
            exchange.guard.begin_after(self.model.steps_per_execution)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self.broadcast_done or not self.model.built:
            return
        if type(self.model).train_step is keras.Model.train_step and not self.model.optimizer.built:
            with keras.name_scope(self.model.optimizer.name, caller=self.model.optimizer):
                self.model.optimizer.build(self.model.trainable_variables)
        self._broadcast()
        self.broadcast_done = all(optimizer.built for optimizer in _optimizers(self.model))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()
            self.broadcast_done = True

    def _broadcast(self) -> None:
        variables = [*self.model.weights, *(v for o in _optimizers(self.model) for v in o.variables)]
        plain = [v for v in map(tf_variable, variables) if v.ref() not in self._local]
        with tf.device(self.device):
            hvd.broadcast_variables(plain, root_rank=self.root_rank)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keep the best model only, as Keras' ModelCheckpoint does, written by rank 0 alone.

    Horovod's arguments; ``filepath`` is ours. Without it set the attribute ``filepath`` before fit, as Horovod's
    estimators do. Rank 0's logs decide: put MetricAverageCallback before it.
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False,
                 mode: str = "auto", save_freq: Any = "epoch", filepath: Any = None) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(f"unset{ending}" if filepath is None else filepath, monitor=monitor, verbose=verbose,
                         save_best_only=True, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self.filepath is None:
            raise UserError("BestModelCheckpoint without a path", "filepath",
                            "pass filepath='best.keras', or set the callback's filepath before fit")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)


class DivergenceGuardCallback(keras.callbacks.Callback):
    """Compare the ranks' weights and learning rates; stop every rank if they differ.

    After batches 2, 8 and then every ``every``-th, and at the end of each epoch and of ``fit``. For custom training
    steps and plain optimizers: `hvdtrain.keras.DistributedOptimizer` compares by itself. ``local_variables``: left out.
    ``process_set``: the ranks that compare. Raises `hvdtrain.engine.weight_checks.Diverged`, which names the first
    variable, the ranks and the likely cause. Collective.
    """

    def __init__(self, every: int = 200, process_set: Any = None, local_variables: Any = ()) -> None:
        super().__init__()
        self._every, self._process_set = every, hvd.global_process_set if process_set is None else process_set
        self._local = {tf_variable(v).ref() for v in local_variables}
        self._guard: DivergenceGuard | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._guard = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self._guard is None and self.model.built:
            exchange = exchange_of(getattr(self.model, "optimizer", None))
            self._guard = DivergenceGuard(self._process_set, self._every, "DivergenceGuardCallback",
                                          exchange is not None)
            own = getattr(self.model, "optimizer", None)
            self._guard.before_update(self._shared(self.model.trainable_variables), None if own is None else
                                      lambda: own.learning_rate, lambda: self._shared(frozen_weights(self.model)))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._guard is not None:
            self._guard.between_steps(1)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._guard is not None:
            self._guard.after_epoch(stops_early(self, epoch))

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._guard is not None:
            self._guard.after_epoch(fit=True)

    def _shared(self, variables: Iterable[Any]) -> list[Any]:
        return [v for v in variables if tf_variable(v).ref() not in self._local]


def _optimizers(model: Any) -> list[Any]:
    """Return the optimizers that a model holds, its own first; custom train steps may use several."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique = {id(o): o for o in found if isinstance(o, keras.optimizers.Optimizer)}
    return list(unique.values())


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` up to ``end_epoch``.

    ``multiplier``: a function of the epoch, or a constant k for k ** (epoch - start_epoch). ``staircase``: once per
    epoch; otherwise before every batch, with fractions of epochs, for which ``steps_per_epoch`` is taken from fit if
    known there. ``momentum_correction``: rescale velocities when the rate changes, v <- v * new / old (Goyal et al.
    2017, remark 2; Horovod changes the momentum for one step instead, which is the same algebra). Logs ``lr``.
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise UserError("initial_lr=None", "the learning rate that the multiplier multiplies",
                            "give the rate the optimizer was made with")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = multiplier
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)
        self._rescale: Callable[[tf.Tensor], None] | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not isinstance(getattr(_inner(self.model.optimizer), "_learning_rate", None), keras.Variable):
            raise UserError("an optimizer whose learning rate is a schedule or a function", "a number",
                            f"give either the optimizer a schedule or fit a {type(self).__name__}, not both")
        self._rescale = None
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UserError("data whose number of batches fit does not know", "steps_per_epoch",
                                f"pass steps_per_epoch=... to {type(self).__name__}")

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self.current_epoch < self.start_epoch or (self.end_epoch is not None
                                                     and self.current_epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old and np.float32(new) != np.float32(old) and self.model.optimizer.built:
            if self._rescale is None:
                self._rescale = _rescaling(_inner(self.model.optimizer))
            self._rescale(tf.constant(new / old, tf.float32))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the rate from ``initial_lr / size`` to ``initial_lr`` over ``warmup_epochs``, batch by batch.

    ``initial_lr`` is the rate for all ranks together (one process' rate times ``hvd.size()``). ``verbose``: print one
    line on rank 0 at the end. Source: Goyal et al. 2017, section 2.2.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            reached = epoch + 1.0 / self.steps_per_epoch  # so that an epoch ends on a round rate, as in Horovod
            return (reached * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()
        super().__init__(initial_lr, multiplier, start_epoch=0, end_epoch=warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {self._rate():g}.")


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rescaling(optimizer: Any) -> Callable[[tf.Tensor], None]:
    """Return a function that multiplies the velocities that hold the learning rate: of SGD and RMSprop."""
    velocities: list[Any] = []
    if isinstance(optimizer, keras.optimizers.SGD):
        velocities = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        velocities = getattr(optimizer, "_momentums", [])
    plain = [v.value for v in velocities if v is not None]

    @tf.function(jit_compile=False, autograph=False)
    def rescale(factor: tf.Tensor) -> None:
        for velocity in plain:
            velocity.assign(velocity * tf.cast(factor, velocity.dtype))
    return rescale if plain else lambda factor: None
