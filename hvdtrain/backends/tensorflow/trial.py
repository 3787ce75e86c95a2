"""Samples computed without training on them: for their time and memory, for a first check, and for the loss alone.

Owns what is restored afterwards: variables, statistics and random generators. Exchanges nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.losses import added_losses, computing_eps, generator_kept, neutral_layers
from hvdtrain.backends.loss_coupling import Evaluate, LossValue, per_row
from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.buffers import VariableCopies, written_in_forward
from hvdtrain.core import rng
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts


class Trial:
    """Calls ``gradients(batch)``, a graph of forward and backward, on ``model`` and restores what that changed."""

    def __init__(self, model: keras.Model, gradients: Callable[[tuple[Any, ...]], list[tf.Tensor]]) -> None:
        self._model, self._gradients = model, gradients
        self._buffers = VariableCopies(written_in_forward(model))

    def __call__(self, batch: Batch) -> list[tf.Tensor]:
        random = state.random_arrays(self._model)
        self._buffers.keep()
        try:
            tensors = self._gradients(tuple(batch))
            for tensor in tensors:
                if "GPU" in tensor.device:
                    tensor[:1].numpy()  # a copy to the host waits for the device
            return tensors
        finally:
            self._buffers.put_back()
            state.load_random(self._model, random)


def free_cached() -> None:
    """Do nothing: TensorFlow frees nothing before the process ends."""


def hold_bytes(n: int) -> None:
    """Do nothing: Keras has made the optimizer's state before."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is a shortage of the device's memory."""
    return isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the most bytes that the device held at once while ``work`` ran, all of this process's; 0 on a CPU."""
    if not tf.config.list_physical_devices("GPU"):
        work()
        return 0
    tf.config.experimental.reset_memory_stats("GPU:0")
    work()
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


def peak_so_far() -> int:
    """Return the most bytes that the device has held at once in this process; 0 on a CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if gpus else 0


def try_samples(parts: ModelParts, batch: Batch, training: bool) -> list[str]:
    """Run forward and loss as in training, or metrics as in an evaluation; no backward. Raise what the model raises.

    Eager, so that the graphs of training are traced once, by its first step. Return the variables that this wrote to,
    without BatchNorm's statistics. Comes before `Stage.connect`.
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
    stage: Any = parts.stage
    evaluator: Any = parts.evaluator
    buffers: Any = parts.buffers
    with _untouched(parts.model) as written, generator_kept(), stage.class_numbers.checked(tuple(batch)):
        if training:
            stage.task(parts.model, tensors, True)
        else:
            evaluator.once(tensors)
            parts.measure_names()
    return buffers.names_of(written)


@contextlib.contextmanager
def untouched(parts: ModelParts, batch: Batch) -> Iterator[None]:
    """Restore everything after the body: for `hvdtrain.engine.first_sample`."""
    stage: Any = parts.stage
    evaluator: Any = parts.evaluator
    with _untouched(parts.model), generator_kept(), stage.class_numbers.checked(tuple(batch)):
        yield
    evaluator.totals()


@contextlib.contextmanager
def _untouched(model: Any) -> Iterator[list[Any]]:
    """Yield a list that holds, afterwards, the variables that were restored."""
    written: list[Any] = []
    states = [v for layer in model._flatten_layers() for v in tf.nest.flatten(getattr(layer, "states", None) or [])
              if isinstance(v, keras.Variable)]  # of a stateful RNN, which Keras counts among no variables
    kept = [(v, tf.identity(v.value)) for v in (*model.variables, *states)]  # copied where one is written to
    random, drawn = rng.capture(), _eager_state()
    try:
        yield written
    finally:
        rng.restore(random)
        _load_eager_state(drawn)
        model._clear_losses()
        for variable, value in kept:
            if not bool(tf.reduce_all(tf.equal(variable.value, value))):
                variable.assign(value)
                written.append(variable)


def _eager_state() -> Any:
    """Return the generator of eager operations' seeds; None if TensorFlow has no such attribute."""
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def _load_eager_state(drawn: Any) -> None:
    """Undo `_eager_state`. Kernels that were made meanwhile keep a count of draws, and are dropped."""
    from tensorflow.python.eager import context

    if drawn is not None:
        context.context()._rng.setstate(drawn)
        context.context().clear_kernel_cache()


def loss_evaluator(parts: ModelParts, pool: Batch) -> contextlib.AbstractContextManager[Evaluate]:
    """Return a context that gives an evaluator of the loss of samples of ``pool``, and restores everything."""
    stage: Any = parts.stage

    def of_samples(numbers: Sequence[int], training: bool) -> tuple[Any, Any]:
        batch = tuple(tf.convert_to_tensor(array[list(numbers)]) for array in pool)
        return stage.task(parts.model, batch, training)  # type: ignore[no-any-return]
    return evaluator_of(parts.model, of_samples, stage.task.of_layers)


@contextlib.contextmanager
def evaluator_of(model: Any, of_samples: Callable[[Sequence[int], bool], tuple[Any, Any]],
                 of_layers: bool = True) -> Iterator[Evaluate]:
    """Yield a function that evaluates ``of_samples(numbers, training) -> (loss_sum, weight)``; restore ``model``.

    ``of_layers``: what layers add to the loss is part of it.
    """
    def evaluate(numbers: Sequence[int], training: bool) -> LossValue:
        outputs: list[Any] = []

        def keep(called: Any, inputs: Any, found: Any) -> None:
            outputs.extend(() if outputs else tf.nest.flatten(found))

        with neutral_layers(model, keep):
            total, weight = map(float, of_samples(numbers, training))
            eps = computing_eps(model)
        leaves = [np.asarray(tf.cast(t, tf.float64)) for t in outputs if tf.is_tensor(t) and t.dtype.is_floating]
        return LossValue(total, weight, added_losses(model) * weight if of_layers else 0.0, eps,
                         per_row(leaves, len(numbers)))

    with _untouched(model), generator_kept(), _without_tf32():
        yield evaluate


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    wanted = before and not tf.config.list_physical_devices("GPU")
    try:
        tf.config.experimental.enable_tensor_float_32_execution(wanted)
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
