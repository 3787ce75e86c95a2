"""Horovod's collectives for PyTorch. Sums only (law 1); names are given by the reducer (law 5).

Given CPU tensors, Horovod uses its MPI (or Gloo) operations, given a GPU's those that it was built with: `staged`
puts the former under gradients of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.backends.torch.staged import StagedCollectives
from hvdtrain.cluster.deadline import deadline
from hvdtrain.errors import PeerFailed
from hvdtrain.faults import pulse
from hvdtrain.protocols import Collectives


class _Pending:
    """An asynchronous Horovod operation."""

    def __init__(self, hvd: Any, handle: int, limit: tuple[float, str], shape: tuple[int, ...] | None = None) -> None:
        self._hvd, self._handle, self._limit, self._shape = hvd, handle, limit, shape

    def wait(self) -> torch.Tensor:
        try:
            with deadline(*self._limit), pulse.waiting(self._limit[1]):
                out = self._hvd.synchronize(self._handle)
        except Exception as error:
            if type(error).__name__ == "HorovodInternalError":
                raise PeerFailed(f"Horovod could not complete a collective: {error}") from error
            raise
        if isinstance(out, tuple):  # alltoall also gives the received splits
            out = out[0]
        return out if self._shape is None else out.reshape(self._shape)


class HorovodCollectives:
    """`hvdtrain.protocols.Collectives` over ``horovod.torch``: asynchronous, in place, overlapping backward.

    ``timeout_s``: longest wait for one of them (`deadline`).
    """

    name = "horovod"
    dtypes = frozenset({"float16", "float32", "float64", "int32", "int64"})
    overlaps = True
    in_graph = False
    host = False

    def __init__(self, hvd: Any, timeout_s: float = 600.0) -> None:
        self._hvd, self.timeout_s = hvd, timeout_s
        self.rank, self.size = hvd.rank(), hvd.size()
        self.hierarchical = bool(hvd.nccl_built())
        self.reductions = frozenset({"adasum"} if hvd.mpi_enabled() else ())

    def buffer(self, n: int, dtype: str) -> None:
        return None

    def allreduce(self, flat_N: torch.Tensor, name: str, op: str = "sum") -> _Pending:
        reduction = self._hvd.Adasum if op == "adasum" else self._hvd.Sum
        return self._pending("allreduce", name, self._hvd.allreduce_async_(flat_N, name=name, op=reduction))

    def allgather(self, x_K: torch.Tensor, name: str) -> _Pending:
        return self._pending("allgather", name, self._hvd.allgather_async(x_K[None], name=name))

    def alltoall(self, x_PK: torch.Tensor, name: str) -> _Pending:
        handle = self._hvd.alltoall_async(x_PK.contiguous(), name=name)
        return self._pending("alltoall", name, handle, tuple(x_PK.shape))

    def reducescatter(self, flat_N: torch.Tensor, name: str) -> _Pending:
        handle = self._hvd.reducescatter_async(flat_N, name=name, op=self._hvd.Sum)
        return self._pending("reducescatter", name, handle)

    def broadcast(self, x_N: torch.Tensor, name: str, root: int = 0) -> _Pending:
        return self._pending("broadcast", name, self._hvd.broadcast_async(x_N, root, name=name))

    def _pending(self, kind: str, name: str, handle: int, shape: tuple[int, ...] | None = None) -> _Pending:
        return _Pending(self._hvd, handle, (self.timeout_s, f"Horovod's {kind} {name!r}"), shape)


def collectives(kind: str, control: Any, exchange: Any, start_horovod: Callable[..., Any],
                over_host: bool = False) -> HorovodCollectives | StagedCollectives | None:
    """Horovod's collectives for PyTorch, started; None for a kind the core provides.

    ``over_host``: from host memory, also where tensors lie on a GPU.
    """
    if kind != "horovod":
        return None
    wire = HorovodCollectives(start_horovod("torch", exchange), getattr(control, "timeout_s", 600.0))
    return stage(wire, control) if over_host else wire


def stage(wire: Collectives, control: Any) -> StagedCollectives:
    """A wire of host memory, for tensors of a GPU: pinned, and overlapping what computes."""
    return StagedCollectives(wire, timeout_s=getattr(control, "timeout_s", 600.0))
