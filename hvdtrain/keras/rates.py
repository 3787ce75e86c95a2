"""Horovod's learning rate callbacks: a multiplier by epoch, and the warm-up from one rank's rate to that of all.

With momentum the velocity holds learning rates of the past: SGD's is v = m v - lr g. When the rate changes, the past
is rescaled once, v <- v * new / old, before the step that uses the new rate (Goyal et al. 2017, remark 2: "momentum
correction"). Horovod changes the momentum for one step instead; Keras 3 compiles the momentum into the step, and the
two are the same algebra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.errors import UserError


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` up to ``end_epoch``.

    ``multiplier``: a function of the epoch, or a constant k for k ** (epoch - start_epoch). ``staircase``: once per
    epoch; otherwise before every batch, with fractions of epochs, for which ``steps_per_epoch`` is taken from fit if
    it is known there. ``momentum_correction``: rescale velocities when the rate changes. Logs ``lr`` per epoch.
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
        """Find the number of steps per epoch where it is needed."""
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
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Set the rate of the batch that comes."""
        if self.current_epoch < self.start_epoch or (self.end_epoch is not None
                                                     and self.current_epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Log the current rate."""
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
    """Raises the rate from ``initial_lr / size`` to ``initial_lr`` over ``warmup_epochs``, batch by batch.

    ``initial_lr`` is the rate for all ranks together (one process' rate times ``hvd.size()``). ``verbose``: print one
    line on rank 0 at the end. Goyal et al. 2017, section 2.2.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        def multiplier(epoch: float) -> float:
            from hvdtrain import tensorflow as hvd

            assert self.steps_per_epoch
            reached = epoch + 1.0 / self.steps_per_epoch  # so that an epoch ends on a round rate, as in Horovod
            return (reached * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()
        super().__init__(initial_lr, multiplier, start_epoch=0, end_epoch=warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Log the rate, and say when the warm-up is over."""
        from hvdtrain import tensorflow as hvd

        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {self._rate():g}.")


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rescaling(optimizer: Any) -> Callable[[tf.Tensor], None]:
    """A function that multiplies the velocities; of SGD and RMSprop, whose velocities hold the learning rate."""
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
