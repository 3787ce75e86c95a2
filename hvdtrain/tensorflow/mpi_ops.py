"""The names of ``horovod.tensorflow.mpi_ops``, for scripts that import them from there."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "Adasum Average Max Min Product ProcessSet Sum add_process_set allgather alltoall broadcast broadcast_ ccl_built "
    "check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built global_process_set gloo_built gloo_enabled "
    "gpu_available grouped_allgather handle_average_backwards_compatibility init is_homogeneous is_initialized join "
    "local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built "
    "process_set_included_op rank rank_op remove_process_set rocm_built shutdown size size_op start_timeline "
    "stop_timeline")
__all__ = sorted(_NAMES.split())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import hvdtrain.tensorflow

    return getattr(hvdtrain.tensorflow, name)


def __dir__() -> list[str]:
    return __all__
