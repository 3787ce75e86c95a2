"""What this job's collectives were built with, as Horovod's scripts ask: `mpi_built`, `nccl_built`, ...

Owns the answers where Horovod is not built: plain MPI can be had there, and nothing else. Also Horovod's timeline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hvdtrain.cluster import boot, horovod
from hvdtrain.tensorflow import basics


def _horovod() -> Any:
    """Horovod's module, loaded where no job has started it yet; None where it is not built."""
    if basics.is_initialized() and basics.world().hvd is not None:
        return basics.world().hvd
    if horovod.horovod_reason("tensorflow") is not None:
        return None
    from hvdtrain.backends.tensorflow.collectives import built

    try:
        return built()
    except Exception:  # noqa: BLE001 one that was built for another TensorFlow does not load, and is as good as none
        return None


def _answer(name: str, what: str, kind: type = bool) -> Callable[[], Any]:
    """A function of Horovod's called ``name``, whose answer is 0 or False where Horovod is not built."""
    def ask() -> Any:
        hvd = _horovod()
        return kind() if hvd is None else kind(getattr(hvd, name)())
    ask.__name__, ask.__doc__ = name, what
    return ask


def mpi_enabled() -> bool:
    """Whether MPI carries this job: Horovod's over MPI, or plain MPI."""
    if basics.is_initialized():
        world = basics.world()
        return boot.has_mpi() if world.hvd is None else bool(world.hvd.mpi_enabled())
    hvd = _horovod()
    return hvd is not None and bool(hvd.mpi_enabled())


def mpi_threads_supported() -> bool:
    """Whether several threads may be in MPI at once; `ValueError` before `init` and in a job over Gloo."""
    if basics.size() == 1:
        return True
    if not boot.has_mpi():
        raise ValueError("MPI does not carry this job")
    return boot.mpi_threads()


mpi_built = _answer("mpi_built", "Whether collectives over MPI were built.")
gloo_built = _answer("gloo_built", "Whether Horovod was built with Gloo.")
gloo_enabled = _answer("gloo_enabled", "Whether Horovod can use Gloo in this job.")
nccl_built = _answer("nccl_built", "The number of NCCL's version that Horovod was built with, 0 for none.", int)
ddl_built = _answer("ddl_built", "Whether Horovod was built with IBM's DDL.")
ccl_built = _answer("ccl_built", "Whether Horovod was built with oneCCL.")
cuda_built = _answer("cuda_built", "Whether Horovod was built with CUDA.")
rocm_built = _answer("rocm_built", "Whether Horovod was built with ROCm.")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow finds a GPU here; the arguments are Horovod's and not needed."""
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
