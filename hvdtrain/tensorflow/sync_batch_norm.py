"""`SyncBatchNormalization`: Keras' layer with the moments of all ranks' samples.

Owns Horovod's class; the moments are `hvdtrain.backends.tensorflow.transforms.sync_batchnorm`'s.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.transforms.sync_batchnorm import joint_moments
from hvdtrain.core.process_sets import Sum
from hvdtrain.tensorflow import basics, ops


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNorm over the samples of all ranks, which may have different numbers of them; collective in training.

    ``fused`` is Horovod's argument and has to be False. The rest is `keras.layers.BatchNormalization`'s.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization with fused=True; expected False: it computes its moments itself")
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        wire = basics.wire()
        if wire is None:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]

        def gather(own_K: tf.Tensor) -> tf.Tensor:
            return ops.allgather(own_K[None], "sync_batch_norm")

        def total(own_K: tf.Tensor) -> tf.Tensor:
            return ops.allreduce(own_K, op=Sum, name="sync_batch_norm.back")

        return joint_moments(inputs, mask, list(self._reduction_axes), wire.size, gather, total)
