"""`SyncBatchNormalization`: Keras' layer with the moments of all ranks' samples.

Owns the moments and their gradient; the rest is `keras.layers.BatchNormalization`'s. With n_r, m_r, s_r the number,
mean and sum of squared deviations of rank r's values of a channel, and N = sum n_r::

    mean = sum n_r m_r / N        var = sum (s_r + n_r (m_r - mean)^2) / N

(Chan, Golub, LeVeque 1979), so ranks count by their samples. Each rank's loss depends on both, so their gradients are
summed over ranks on the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.tensorflow import basics, ops
from hvdtrain.tensorflow.basics import Sum


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNorm over the samples of all ranks, which may have different numbers of them; collective in training.

    ``fused`` is Horovod's argument and has to be False. The rest is `keras.layers.BatchNormalization`'s.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization with fused=True; expected False: it takes its moments itself")
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and biased variance over all ranks, (C,) each, of inputs (B, ...), where ``mask`` is true."""
        wire = basics.wire()
        if wire is None:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        axes = list(self._reduction_axes)
        shape = [1 if i in axes else inputs.shape[i] for i in range(inputs.shape.rank)]
        counted = None if mask is None else tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1),
                                                            tf.shape(inputs))

        @tf.custom_gradient
        def joint(x: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
            rows_PK = ops.allgather(_own(x, counted, axes)[None], "sync_batch_norm")
            n_PC, mean_PC, squares_PC = tf.split(rows_PK, 3, axis=1)
            n_C = tf.maximum(tf.reduce_sum(n_PC, 0), 1)
            mean_C = tf.reduce_sum(n_PC * mean_PC, 0) / n_C
            var_C = tf.reduce_sum(squares_PC + n_PC * tf.square(mean_PC - mean_C), 0) / n_C

            def gradient(dmean_C: tf.Tensor, dvar_C: tf.Tensor) -> tf.Tensor:
                parts_K = tf.cast(tf.concat([dmean_C, dvar_C], 0), tf.float64)
                summed_K = ops.allreduce(parts_K, op=Sum, name="sync_batch_norm.back")
                dmean_C, dvar_C = (tf.reshape(tf.cast(g / n_C, x.dtype), shape) for g in tf.split(summed_K, 2))
                dx = dmean_C + 2 * dvar_C * (x - tf.reshape(tf.cast(mean_C, x.dtype), shape))
                return dx if counted is None else tf.where(counted, dx, tf.zeros_like(dx))

            return (tf.cast(mean_C, x.dtype), tf.cast(var_C, x.dtype)), gradient

        mean_C, var_C = joint(inputs)
        return mean_C, var_C


def _own(x: tf.Tensor, counted: tf.Tensor | None, axes: list[int]) -> tf.Tensor:
    """This rank's numbers, means and sums of squared deviations, float64 (3 C,)."""
    if counted is not None:
        x = tf.where(counted, x, tf.zeros_like(x))  # what is masked may be no number
    total = tf.reduce_sum(x, axes, keepdims=True)
    channels = total.shape.num_elements()
    n = (tf.fill(tf.shape(total), tf.cast(tf.size(x) // channels, x.dtype)) if counted is None
         else tf.reduce_sum(tf.cast(counted, x.dtype), axes, keepdims=True))
    mean = total / tf.maximum(n, 1)
    apart = x - mean if counted is None else tf.where(counted, x - mean, tf.zeros_like(x))
    found = n, mean, tf.reduce_sum(tf.square(apart), axes, keepdims=True)
    return tf.concat([tf.reshape(tf.cast(part, tf.float64), [channels]) for part in found], 0)
