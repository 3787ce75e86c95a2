"""Exchange gradients around a Keras optimizer's update: accumulate, sum over ranks, keep local variables, compare.

Owns one optimizer's settings and state between steps, while Keras' ``apply`` is traced or run. The sums are
`hvdtrain.tensorflow.gradients`'; the update is Keras' own, which clips and decays after the exchange.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import tensorflow as hvd
from hvdtrain.backends.tensorflow.optimizer import fused
from hvdtrain.core.errors import UserError
from hvdtrain.keras.guard import DivergenceGuard, frozen_weights, ranks_of
from hvdtrain.tensorflow import Average, Compression, basics
from hvdtrain.tensorflow.nodes import label_of, node_name, refuse_xla, through_trace, unconverted

_counts: collections.Counter[str] = collections.Counter()

Update = Callable[[list[Any]], None]


@dataclass(frozen=True)
class Settings:
    """Horovod's arguments of a distributed optimizer, and ``check_every`` (`hvdtrain.keras.guard`)."""

    name: str
    device: str
    passes: int
    average_passes: bool
    process_set: Any
    scale_local: bool
    check_every: int
    gradients: dict[str, Any]
    local_layers: list[Any] = field(default_factory=list)


class OptimizerExchange:
    """Turn one rank's gradients into the same update on every rank."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.inside = False
        self.guard = DivergenceGuard(settings.process_set, settings.check_every, settings.name)
        self.model: keras.Model | None = None
        self._name = ""
        self._list: list[Any] = []
        self._local: set[Any] = set()
        self._reduce: Callable[..., list[Any]] | None = None
        self._sums: dict[int, tf.Variable] = {}
        self._used: set[Any] = set()
        self._passes: tf.Variable | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks that exchange, this one included."""
        return ranks_of(self.settings.process_set)

    def register_local(self, variable: Any) -> None:
        """Leave this variable's gradient on its rank."""
        self._local.add(_key(variable))

    @unconverted
    def step(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], update: Update) -> None:
        """Exchange ``grads`` and ``update`` (`inside` is set meanwhile), or keep them for a later pass."""
        grads, variables = list(grads), list(variables)
        if self.ranks > 1:
            refuse_xla("hvd.DistributedOptimizer")
            self._take_name()
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
        if self.settings.passes == 1:
            self._apply(optimizer, grads, variables, update)
            return
        kept = self._accumulate(grads, variables)
        assert self._passes is not None
        passes = self._passes.assign_add(1, read_value=True)
        if tf.executing_eagerly():
            if int(passes) % self.settings.passes == 0:
                self._flush(optimizer, kept, variables, update)
            return

        def flush() -> tf.Tensor:
            self._flush(optimizer, kept, variables, update)
            return tf.constant(True)
        tf.cond(tf.equal(passes % self.settings.passes, 0), flush, lambda: tf.constant(False))

    def _take_name(self) -> None:
        if not self._name:  # not before the first step: one rank alone may make optimizers that never take a step
            _counts[self.settings.name] += 1
            n = _counts[self.settings.name] - 1
            self._name = self.guard.name = f"{self.settings.name}_{n}" if n else self.settings.name

    def _accumulate(self, grads: list[Any], variables: list[Any]) -> list[tf.Variable | None]:
        """Add this pass' gradients to the sums; return the sums of variables with a gradient."""
        keys = [_key(v) for v in variables]
        self._list = self._list or keys
        if keys != self._list:
            raise through_trace(UserError(
                f"backward_passes_per_step={self.settings.passes} and a list of variables that differs from before",
                "one list: passes are counted by optimizer, and every N-th updates",
                "give each list an optimizer of its own, or leave backward_passes_per_step at 1"))
        missing = [v for g, v in zip(grads, variables) if g is not None and _key(v) not in self._sums]
        if missing and self._sums and not tf.executing_eagerly():  # graphs that update without it are there already
            raise through_trace(UserError(
                f"backward_passes_per_step={self.settings.passes} and a gradient of {label_of(missing[0])}, which "
                "earlier batches did not have", "gradients of the same variables in every pass",
                "add 0 * the branch's output to the loss, or leave backward_passes_per_step at 1"))
        with tf.init_scope():
            if self._passes is None:
                self._passes = tf.Variable(0, dtype=tf.int64, trainable=False)
            for grad, variable in zip(grads, variables):
                if grad is not None and _key(variable) not in self._sums:
                    with tf.device(tf_variable(variable).device):
                        self._sums[_key(variable)] = tf.Variable(tf.zeros(variable.shape, grad.dtype), trainable=False)
        self._used |= {key for key, grad in zip(keys, grads) if grad is not None}
        kept = [self._sums[key] if key in self._used else None for key in keys]
        for total, grad in zip(kept, grads):
            if grad is None:
                continue
            assert total is not None
            if isinstance(grad, tf.IndexedSlices):
                total.scatter_add(grad)
            else:
                total.assign_add(tf.convert_to_tensor(grad))
        return kept

    def _flush(self, optimizer: Any, kept: list[Any], variables: list[Any], update: Update) -> None:
        grads = [None if total is None else total.read_value() for total in kept]
        if self.settings.average_passes:
            grads = [None if g is None else g / self.settings.passes for g in grads]
        self._apply(optimizer, grads, variables, update)
        for total in kept:
            if total is not None:
                total.assign(tf.zeros_like(total))
        if tf.executing_eagerly():
            self._used.clear()

    def _apply(self, optimizer: Any, grads: list[Any], variables: list[Any], update: Update) -> None:
        local = self._locals()
        shared = [i for i, v in enumerate(variables) if _key(v) not in local]
        if len(shared) < len(variables):
            _refuse_global_clip(optimizer)
        self.guard.before_update([variables[i] for i in shared], lambda: optimizer.learning_rate, self._frozen)
        if self.ranks > 1:
            grads = self._exchanged(optimizer, grads, variables, shared)
        self.inside = True
        try:
            with fused(getattr(optimizer, "inner_optimizer", optimizer)):
                update(grads)
        finally:
            self.inside = False
        self.guard.after_update()

    def _exchanged(self, optimizer: Any, grads: list[Any], variables: list[Any], shared: list[int]) -> list[Any]:
        grads = list(grads)
        with tf.device(self.settings.device) if self.settings.device else nullcontext():
            for i, reduced in zip(shared, self._sum([grads[i] for i in shared], [variables[i] for i in shared])):
                grads[i] = reduced
            own = [i for i in range(len(grads)) if i not in set(shared) and grads[i] is not None]
            if self.settings.scale_local:
                for i in own:
                    grads[i] = _with(grads[i], _values(grads[i]) * tf.cast(1.0 / self.ranks, grads[i].dtype))
            if own and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                for i, grad in zip(own, self._alike([grads[i] for i in own])):
                    grads[i] = grad
        return grads

    def _sum(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        if self._reduce is None:
            from hvdtrain.tensorflow.gradients import GradientExchange

            self._reduce = GradientExchange(process_set=self.settings.process_set, name=self._name,
                                            **self.settings.gradients)
        return self._reduce(grads, variables) if grads else []

    def _alike(self, own: list[Any]) -> list[Any]:
        """Make local gradients NaN on every rank where one rank's are not finite: loss scales decide by them."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(g))) for g in own])
        flag = tf.where(finite, 0.0, float("nan"))
        wire = basics.wire(self.settings.process_set)
        flag = wire.allreduce(flag[None], node_name(f"{self._name}_finite")).wait()[0]
        return [_with(g, _values(g) + tf.cast(flag, g.dtype)) for g in own]

    def _frozen(self) -> list[Any]:
        """Return the frozen weights of the model that ``fit`` trains, without those of local layers."""
        local = self._local | {_key(v) for layer in self.settings.local_layers for v in layer.weights}
        return [v for v in frozen_weights(self.model) if _key(v) not in local] if self.model is not None else []

    def _locals(self) -> set[Any]:
        layers = {_key(v) for layer in self.settings.local_layers for v in layer.trainable_weights}
        return self._local | layers


def exchange_of(optimizer: Any) -> OptimizerExchange | None:
    """Return the exchange of a distributed optimizer, also inside Keras' LossScaleOptimizer; None for others."""
    found = getattr(optimizer, "_hvd_exchange", None)
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if found is not None or inner is None else exchange_of(inner)


def _refuse_global_clip(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.global_clipnorm:
        raise through_trace(UserError(f"global_clipnorm={inner.global_clipnorm} together with local layers",
                                      "a clip per variable: ranks would scale the shared gradients differently",
                                      "use clipnorm, which clips each variable separately"))


def _key(variable: Any) -> Any:
    """Return a variable's identity, whether it is Keras' or TensorFlow's."""
    return tf_variable(variable).ref()


def tf_variable(variable: Any) -> tf.Variable:
    """Return TensorFlow's variable of one that may be Keras'."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _values(grad: Any) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _with(grad: Any, values: tf.Tensor) -> Any:
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape) if isinstance(grad, tf.IndexedSlices) else values


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: Any = None, compression: Any = Compression.none) -> tf.Tensor:
    """Return the average over the ranks, or another reduction; ``average``: the old way to choose. Collective."""
    return hvd.allreduce(tf.convert_to_tensor(value), average=average, name=name, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor, op=op, compression=compression)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Return all ranks' values along dimension 0, which may differ; collective."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return the value of ``root_rank``; collective."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Return this rank's shard, along dimension 0, of the reduced value; collective."""
    return hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)
