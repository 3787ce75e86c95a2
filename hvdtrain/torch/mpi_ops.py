"""The names of ``horovod.torch.mpi_ops``, for scripts that import them from there."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "Adasum Average Compression HorovodInternalError Max Min Product ProcessSet Sum add_process_set allgather "
    "allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast "
    "broadcast_ broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built "
    "global_process_set gloo_built gloo_enabled gpu_available grouped_allgather grouped_allgather_async "
    "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
    "grouped_reducescatter_async handle_average_backwards_compatibility init is_homogeneous is_initialized join "
    "local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built num_rank_is_power_2 poll rank "
    "reducescatter reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async "
    "start_timeline stop_timeline synchronize")
__all__ = sorted(_NAMES.split())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import hvdtrain.torch

    return getattr(hvdtrain.torch, name)


def __dir__() -> list[str]:
    return __all__
