"""`DistributedOptimizer` by the signature of ``horovod.tensorflow``; the optimizer itself is `hvdtrain.keras`'."""

from __future__ import annotations

import warnings
from typing import Any

from hvdtrain.tensorflow.basics import Average
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False,  # noqa: N802
                         device_dense: str = '', device_sparse: str = '', compression: Any = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average,
                         gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """`hvdtrain.keras.DistributedOptimizer` of a Keras optimizer; ``use_locking`` was TensorFlow 1's."""
    from hvdtrain import keras

    if num_groups:
        warnings.warn("num_groups is the old name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    return keras.DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op, groups=groups,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set, scale_local_gradients=scale_local_gradients)
