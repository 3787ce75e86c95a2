"""Answers about the build (`mpi_built`, `nccl_built`, ...), and names that are not supported.

The answers are `hvdtrain.job`'s: without a built Horovod plain MPI can be had, and nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hvdtrain import job
from hvdtrain.cluster import horovod
from hvdtrain.core.errors import WrongMode

_answer = partial(job.answer, "tensorflow")
mpi_built = _answer("mpi_built", "Return whether collectives over MPI were built.")
gloo_built = _answer("gloo_built", "Return whether Horovod was built with Gloo.")
gloo_enabled = _answer("gloo_enabled", "Return whether Horovod can use Gloo in this job.")
nccl_built = _answer("nccl_built", "Return the NCCL version that Horovod was built with, 0 without NCCL.", int)
ddl_built = _answer("ddl_built", "Return whether Horovod was built with IBM's DDL.")
ccl_built = _answer("ccl_built", "Return whether Horovod was built with oneCCL.")
cuda_built = _answer("cuda_built", "Return whether Horovod was built with CUDA.")
rocm_built = _answer("rocm_built", "Return whether Horovod was built with ROCm.")


def mpi_enabled() -> bool:
    """Return whether MPI carries this job: Horovod's over MPI, or plain MPI."""
    return job.mpi_enabled("tensorflow")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow finds a GPU here; the arguments are Horovod's and not needed."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise `ImportError` with the remedy where Horovod's TensorFlow part is not built; arguments are ignored."""
    horovod.check_built("tensorflow", ext_name)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise `UserError`: TensorFlow 2 keeps no list of all variables."""
    raise WrongMode(f"broadcast_global_variables({root_rank}), which belongs to TensorFlow 1: TensorFlow 2 has "
                    "no list of all variables", "the variables themselves",
                    "call hvd.broadcast_variables(model.variables, root_rank) and the same for optimizer.variables, or "
                    "give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


class BroadcastGlobalVariablesHook:
    """A hook of TensorFlow 1's sessions: to make one raises `UserError`."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise WrongMode(f"BroadcastGlobalVariablesHook({root_rank}), which belongs to TensorFlow 1's sessions",
                        "eager TensorFlow 2", "call hvd.broadcast_variables(model.variables, root_rank) after the "
                        "first step, or give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: Any = None) -> Any:
    """Raise `UserError`: it would build a graph for TensorFlow 1's sessions."""
    raise WrongMode("broadcast_object_fn, which builds a graph for TensorFlow 1's sessions", "eager TensorFlow 2",
                    "call hvd.broadcast_object(obj, root_rank)")
