"""``import hvdtrain.torch as hvd``: the public API of ``horovod.torch``, on PyTorch 2.

Importing this package does no work; the names are loaded on first use.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.core.process_sets import SHARED_HOME

_HOMES = {
    "basics": "ccl_built check_extension cuda_built ddl_built gloo_built gloo_enabled gpu_available init mpi_built "
              "mpi_enabled nccl_built rocm_built",
    "compression": "Compression",
    "data": "shard",
    "exchange": "join",
    "functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "ops": "allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async "
           "barrier broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async "
           "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
           "grouped_reducescatter grouped_reducescatter_async handle_average_backwards_compatibility "
           "num_rank_is_power_2 poll reducescatter reducescatter_async sparse_allreduce_async synchronize",
    "optimizer": "DistributedOptimizer",
    "sync_batch_norm": "SyncBatchNorm",
    "transports": "HorovodInternalError",
}
_MODULES = ("functions", "mpi_ops")
_HOME = SHARED_HOME | {name: f"hvdtrain.torch.{home}" for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562); `UserError` for ``elastic``, which is left out."""
    if name == "elastic":
        from hvdtrain.cluster.horovod import no_elastic

        raise no_elastic()
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"hvdtrain.torch.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hvdtrain.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
