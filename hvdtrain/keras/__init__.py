"""Horovod's Keras API on Keras 3: ``import hvdtrain.keras as hvd`` instead of ``horovod.tensorflow.keras``.

Owns the list of names; each is imported on first use, and those that need TensorFlow refuse other backends.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("callbacks", "elastic")

_HOME = {
    "DistributedOptimizer": "optimizer", "PartialDistributedOptimizer": "optimizer", "load_model": "optimizer",
    "allreduce": "exchange", "allgather": "exchange", "broadcast": "exchange", "reducescatter": "exchange",
    "shard": "data",
}

_BASICS = (
    "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline",
    "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
    "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built",
    "Average", "Sum", "Adasum", "Compression", "ProcessSet", "global_process_set", "add_process_set",
    "remove_process_set", "broadcast_variables", "broadcast_global_variables",
)

_ANY_BACKEND = ("elastic", "shard")

__all__ = sorted([*_MODULES, *_HOME, *_BASICS])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdtrain.keras' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name not in _ANY_BACKEND:
        _needs_tensorflow(name)
    if name in _MODULES:
        return importlib.import_module(f"hvdtrain.keras.{name}")
    home = f"hvdtrain.keras.{_HOME[name]}" if name in _HOME else "hvdtrain.tensorflow"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__


def _needs_tensorflow(name: str) -> None:
    from hvdtrain.cluster import quiet

    quiet.watch_import()
    import keras

    backend = keras.backend.backend()
    if backend != "tensorflow":
        from hvdtrain.core.errors import UserError

        instead = "train it with hvdtrain.Trainer(config).fit(model, data), or set KERAS_BACKEND=tensorflow"
        if backend != "torch":
            instead = "set KERAS_BACKEND=tensorflow, or torch with hvdtrain.Trainer(config).fit(model, data)"
        raise UserError(f"hvdtrain.keras.{name} with Keras on the {backend} backend", "the tensorflow backend", instead)
