"""The update of Keras variables from summed gradients, as a graph of its own or within that of backward.

Owns the check, the clip and the place of the operations. Optimizer and rate are `optim`'s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.facts import apply_gradients
from hvdtrain.backends.tensorflow import graphs
from hvdtrain.backends.tensorflow.graphs import PLAIN
from hvdtrain.backends.tensorflow.ops import HostVector, Ops, readable, view
from hvdtrain.backends.tensorflow.optim import Optimization, instead
from hvdtrain.backends.tensorflow.placement import follow
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.precision import LossScale

ELEMENTWISE = {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"}
"""Classes of keras.optimizers that update each element by itself."""


class Optimizer:
    """Implements `hvdtrain.core.protocols.Optimizer` over Keras ``variables``.

    ``opt``: the Keras optimizer (``own``), built for them, and its rate. ``scale``: where it is on, gradients are
    always checked. ``traced``: makes the update in the graph that is being traced; None where that cannot be.
    ``unused_in_trace``: returns the variables without a gradient in that graph.
    """

    looks = False

    def __init__(self, opt: Optimization, variables: Sequence[keras.Variable], scale: LossScale) -> None:
        self.opt, self._variables, self._scale = opt, list(variables), scale
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._vectors: list[np.ndarray] = []
        self._views: list[tuple[np.ndarray, tf.Tensor | None]] = []
        self._limit: tuple[float, Any] = (math.nan, None)
        self.overruled: frozenset[str] = frozenset()
        self.changes: list[str] = []
        self.traced: Callable[..., tf.Tensor] | None = self._traced
        self.unused_in_trace: Callable[[], frozenset[int]] = frozenset
        self.own = opt.optimizer
        self.elementwise = _elementwise(self.own, self._variables)
        clip = getattr(self.own, "global_clipnorm", None)
        self.needs_all = f"global_clipnorm {clip:g} of {type(self.own).__name__}" if clip else ""

    def step(self, grads: Sequence[Any], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        if buckets and all(isinstance(x, np.ndarray) for x in grads):
            grads, buckets = self._read_in_place(grads, buckets), ()
        grads = [x if tf.is_tensor(x) else tf.convert_to_tensor(x) for x in grads]
        scaled = norm is not None and 0 < clip_norm < norm
        checks = norm is None and (look or clip_norm > 0 or self._scale.on)
        limit = clip_norm / norm if norm is not None and scaled else clip_norm
        if self._limit[0] != limit:
            self._limit = limit, tf.constant(limit, tf.float32)
        unused = frozenset(unused)
        key = (scaled, checks and clip_norm > 0, checks, bool(buckets), unused)
        if key not in self._functions:
            def graph(limit: tf.Tensor, *xs: tf.Tensor) -> tf.Tensor:
                grads = _by_variable(xs, buckets)
                if scaled:
                    grads = [x * tf.cast(limit, x.dtype) for x in grads]
                return (self._checked(grads, limit if clip_norm > 0 else None, unused) if checks
                        else self._apply(grads, unused))

            function = tf.function(graph, **PLAIN).get_concrete_function(self._limit[1], *grads)
            self._functions[key] = graphs.direct(function)
        out = self._functions[key](self._limit[1], *grads)
        if not checks:
            return True, math.nan if norm is None else norm
        done, found = out.numpy().tolist()
        return bool(done), found

    def _read_in_place(self, vectors: Sequence[np.ndarray], buckets: Sequence[Bucket]) -> list[tf.Tensor]:
        """Return the gradient of each variable as a tensor that reads a bucket's memory, the same in every step.

        Copied are those that are not aligned, and all if an optimizer may keep a gradient: assigned to a variable, it
        would share its memory, which no optimizer of Keras' own does.
        """
        if len(vectors) != len(self._vectors) or any(a is not b for a, b in zip(vectors, self._vectors)):
            found = {i: flat_N[offset:offset + math.prod(shape)].reshape(shape)
                     for bucket, flat_N in zip(buckets, vectors)
                     for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes)}
            kept = not type(self.own).__module__.startswith("keras.") or any(
                getattr(v, "overwrite_with_gradient", False) for v in self._variables)
            in_place = all(isinstance(x, HostVector) for x in vectors) and not kept
            self._vectors = list(vectors)
            self._views = [(x, view(x) if in_place and readable(x) else None) for _, x in sorted(found.items())]
        return [tf.convert_to_tensor(x) if seen is None else seen for x, seen in self._views]

    def _checked(self, grads: Sequence[tf.Tensor], limit: tf.Tensor | None, unused: frozenset[int]) -> tf.Tensor:
        """Update unless the norm is not finite; return float64 (2,): 1 if it was made, else 0, and the norm."""
        norm = tf.cast(tf.sqrt(squares(grads)), tf.float32)
        done = self._guarded(grads, tf.math.is_finite(norm), norm, limit, unused)
        return tf.stack([tf.cast(done, tf.float64), tf.cast(norm, tf.float64)])

    def _guarded(self, grads: Sequence[tf.Tensor], good: tf.Tensor, norm: tf.Tensor, limit: Any,
                 unused: frozenset[int]) -> tf.Tensor:
        """Update if ``good``, with gradients that are clipped to ``limit``, if there is one; return ``good``."""
        def update() -> tf.Tensor:
            if limit is None:
                return self._apply(grads, unused)
            factor = tf.where(norm > limit, limit / norm, 1.0)
            return self._apply([x * tf.cast(factor, x.dtype) for x in grads], unused)

        if not graphs.noting():  # a graph of its own, whose errors end the run
            return tf.cond(good, update, lambda: tf.constant(False))
        own = graphs.Update.here()

        def counted() -> tf.Tensor:
            with tf.control_dependencies([own.begin()]):
                return update()

        return tf.cond(good, counted, lambda: tf.constant(False))

    def _traced(self, grads: Sequence[tf.Tensor], loss_sum: tf.Tensor, clip_norm: float = 0.0) -> tf.Tensor:
        """Update in the traced graph if loss and gradient are finite; return float64 (2,): squares, 1 if updated."""
        total = squares(grads)
        norm = tf.cast(tf.sqrt(total), tf.float32)
        good = tf.math.is_finite(norm) & tf.math.is_finite(loss_sum)
        done = self._guarded(grads, good, norm, clip_norm if clip_norm > 0 else None, self.unused_in_trace())
        return tf.stack([total, tf.cast(done, tf.float64)])

    def _apply(self, grads: Sequence[tf.Tensor], unused: frozenset[int]) -> tf.Tensor:
        with fused(self.own):
            apply_gradients(self.own, [None if i in unused else x for i, x in enumerate(grads)], self._variables)
        return tf.constant(True)

    def skipped(self) -> bool:
        """Return False: the sums are checked before their update, on a GPU too."""
        return False

    def slots(self) -> Iterator[tuple[str, int, tf.Tensor]]:
        known = {id(v) for v in self.own.variables}
        for name, held in vars(self.own).items():
            if name in ("_variables", "_trainable_variables") or not isinstance(held, (list, tuple)):
                continue
            if len(held) == len(self._variables):
                for i, (slot, variable) in enumerate(zip(held, self._variables)):
                    if id(slot) in known and tuple(slot.shape) == tuple(variable.shape):
                        yield name.lstrip("_"), i, slot.value.read_value()

    def plain_sgd(self) -> bool:
        return type(self.own) is keras.optimizers.SGD and not self.own.momentum

    def bytes_to_come(self) -> int:
        """Return 0: the optimizer's state exists."""
        return 0

    def learning_rate(self) -> float:
        return self.opt.rate()

    def own_schedule(self) -> object | None:
        return self.opt.own_schedule()

    def end_epoch(self) -> None:
        """Do nothing: Keras' schedules count updates."""

    def evaluated(self, value: float) -> None:
        plateau = self.opt.plateau()
        if plateau is not None:
            plateau.evaluated(value)

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        """Take over differences from the checkpoint: Keras' schedules are functions of the count of updates."""
        plateau = self.opt.plateau()
        if rescheduled and plateau is not None:
            plateau.load({})
        self.overruled, self.changes = self.opt.overruled, self.opt.changes

    def describe(self) -> dict[str, str]:
        return self.opt.describe()


