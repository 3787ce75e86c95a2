"""The graphs of one training step: gradients, their exchange, the update.

Owns the `tf.function`s and the accumulators that they keep between calls. Knows no schedule, no file.

Every graph is traced once per kind and shape of a sample; the number of samples stays open. Where the collectives
can be graph nodes, the reducer runs while the graph is traced: each bucket's node waits for its own gradients
only, so that its sum overlaps the rest of backward. A rank without a sample runs a graph of zeros with nodes of the
same names. Horovod's operations are not marked stateful, so nothing that reaches them may be a constant: TensorFlow
would run the collective while it optimises the graph.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.backends.tensorflow.following import follow
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.backends.tensorflow.task import Task
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.exchange.squares import own_parts


PLAIN = {"jit_compile": False, "autograph": False}
"""No XLA, which has no kernels for the collectives; no AutoGraph, as in `keras.Model.fit`."""


class Gradients:
    """Gradients of one rank: summed over micro-batches, packed into buckets, and summed over ranks where graphs can.

    A call of `last` or `zeros` returns a list of tensors: bucket sums, or local buckets where the collectives live
    on the host, or plain gradients where the reducer is alone. With a ``split`` every gradient, accumulator and bucket
    is on the device of its variables.
    """

    def __init__(self, model: keras.Model, task: Task, reducer: Reducer, undoable: bool = False,
                 scaled: bool = False, split: Split | None = None) -> None:
        self._model, self._task, self._reducer = model, task, reducer
        reducer.undoable = undoable
        if split:
            reducer.spread([Ops(device) for device in split.plan.devices])
        self._split, self._n_parts = split, 1
        self._times: tf.Tensor | None = None
        self._variables = [v.value for v in model.trainable_variables]
        self.in_graph = reducer.collectives.in_graph and not reducer.alone
        self._zero = tf.Variable(0.0, trainable=False, name="zero")  # not a constant; see above
        self._accumulators: list[tf.Variable] = []
        self._accumulated = False
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._loss_scale = 1.0
        self._unscale = tf.Variable(1.0, trainable=False, name="unscale") if scaled else None

    def _at(self, place: int) -> Any:
        """The scope of one of the rank's devices; TensorFlow's choice where the model is not split."""
        return tf.device(self._split.plan.devices[place]) if self._split else contextlib.nullcontext()

    def _beside(self, variable: tf.Variable) -> Any:
        """The scope of a variable's device, where the model is split."""
        return tf.device(variable.device) if self._split else contextlib.nullcontext()

    def begin(self, loss_scale: float = 1.0) -> None:
        """Open a step: drop what was accumulated.

        ``loss_scale``: what the loss is multiplied by, and the gradients divided by before they are handed over; 1
        unless the graphs were made ``scaled``.
        """
        if loss_scale != self._loss_scale:
            assert self._unscale is not None, "graphs that do not unscale"
            self._loss_scale = loss_scale
            self._unscale.assign(1.0 / loss_scale)
        if self._accumulated:
            for accumulator in self._accumulators:
                with self._beside(accumulator):
                    accumulator.assign(tf.zeros_like(accumulator))
            self._accumulated = False

    def discard(self) -> None:
        """Undo what the step did to the compressor's state."""
        self._reducer.discard()

    def add(self, batch: tuple[Any, ...], scale: float) -> tuple[tf.Tensor, tf.Tensor]:
        """Add the gradient of ``loss_sum * scale`` to the accumulators; return (loss_sum, weight)."""
        if not self._accumulators:
            for v in self._variables:
                with self._beside(v):
                    self._accumulators.append(tf.Variable(tf.zeros_like(v), trainable=False))
        self._accumulated = True
        return self._run("add", batch, scale, self._add)

    def last(self, batch: tuple[Any, ...], scale: float) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], tf.Tensor]:
        """Gradient of the last micro-batch plus what was accumulated: (loss_sum, weight, tensors, report).

        ``report``: float64 (2,), the seconds waited and the squares of this rank's part of the sums, both 0 where the
        sums are made outside the graph. One tensor, since each that is read costs the host a call.
        """
        kind, graph = ("last of several", self._last_of_several) if self._accumulated else ("only", self._only)
        self._accumulated = False
        return self._run(kind, batch, scale, graph)

    def alone(self, batch: tuple[Any, ...]) -> list[tf.Tensor]:
        """This rank's own gradients, neither kept nor exchanged."""
        return self._run("alone", batch, 1.0, lambda parts, scale: self._local(parts, scale)[2])

    def zeros(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """What a rank without a sample gives: (tensors, report)."""
        key = ("zeros", self._reducer.stage)
        if key not in self._functions:
            self._functions[key] = tf.function(self._zeros, input_signature=[], **PLAIN)
        with peer_failures():
            return self._functions[key]()

    def _run(self, kind: str, batch: tuple[Any, ...], scale: float, graph: Callable[..., Any]) -> Any:
        leaves = [x if tf.is_tensor(x) else tf.convert_to_tensor(x) for x in tf.nest.flatten(batch)]
        self._n_parts = self._split.parts(int(leaves[0].shape[0])) if self._split else 1
        key = (kind, self._n_parts, self._reducer.stage, *((x.dtype, *x.shape[1:]) for x in leaves))
        if key not in self._functions:
            specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in leaves]

            def function(scale: tf.Tensor, *parts: tf.Tensor) -> Any:
                if self._split:
                    follow()
                results = graph(tf.nest.pack_sequence_as(batch, parts), scale)
                return results, self._times
            self._functions[key] = tf.function(function, input_signature=[tf.TensorSpec([], tf.float64), *specs],
                                               **PLAIN)
        with peer_failures():
            results, times = self._functions[key](tf.constant(scale * self._loss_scale, tf.float64), *leaves)
        if self._split and kind != "alone":
            self._split.took(self._n_parts, times)
        return results

    # --- while a graph is traced -----------------------------------------------------------------------------------

    def _local(self, batch: tuple[Any, ...], scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        if self._split:
            loss_sum, weight, grads, self._times = self._split.pipeline.gradients(self._task, batch, scale,
                                                                                  self._n_parts)
            return loss_sum, weight, [self._dense(g, v) for g, v in zip(grads, self._variables)]
        with tf.GradientTape() as tape:
            loss_sum, weight = self._task(self._model, batch, True)
            scaled = loss_sum * tf.cast(scale, loss_sum.dtype)
        grads = tape.gradient(scaled, self._variables)
        return loss_sum, weight, [self._dense(g, v) for g, v in zip(grads, self._variables)]

    def _dense(self, grad: Any, variable: tf.Variable) -> tf.Tensor:
        if grad is None:  # the loss does not depend on it; on another rank it may
            with self._beside(variable):
                return tf.fill(variable.shape, tf.cast(self._zero, variable.dtype))
        return tf.convert_to_tensor(grad)

    def _add(self, batch: tuple[Any, ...], scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss_sum, weight, grads = self._local(batch, scale)
        for accumulator, grad in zip(self._accumulators, grads):
            with self._beside(accumulator):
                accumulator.assign_add(grad)
        return loss_sum, weight

    def _only(self, batch: tuple[Any, ...],
              scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], tf.Tensor]:
        loss_sum, weight, grads = self._local(batch, scale)
        return loss_sum, weight, *self._hand_over(grads)

    def _last_of_several(self, batch: tuple[Any, ...],
                         scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], tf.Tensor]:
        loss_sum, weight, grads = self._local(batch, scale)
        sums = []
        for grad, accumulator in zip(grads, self._accumulators):
            with self._beside(accumulator):
                sums.append(grad + accumulator.read_value())
        for accumulator in self._accumulators:
            with self._beside(accumulator):
                accumulator.assign(tf.zeros_like(accumulator))
        return loss_sum, weight, *self._hand_over(sums)

    def _zeros(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        if self._split:
            follow()
        return self._hand_over([self._dense(None, v) for v in self._variables])

    def _hand_over(self, grads: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        if self._unscale is not None:
            factor = self._unscale.read_value()
            grads = [grad * tf.cast(factor, grad.dtype) for grad in grads]
        if self._reducer.alone:
            return grads, self._report(tf.zeros([], tf.float64), grads)
        flats = []
        for bucket in self._reducer.buckets:
            with self._at(bucket.place):
                flats.append(self._reducer.ops.pack([grads[i] for i in bucket.params]))
        return self._exchange(flats) if self.in_graph else (flats, tf.zeros([2], tf.float64))

    def _report(self, waited_s: tf.Tensor, sums: list[tf.Tensor]) -> tf.Tensor:
        """Seconds waited, and the squares of this rank's part of ``sums``."""
        wire = self._reducer.collectives
        if not self._reducer.looks:
            return tf.stack([waited_s, tf.zeros([], tf.float64)])
        parts = [self._reducer.ops.sum_squares(x) for x in own_parts(sums, self._reducer.buckets, wire.rank, wire.size)]
        squares = tf.add_n([tf.cast(x, tf.float64) for x in parts]) if parts else tf.zeros([], tf.float64)
        return tf.stack([waited_s, squares])

    def _exchange(self, flats: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Collective nodes for all buckets; in the report, seconds from the last local gradient to the last sum."""
        reducer = self._reducer
        with tf.control_dependencies(flats):
            ready_s = tf.timestamp()
        for i, flat_N in enumerate(flats):
            reducer.start(i, flat_N)
        sums = reducer.finish()
        with tf.control_dependencies(sums):
            done_s = tf.timestamp()
        return sums, self._report(tf.maximum(done_s - ready_s, 0.0), sums)


class Update:
    """The optimizer's update from summed gradients, with the global norm where it is asked for.

    With a ``split`` everything happens beside the variables, and whether the norm is finite is decided between two
    graphs: what goes into a branch of a graph goes through one device.
    """

    def __init__(self, model: keras.Model, optimizer: Any, reducer: Reducer, split: Split | None = None) -> None:
        self._variables, self._optimizer, self._reducer = model.trainable_variables, optimizer, reducer
        self._split = split
        self._functions: dict[tuple[bool, bool], Callable[..., Any]] = {}
        if split:
            self._split_norm = tf.function(lambda *xs: self._norm(list(xs)), **PLAIN)
            self._split_apply = tf.function(lambda factor, *xs: self._scaled_apply(list(xs), factor), **PLAIN)

    def __call__(self, tensors: list[tf.Tensor], clip_norm: float, check: bool) -> tuple[bool, float]:
        """Return (finite, norm); norm is NaN where neither ``clip_norm`` > 0 nor ``check`` asks for it."""
        if self._split:
            return self._on_devices(tensors, clip_norm, check)
        key = (clip_norm > 0, check or clip_norm > 0)
        if key not in self._functions:
            clip, norm = key
            self._functions[key] = tf.function(lambda limit, *xs: self._graph(list(xs), limit, clip) if norm
                                               else self._apply(list(xs)), **PLAIN)
        out = self._functions[key](tf.constant(clip_norm, tf.float32), *tensors)
        return (bool(out[0]), float(out[1])) if key[1] else (True, math.nan)

    def _graph(self, tensors: list[tf.Tensor], limit: tf.Tensor, clip: bool) -> tuple[tf.Tensor, tf.Tensor]:
        norm = self._norm(tensors)
        finite = tf.math.is_finite(norm)
        if clip:
            factor = tf.where(norm > limit, limit / norm, 1.0)
            tensors = [x * tf.cast(factor, x.dtype) for x in tensors]
        return tf.cond(finite, lambda: self._apply(tensors), lambda: tf.constant(False)), norm

    def _norm(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        if self._split:
            tensors = self._beside(tensors)
        return tf.sqrt(tf.add_n([self._reducer.ops.sum_squares(tf.cast(x, tf.float32)) for x in tensors]))

    def _apply(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        grads = tensors if self._reducer.alone else self._unpack(tensors)
        self._optimizer.apply(grads, self._variables)
        return tf.constant(True)

    def _unpack(self, flats: list[tf.Tensor]) -> list[tf.Tensor]:
        grads: list[Any] = [None] * len(self._variables)
        for bucket, flat_N in zip(self._reducer.buckets, flats):
            for i, grad in zip(bucket.params, self._reducer.ops.unpack(flat_N, bucket.shapes)):
                grads[i] = grad
        return grads

    # --- a model split over devices ----------------------------------------------------------------------------------

    def _on_devices(self, tensors: list[tf.Tensor], clip_norm: float, check: bool) -> tuple[bool, float]:
        if not (check or clip_norm > 0):
            self._split_apply(tf.constant(1.0), *tensors)
            return True, math.nan
        norm = float(self._split_norm(*tensors))
        if math.isfinite(norm):
            factor = clip_norm / norm if 0 < clip_norm < norm else 1.0
            self._split_apply(tf.constant(factor, tf.float32), *tensors)
        return math.isfinite(norm), norm

    def _scaled_apply(self, tensors: list[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
        gradients = [x * tf.cast(factor, x.dtype) for x in self._beside(tensors)]
        # Keras sums over the replicas of tf.distribute, of which there is one, in an operation that takes all gradients
        # and so brings them all to one device.
        object.__setattr__(self._optimizer, "_all_reduce_sum_gradients", lambda pairs: pairs)
        try:
            return self._apply(gradients)
        finally:
            object.__delattr__(self._optimizer, "_all_reduce_sum_gradients")

    def _beside(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients or buckets on the device of their variables, where sums that came over the host are not yet."""
        assert self._split is not None
        follow()
        places = [self._split.place(v) for v in self._variables] if self._reducer.alone else [
            b.place for b in self._reducer.buckets]
        moved = []
        for x, place in zip(tensors, places):
            with tf.device(self._split.plan.devices[place]):
                moved.append(tf.identity(x))
        return moved
