"""Gradient tapes and optimizers, by Horovod's signatures, whose gradients are those of all ranks.

Owns how a tape is wrapped and which sources stay local. The exchange is `gradients`', the optimizer `hvdtrain.keras`'.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain import job
from hvdtrain.core.errors import UserError
from hvdtrain.core.process_sets import Average, ProcessSet, global_process_set
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.gradients import GradientExchange, identity_of
from hvdtrain.tensorflow.nodes import unconverted

MOST_EXCHANGES = 64
"""Exchanges that wait for the next tape: a training loop makes a tape in every step."""

_exchanges: OrderedDict[Any, GradientExchange] = OrderedDict()


class _Distributed:
    """Methods that `DistributedGradientTape` adds to the class of its tape."""

    _exchange: GradientExchange
    _local: list[Any]
    _scale_local: bool
    _place: str

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of variable ``source`` to this rank: no collective touches it."""
        if not identity_of(source):
            raise UserError(f"register_local_source of {source!r}", "a variable of Keras or TensorFlow",
                            "pass the variable itself")
        self._local.append(source)

    @unconverted
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
                 unconnected_gradients: Any = tf.UnconnectedGradients.NONE) -> Any:
        """Compute `tf.GradientTape.gradient` over all ranks, except for local sources; collective.

        ``sources``: a variable or any nest of variables; the result has its structure. Local sources keep their own
        gradient, divided by the number of ranks where ``scale_local_gradients``, as an average over ranks divides
        theirs. ``use_generic_names`` has no meaning here: nodes never carry names of gradients.
        """
        nest = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat, grads = tf.nest.flatten(sources), tf.nest.flatten(nest)
        local = {identity_of(v) for v in self._local}
        shared = [i for i, v in enumerate(flat) if identity_of(v) not in local]
        with tf.device(self._place) if self._place else nullcontext():
            sums = self._exchange([grads[i] for i in shared], [flat[i] for i in shared])
        for i, grad in zip(shared, sums):
            grads[i] = grad
        if self._scale_local and local:
            size = self._exchange.size
            for i in set(range(len(flat))).difference(shared):
                grads[i] = divided(grads[i], size)
        return tf.nest.pack_sequence_as(sources, grads) if tf.nest.is_nested(sources) else grads[0]

    def get_local_and_global_gradients(self, target: Any, sources: Any, output_gradients: Any = None,
                                       use_generic_names: bool = False) -> tuple[list[Any], list[Any]]:
        """Return pairs of source and gradient: (of local sources, of all others); collective."""
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, self.gradient(target, flat, output_gradients, use_generic_names)))
        local = {identity_of(v) for v in self._local}
        return ([p for p in pairs if identity_of(p[0]) in local], [p for p in pairs if identity_of(p[0]) not in local])


def DistributedGradientTape(gradtape: Any, device_dense: str = '', device_sparse: str = '',
                            compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
                            gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
                            process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True) -> Any:
    """Return a tape like ``gradtape``, of the same class and recording, whose `gradient` is that of all ranks.

    ``device_dense``: where its collectives are placed; "" leaves that to TensorFlow. ``device_sparse`` is not
    needed. ``num_groups`` is the old name of ``groups``. The rest is `GradientExchange`'s. The tape's
    ``register_local_source`` tells the variables that it leaves alone. Errors: those of `GradientExchange`.
    """
    tape = copy.copy(gradtape)
    tape.__class__ = type(type(gradtape).__name__, (_Distributed, type(gradtape)), {})
    tape._local, tape._scale_local, tape._place = [], scale_local_gradients, device_dense
    tape._exchange = _exchange(op, compression, sparse_as_dense, gradient_predivide_factor,
                               _groups_of(num_groups, groups), process_set)
    return tape


def PartialDistributedGradientTape(gradtape: Any, device_dense: str = '', device_sparse: str = '',
                                   compression: Any = Compression.none, sparse_as_dense: bool = False,
                                   op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                                   groups: Any = None, process_set: ProcessSet = global_process_set,
                                   local_layers: Any = None, scale_local_gradients: bool = True) -> Any:
    """Return a `DistributedGradientTape` that leaves ``local_layers`` (one Keras layer or several) local."""
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False,
                         device_dense: str = '', device_sparse: str = '', compression: Any = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average,
                         gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Return `hvdtrain.keras.DistributedOptimizer` of a Keras optimizer; ``use_locking`` was TensorFlow 1's."""
    from hvdtrain import keras

    return keras.DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        groups=_groups_of(num_groups, groups), backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, process_set=process_set,
        scale_local_gradients=scale_local_gradients)


def variables_of(local_layers: Any) -> list[Any]:
    """Return the trainable variables of a Keras layer, of several, or of None; `ValueError` for anything else."""
    layers = [] if local_layers is None else [local_layers] if _is_layer(local_layers) else list(local_layers)
    wrong = [layer for layer in layers if not _is_layer(layer)]
    if wrong:
        raise ValueError(f"local_layers has {wrong[0]!r}; expected Keras layers")
    return [variable for layer in layers for variable in layer.trainable_weights]


def divided(grad: Any, divisor: int) -> Any:
    """Return a gradient, which may be sparse or None, by a whole number."""
    if grad is None or divisor == 1:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(divisor, grad.values.dtype), grad.indices, grad.dense_shape)
    return grad / tf.cast(divisor, grad.dtype)


def _groups_of(num_groups: int, groups: Any) -> Any:
    if not num_groups:
        return groups
    warnings.warn("num_groups is the old name of groups", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


def _is_layer(layer: Any) -> bool:
    import keras

    return isinstance(layer, keras.layers.Layer)


def _exchange(op: int, compression: Any, sparse_as_dense: bool, predivide: float, groups: Any,
              process_set: ProcessSet) -> GradientExchange:
    """Return the exchange of these options: one for all tapes of a loop, which keeps plans and their state."""
    job.world()
    grouped = groups if groups is None or isinstance(groups, int) else tuple(
        tuple(identity_of(v) for v in group) for group in groups)
    key = (op, compression, sparse_as_dense, predivide, grouped, id(process_set))
    if key not in _exchanges:
        _exchanges[key] = GradientExchange(
            op=op, compression=compression, sparse_as_dense=sparse_as_dense, gradient_predivide_factor=predivide,
            groups=groups, process_set=process_set, name="tape")
        if len(_exchanges) > MOST_EXCHANGES:
            _exchanges.popitem(last=False)
    _exchanges.move_to_end(key)
    return _exchanges[key]
