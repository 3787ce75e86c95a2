"""Answers about the build (`mpi_built`, `nccl_built`, ...), Horovod's timeline, and names that are not supported.

Owns the answers where Horovod is not built: plain MPI can be had there, and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hvdtrain.cluster import boot, horovod
from hvdtrain.core.errors import UserError
from hvdtrain.tensorflow import basics


def _horovod() -> Any:
    """Return Horovod's module, loaded where no job has started it yet; None where it is not built."""
    if basics.is_initialized() and basics.world().hvd is not None:
        return basics.world().hvd
    if horovod.horovod_reason("tensorflow") is not None:
        return None
    from hvdtrain.backends.tensorflow.collectives import built

    try:
        return built()
    except Exception:  # noqa: BLE001 one that was built for another TensorFlow does not load, and is as good as none
        return None


def _answer(name: str, doc: str, kind: type = bool) -> Callable[[], Any]:
    """Return Horovod's function ``name``, whose answer is 0 or False where Horovod is not built."""
    def ask() -> Any:
        hvd = _horovod()
        return kind() if hvd is None else kind(getattr(hvd, name)())
    ask.__name__, ask.__doc__ = name, doc
    return ask


def mpi_enabled() -> bool:
    """Return whether MPI carries this job: Horovod's over MPI, or plain MPI."""
    if basics.is_initialized():
        world = basics.world()
        return boot.has_mpi() if world.hvd is None else bool(world.hvd.mpi_enabled())
    hvd = _horovod()
    return hvd is not None and bool(hvd.mpi_enabled())


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI; `ValueError` before `init` and in a job over Gloo."""
    if basics.size() == 1:
        return True
    if not boot.has_mpi():
        raise ValueError("MPI does not carry this job")
    return boot.mpi_threads()


mpi_built = _answer("mpi_built", "Return whether collectives over MPI were built.")
gloo_built = _answer("gloo_built", "Return whether Horovod was built with Gloo.")
gloo_enabled = _answer("gloo_enabled", "Return whether Horovod can use Gloo in this job.")
nccl_built = _answer("nccl_built", "Return the NCCL version that Horovod was built with, 0 without NCCL.", int)
ddl_built = _answer("ddl_built", "Return whether Horovod was built with IBM's DDL.")
ccl_built = _answer("ccl_built", "Return whether Horovod was built with oneCCL.")
cuda_built = _answer("cuda_built", "Return whether Horovod was built with CUDA.")
rocm_built = _answer("rocm_built", "Return whether Horovod was built with ROCm.")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow finds a GPU here; the arguments are Horovod's and not needed."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise `ImportError` with the remedy where Horovod's TensorFlow part is not built; the arguments are not needed.
    """
    reason = horovod.horovod_reason("tensorflow")
    if reason is not None:
        raise ImportError(f"{ext_name}: {reason}")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Have Horovod record what its collectives do in ``file_path``; only a warning where Horovod carries nothing."""
    hvd = basics.world().hvd
    if hvd is None:
        warnings.warn("no timeline: Horovod carries no collectives here", stacklevel=2)
        return
    hvd.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close what `start_timeline` opened."""
    hvd = basics.world().hvd
    if hvd is not None:
        hvd.stop_timeline()


def no_elastic() -> UserError:
    """Return the error of every name of ``elastic``."""
    return UserError(
        "hvd.elastic, which is left out: its rendezvous is an HTTP server without authentication that unpickles what "
        "it is sent, so whoever reaches it runs code on every host (CVE-2024-10190, no fixed release)",
        "checkpoints, and a job that is started again and resumes from the last one",
        "use hvdtrain.Trainer with checkpoint.every_steps and resume: auto, which continues with another number of "
        "ranks too")


def broadcast_global_variables(root_rank: int) -> None:
    """Raise `UserError`: TensorFlow 2 keeps no list of all variables."""
    from hvdtrain.tensorflow.nodes import WrongMode

    raise WrongMode(f"broadcast_global_variables({root_rank}), which belongs to TensorFlow 1: there is no list of all "
                    "variables any more", "the variables themselves",
                    "call hvd.broadcast_variables(model.variables, root_rank) and the same for optimizer.variables, or "
                    "give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


class BroadcastGlobalVariablesHook:
    """A hook of TensorFlow 1's sessions: to make one raises `UserError`."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        from hvdtrain.tensorflow.nodes import WrongMode

        raise WrongMode(f"BroadcastGlobalVariablesHook({root_rank}), which belongs to TensorFlow 1's sessions",
                        "eager TensorFlow 2", "call hvd.broadcast_variables(model.variables, root_rank) after the "
                        "first step, or give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: Any = None) -> Any:
    """Raise `UserError`: it would build a graph for TensorFlow 1's sessions."""
    from hvdtrain.tensorflow.nodes import WrongMode

    raise WrongMode("broadcast_object_fn, which builds a graph for TensorFlow 1's sessions", "eager TensorFlow 2",
                    "call hvd.broadcast_object(obj, root_rank)")