class SplitOptimizer(Optimizer):
    """An `Optimizer` over variables on several devices, with each operation on the device of its variable.

    Whether the norm is finite is decided between two graphs: tensors that enter a branch go through one device.
    """

    def __init__(self, opt: Optimization, variables: Sequence[keras.Variable], scale: LossScale, split: Split) -> None:
        super().__init__(opt, variables, scale)
        self.traced, self._split = None, split
        self._norm_of: Callable[..., Any] | None = None

    def step(self, grads: Sequence[Any], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Take the norm, then update; see `Optimizer.step`."""
        assert norm is None, "a rank's shard of a partitioned model is on one device"
        if self._norm_of is None:
            self._norm_of = tf.function(lambda *xs: tf.sqrt(squares(self._beside(xs, buckets))), **PLAIN)
        unused = frozenset(unused)
        if unused not in self._functions:
            self._functions[unused] = tf.function(
                lambda factor, *xs: self._scaled(self._beside(xs, buckets), buckets, factor, unused), **PLAIN)
        update = self._functions[unused]
        if not (look or clip_norm > 0 or self._scale.on):
            update(tf.constant(1.0), *grads)
            return True, math.nan
        norm = float(self._norm_of(*grads))
        if math.isfinite(norm):
            factor = clip_norm / norm if 0 < clip_norm < norm else 1.0
            update(tf.constant(factor, tf.float32), *grads)
        return math.isfinite(norm), norm

    def _scaled(self, tensors: Sequence[tf.Tensor], buckets: Sequence[Bucket], factor: tf.Tensor,
                unused: frozenset[int]) -> tf.Tensor:
        grads = _by_variable([x * tf.cast(factor, x.dtype) for x in tensors], buckets)
        # Keras sums over the replicas of tf.distribute, of which there is one, in an operation that takes all gradients
        # and so brings them all to one device.
        with instead(self.own, "_all_reduce_sum_gradients", lambda pairs: pairs):
            return self._apply(grads, unused)

    def _beside(self, tensors: Sequence[tf.Tensor], buckets: Sequence[Bucket]) -> list[tf.Tensor]:
        """Return gradients or buckets on the device of their variables; sums that came over the host are elsewhere."""
        follow()
        places = [b.place for b in buckets] if buckets else [self._split.place(v) for v in self._variables]
        moved = []
        for x, place in zip(tensors, places):
            with tf.device(self._split.plan.devices[place]):
                moved.append(tf.identity(x))
        return moved


def _elementwise(own: Any, variables: Sequence[keras.Variable]) -> bool:
    try:
        check_elementwise(own, variables)
    except UserError:
        return False
    return True


def check_elementwise(own: Any, variables: Sequence[keras.Variable]) -> None:
    """Raise `UserError` unless Keras' optimizer ``own`` updates each element by itself."""
    name = type(own).__name__
    do = f"use one of {', '.join(sorted(ELEMENTWISE))}, or set data_parallel: replicate"
    if name not in ELEMENTWISE or type(own) is not getattr(keras.optimizers, name, None):
        raise UserError(f"data_parallel zero with {name}, which needs whole tensors or is unknown",
                        "an optimizer that updates each element separately", do)
    for key in ("clipnorm", "global_clipnorm"):
        if getattr(own, key):
            raise UserError(f"data_parallel zero with {key} of {name}, which needs the norm of whole tensors",
                            "the run's own clip_norm, which is taken over all ranks",
                            f"leave {key} out and set clip_norm, or set data_parallel: replicate")
    if own.use_ema:
        raise UserError(f"data_parallel zero with use_ema of {name}, whose averages are of whole tensors",
                        "an optimizer without it", "leave use_ema out, or set data_parallel: replicate")
    for v in variables:
        if v.constraint is not None or getattr(v, "overwrite_with_gradient", False):
            what = "a constraint" if v.constraint is not None else "a gradient that replaces it"
            raise UserError(f"data_parallel zero with {what} on {v.path}, which needs the whole tensor",
                            "variables that are updated element by element",
                            "remove it, or set data_parallel: replicate")


def squares(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of all elements' squares, float64; not finite where an element is not."""
    ops = Ops()
    return tf.add_n([tf.cast(ops.sum_squares(x), tf.float64) for x in tensors])


def _by_variable(tensors: Sequence[tf.Tensor], buckets: Sequence[Bucket]) -> list[tf.Tensor]:
    if not buckets:
        return list(tensors)
    found = {i: grad for bucket, flat_N in zip(buckets, tensors)
             for i, grad in zip(bucket.params, Ops().unpack(flat_N, bucket.shapes))}
    return [found[i] for i in sorted(found)]


@contextlib.contextmanager
def fused(own: Any) -> Iterator[None]:
    """Let Keras' SGD, or a subclass with its formula, update each variable by TensorFlow's one kernel for it.

    The kernel's formula is Keras', to the bit, but reads and writes each element once; Keras' own takes a third longer
    for a large model. The rest of an update (clipping, decay, averages, sparse gradients) stays Keras'.
    """
    plain = keras.optimizers.SGD.update_step
    if not isinstance(own, keras.optimizers.SGD) or type(own).update_step is not plain:
        yield
        return

    def update_step(grad: Any, variable: tf.Variable, rate: Any) -> None:
        if isinstance(grad, tf.IndexedSlices):
            plain(own, grad, variable, rate)
            return
        rate, grad = tf.cast(rate, variable.dtype), tf.cast(grad, variable.dtype)
        if not own.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=grad)
            return
        slot = own.momentums[own._get_variable_index(variable)].value
        tf.raw_ops.ResourceApplyKerasMomentum(var=variable.handle, accum=slot.handle, lr=rate, grad=grad,
                                              momentum=tf.cast(own.momentum, variable.dtype),
                                              use_nesterov=bool(own.nesterov))

    with instead(own, "update_step", update_step):
        yield
