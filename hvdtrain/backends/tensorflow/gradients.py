"""Gradients in a step's graphs: of one rank's micro-batch, and their sum over several of them.

Owns the operations, and the variables that keep a sum between calls. Which graph is traced and run when is `stage`'s.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import recompute
from hvdtrain.backends.tensorflow.buffers import VariableCopies
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.placement import follow
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.backends.tensorflow.task import Task
from hvdtrain.backends.tensorflow.transforms.compile import XlaCompile
from hvdtrain.backends.tensorflow.transforms.remat import Remat
from hvdtrain.core.protocols.types import Bucket


class Gradients:
    """Gradients of ``task`` on ``model``; with a ``split`` each of them is on the device of its variable.

    ``scaled``: losses are multiplied by a loss scale, which `rescale` sets, and gradients divided by it. Horovod's
    operations are not marked stateful, so nothing that reaches them may be a constant: TensorFlow would run the
    collective while it optimises the graph. Hence `zero` is a variable.
    """

    def __init__(self, model: keras.Model, task: Task, scaled: bool = False, split: Split | None = None,
                 remat: Remat | None = None) -> None:
        self._model, self.task, self.split, self._remat = model, task, split, remat
        self._keras_variables = list(model.trainable_variables)
        self._variables = [v.value for v in self._keras_variables]
        self._sums: list[tf.Variable] = []
        self._loss_sum = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="loss_sum")
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._unscale = tf.Variable(1.0, trainable=False, name="unscale") if scaled else None
        self.loss_scale = 1.0
        self.around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Makes what graphs are traced within."""
        self.compile: XlaCompile | None = None
        self._xla: Callable[..., Any] | None = None
        self.times: tf.Tensor | None = None
        """When the slots of a split model's pipeline end, of the graph that was traced last."""
        self.numbers = self.unused = frozenset(range(len(self._variables)))
        """The indices of all variables, and of those without a gradient in the graph that was traced last."""
        self.unused_of: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
        """The same for each graph."""

    def rescale(self, loss_scale: float) -> None:
        """Divide gradients by ``loss_scale`` from now on; 1 unless they were made ``scaled``."""
        if loss_scale != self.loss_scale:
            assert self._unscale is not None, "gradients that do not unscale"
            self.loss_scale = loss_scale
            self._unscale.assign(1.0 / loss_scale)

    def at(self, place: int) -> Any:
        """Return the scope of one of the rank's devices; TensorFlow's choice unless the model is split."""
        return tf.device(self.split.plan.devices[place]) if self.split else contextlib.nullcontext()

    def _beside(self, variable: tf.Variable) -> Any:
        return tf.device(variable.device) if self.split else contextlib.nullcontext()

    def retrace(self) -> None:
        """Drop the function that XLA compiles, which was traced for a model that trained other variables."""
        self._xla = None

    def local(self, batch: tuple[Any, ...], scale: tf.Tensor, parts: int = 1,
              kept: Sequence[VariableCopies] = ()) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Return (loss_sum, weight, gradients of ``loss_sum * scale`` by variable); ``kept``: copied before forward."""
        copied = [copy for each in kept for copy in each.copy()]
        leaves = tf.nest.flatten(batch)
        if self.compiles(leaves[0].shape[0]):
            with tf.control_dependencies(copied):
                loss_sum, weight, grads = self._by_xla(batch)(scale, *leaves)
                return loss_sum, weight, self._complete(grads)
        with recompute.recording() as forward, tf.control_dependencies(copied):
            loss_sum, weight, grads = self.traced(batch, scale, parts)
        recompute.rewrite(forward, self.recomputed)
        return loss_sum, weight, self._complete(grads)

    def compiles(self, samples: int | None) -> bool:
        """Return whether a graph for so many samples computes by XLA; None: for any number."""
        return samples is not None and self.compile is not None and self.compile.compiles(samples)

    def _by_xla(self, like: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function that XLA compiles, one for all graphs of a step, so that each size is compiled once."""
        def compute(scale: tf.Tensor, *leaves: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
            loss_sum, weight, grads = self.traced(tf.nest.pack_sequence_as(like, leaves), scale, 1)
            return loss_sum, weight, [None if g is None else tf.convert_to_tensor(g) for g in grads]

        self._xla = self._xla or tf.function(compute, jit_compile=True, autograph=False)
        return self._xla

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The blocks that backward recomputes in graphs that are traced now."""
        return self._remat.chosen if self._remat else ()

    def traced(self, batch: tuple[Any, ...], scale: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """Return `local` without recomputation: gradients may be sparse or None."""
        self.times = None
        if self.split:
            follow()
            loss_sum, weight, grads, self.times = self.split.pipeline.gradients(self.task, batch, scale, parts)
            return loss_sum, weight, grads
        with tf.GradientTape() as tape:
            loss_sum, weight = self.task(self._model, batch, True)
            scaled = loss_sum * tf.cast(scale, loss_sum.dtype)
        recompute.backward_begins()
        return loss_sum, weight, tape.gradient(scaled, self._variables)

    def _complete(self, grads: Sequence[Any]) -> list[tf.Tensor]:
        """Return dense gradients, zeros where this rank has none; a variable frozen at the start has none."""
        trained = {id(v) for v in self._model.trainable_variables}
        grads = [grad if id(v) in trained else None for v, grad in zip(self._keras_variables, grads)]
        self.unused = frozenset(i for i, grad in enumerate(grads) if grad is None)
        self.unused_of[tf.compat.v1.get_default_graph()] = self.unused
        return [self._filled(v, self._zero) if grad is None else tf.convert_to_tensor(grad)
                for grad, v in zip(grads, self._variables)]

    def _filled(self, variable: tf.Variable, value: Any) -> tf.Tensor:
        with self._beside(variable):
            return tf.fill(variable.shape, tf.cast(value, variable.dtype))

    def unknown(self) -> tf.Tensor:
        """Return a zero, float32 (), that no graph can take for a constant."""
        return self._zero.read_value()

    def all(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Return gradients that are ``value`` everywhere."""
        if self.split:
            follow()
        return [self._filled(v, value) for v in self._variables]

    def add(self, loss_sum: tf.Tensor, grads: Sequence[tf.Tensor], first: bool) -> None:
        """Add to the sums; with ``first`` overwrite them."""
        own = tf.cast(loss_sum, tf.float64)
        self._loss_sum.assign(own, read_value=False) if first else self._loss_sum.assign_add(own, read_value=False)
        for total, grad in zip(self._sums, grads):
            with self._beside(total):
                total.assign(grad, read_value=False) if first else total.assign_add(grad, read_value=False)

    def completed(self, loss_sum: tf.Tensor, grads: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the sums with the last micro-batch's added."""
        sums = []
        for grad, total in zip(grads, self._sums):
            with self._beside(total):
                sums.append(grad + total.read_value())
        return self._loss_sum.read_value() + tf.cast(loss_sum, tf.float64), sums

    def unscaled(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients of the loss itself."""
        if self._unscale is None:
            return grads
        factor = self._unscale.read_value()
        return [grad * tf.cast(factor, grad.dtype) for grad in grads]

    def packed(self, bucket: Bucket, grads: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a bucket's gradients as one vector (n,)."""
        with self.at(bucket.place):
            return Ops().pack([grads[i] for i in bucket.params])

    def allocate(self) -> None:
        """Make the variables of the sums, if they do not exist."""
        if not self._sums:
            for v in self._variables:
                with self._beside(v):
                    self._sums.append(tf.Variable(tf.zeros_like(v), trainable=False))
