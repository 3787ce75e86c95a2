"""Start of a job for PyTorch, its transports, and answers about the build (`mpi_built`, `nccl_built`, ...).

The job itself, its ranks and process sets are `hvdtrain.job`'s, for all frameworks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain import job
from hvdtrain.backends.torch.placement import defer_compiler
from hvdtrain.cluster import horovod
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.comm.collectives.shared import SharedCollectives
from hvdtrain.core.errors import WrongValue
from hvdtrain.core.process_sets import ProcessSet, global_process_set
from hvdtrain.job import World

if TYPE_CHECKING:
    from hvdtrain.torch.transports import Wire

_numbers: dict[int, Iterator[int]] = {}
_joins = [0]


class _PyTorch:
    """`hvdtrain.job.JobFramework` of PyTorch."""

    name = "torch"

    def check(self) -> None:
        """Accept any mode: PyTorch has one."""

    def has_gpu(self) -> bool:
        return torch.cuda.is_available()

    def horovod_wire(self, world: World, process_set: ProcessSet, theirs: Any) -> Any:
        from hvdtrain.torch.transports import HorovodWire

        timeout_s = horovod.stall_bound(os.environ)
        return HorovodWire(world.hvd, theirs or world.hvd.global_process_set, process_set.size() or 1, timeout_s)

    def plain_wire(self, mpi: MpiCollectives, process_set: ProcessSet) -> Any:
        from hvdtrain.torch.transports import MpiWire

        return MpiWire(mpi, process_set.ranks or [])


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job for PyTorch: `hvdtrain.job.init`. Collective."""
    defer_compiler()
    job.init(_PyTorch(), comm, process_sets)
    shared_wire(global_process_set)  # here, as later one rank alone may make an optimizer, or join


def member_wire(process_set: ProcessSet) -> Wire:
    """Return the transport of ``process_set``; `UserError` if the set leaves this rank out."""
    from hvdtrain.torch.transports import MpiWire

    found = job.wire(process_set)
    if not process_set.included():
        raise WrongValue(f"a collective among ranks {process_set.ranks} on rank {job.rank()}, which is not one of them",
                         "a process set that this rank is in", "call it under `if process_set.included():`")
    return found or MpiWire(NullCollectives(), [job.rank()])


def unnamed(process_set: ProcessSet) -> str:
    """Return a name for a collective, numbered within its process set (Horovod's differ between sets)."""
    number = process_set.process_set_id or 0
    return f"unnamed.{_joins[-1]}.{next(_numbers.setdefault(number, itertools.count()))}"


def renumber() -> None:
    """Begin to number again where all ranks are: after `join`, before which they made different numbers of calls."""
    _joins.append(_joins.pop() + 1)
    _numbers.clear()


def shared_wire(process_set: ProcessSet) -> SharedCollectives | None:
    """Return the transport of dense CPU gradients of ``process_set`` in shared memory, or None. Collective."""
    return job.shared_wire(process_set, able=True)


_answer = partial(job.answer, "torch")
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
    return job.mpi_enabled("torch")


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether PyTorch finds a GPU here; the arguments are Horovod's and not needed."""
    return torch.cuda.is_available()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise `ImportError` with the remedy where Horovod's PyTorch part is not built; the arguments are not needed."""
    horovod.check_built("torch", ext_name)
