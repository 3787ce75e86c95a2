"""``import hvdtrain.tensorflow as hvd``: the public API of ``horovod.tensorflow``, on TensorFlow 2 and Keras 3.

Importing this package does no work; the names are loaded on first use.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.core.process_sets import SHARED_HOME

_HOMES = {
    "basics": "init",
    "capabilities": "BroadcastGlobalVariablesHook broadcast_global_variables broadcast_object_fn ccl_built "
                    "check_extension cuda_built ddl_built gloo_built gloo_enabled gpu_available mpi_built mpi_enabled "
                    "nccl_built rocm_built",
    "compression": "Compression",
    "functions": "allgather_object broadcast_ broadcast_object broadcast_variables",
    "gradients": "GradientExchange",
    "ops": "allgather allreduce alltoall broadcast check_num_rank_power_of_2 grouped_allgather "
           "grouped_allreduce grouped_reducescatter handle_average_backwards_compatibility join local_rank_op "
           "local_size_op process_set_included_op rank_op reducescatter size_op",
    "sync_batch_norm": "SyncBatchNormalization",
    "tape": "DistributedGradientTape DistributedOptimizer PartialDistributedGradientTape",
}
_MODULES = ("functions", "keras", "mpi_ops", "util")
_HOME = SHARED_HOME | {
    name: f"hvdtrain.tensorflow.{home}" for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562); `UserError` for ``elastic``, which is left out."""
    if name == "elastic":
        from hvdtrain.cluster.horovod import no_elastic

        raise no_elastic()
    import importlib
    import types

    if name in _MODULES:
        return importlib.import_module(f"hvdtrain.tensorflow.{name}")
    if name == "_executing_eagerly":
        return importlib.import_module("hvdtrain.tensorflow.util")._executing_eagerly
    if name not in _HOME:
        raise AttributeError(f"module 'hvdtrain.tensorflow' has no attribute {name!r}")
    from hvdtrain.cluster import quiet

    quiet.watch_import()
    value = getattr(importlib.import_module(_HOME[name]), name)
    if isinstance(value, types.FunctionType):
        from hvdtrain.tensorflow.nodes import unconverted

        value = unconverted(value)  # AutoGraph would rewrite what a tf.function of the user's calls
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
