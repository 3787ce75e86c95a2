"""``import hvdtrain.torch as hvd``: the public API of ``horovod.torch``, on PyTorch 2.

Importing this package does no work; the names are loaded on first use.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "basics": "Adasum Average Max Min ProcessSet Product Sum add_process_set ccl_built check_extension cross_rank "
              "cross_size cuda_built ddl_built get_process_set_ids_and_ranks global_process_set gloo_built "
              "gloo_enabled gpu_available init is_homogeneous is_initialized local_rank local_size mpi_built "
              "mpi_enabled mpi_threads_supported nccl_built rank remove_process_set rocm_built shutdown size "
              "start_timeline stop_timeline",
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
_HOME = {name: f"hvdtrain.torch.{home}" for home, names in _HOMES.items() for name in names.split()}
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
