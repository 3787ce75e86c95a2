"""Horovod's collectives for PyTorch. Sums only (law 1); names are given by the reducer (law 5).

Given CPU tensors, Horovod uses its MPI (or Gloo) operations, given a GPU's those that it was built with: `staged`
puts the former under gradients of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.staged import StagedCollectives
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.null import Done
from hvdtrain.comm.collectives.parts import WithoutMemory
from hvdtrain.core.errors import PeerFailed, UserError
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Control, Handle
from hvdtrain.core.timeline import blocked


class _Pending:
    """An asynchronous Horovod operation, under way since ``came_s``."""

    def __init__(self, hvd: Any, handle: int, limit: tuple[float, str], name: str,
                 shape: tuple[int, ...] | None = None) -> None:
        self._hvd, self._handle, self._limit, self._name, self._shape = hvd, handle, limit, name, shape
        self._came_s = time.perf_counter()

    def wait(self) -> torch.Tensor:
        try:
            with deadline(*self._limit), pulse.waiting(self._limit[1]), blocked(self._name, self._came_s):
                out = self._hvd.synchronize(self._handle)
        except Exception as error:
            if type(error).__name__ == "HorovodInternalError":
                raise PeerFailed(f"Horovod could not complete a collective: {error}") from error
            raise
        if isinstance(out, tuple):  # alltoall also gives the received splits
            out = out[0]
        return out if self._shape is None else out.reshape(self._shape)

    def done(self) -> bool:
        """Return whether the result is there, without waiting; for who looks on (`hvdtrain.comm.reducer.watched`)."""
        return bool(self._hvd.poll(self._handle))


class _Parts:
    """Every rank's rows of this one's part, on their way; summed in the order of the ranks once they are here."""

    def __init__(self, pending: _Pending, rank: int, size: int, k: int) -> None:
        self._pending, self._rank, self._size, self._k = pending, rank, size, k

    def wait(self) -> torch.Tensor:
        rows = self._pending.wait()
        if rows.numel() != self._size * self._k:
            raise RuntimeError(f"ranks disagree about their parts: rank {self._rank} received {rows.numel()} elements "
                               f"in place of {self._size} x {self._k}")
        rows_PK = rows.reshape(self._size, self._k)
        total_K = rows_PK[0].to(torch.float32) if rows.dtype == torch.float16 else rows_PK[0].clone()
        for row_K in rows_PK[1:]:
            total_K += row_K
        return total_K.to(rows.dtype)


class HorovodCollectives(WithoutMemory):
    """`hvdtrain.core.protocols.Collectives` over ``horovod.torch``: asynchronous, in place, overlapping backward.

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

    def among(self, group: Group) -> HorovodCollectives:
        """Raise `UserError`: Horovod is started for all ranks."""
        raise UserError("a pipeline over ranks with collectives horovod", "a wire between some of the ranks",
                        "set collectives: auto, shared or mpi")

    def allreduce(self, flat_N: torch.Tensor, name: str, op: str = "sum") -> _Pending:
        reduction = self._hvd.Adasum if op == "adasum" else self._hvd.Sum
        return self._pending("allreduce", name, self._hvd.allreduce_async_(flat_N, name=name, op=reduction))

    def allgather(self, x_K: torch.Tensor, name: str) -> _Pending:
        return self._pending("allgather", name, self._hvd.allgather_async(x_K[None], name=name))

    def alltoall(self, x_PK: torch.Tensor, name: str) -> _Pending:
        handle = self._hvd.alltoall_async(x_PK.contiguous(), name=name)
        return self._pending("alltoall", name, handle, tuple(x_PK.shape))

    def alltoallv(self, flat_N: torch.Tensor, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> _Pending:
        splits_P = torch.tensor(sent_P, dtype=torch.int32)
        handle = self._hvd.alltoall_async(flat_N.contiguous(), splits=splits_P, name=name)
        return self._pending("alltoallv", name, handle, (sum(got_P),))

    def reducescatter(self, flat_N: torch.Tensor, name: str) -> _Pending:
        handle = self._hvd.reducescatter_async(flat_N, name=name, op=self._hvd.Sum)
        return self._pending("reducescatter", name, handle)

    def reducescatterv(self, flat_N: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """This rank's part of the sum: every rank sends each other its part and adds what it gets in rank order.

        Horovod's own reduce-scatter cuts evenly, and adds in an order of its own. Holds P times its part meanwhile.
        """
        assert flat_N.numel() == sum(sizes_P), f"reducescatterv of {flat_N.numel()} elements into {list(sizes_P)}"
        if not flat_N.numel():  # on every rank, which all know
            return Done(flat_N)
        splits_P = torch.tensor(sizes_P, dtype=torch.int32)
        handle = self._hvd.alltoall_async(flat_N.contiguous(), splits=splits_P, name=name)
        return _Parts(self._pending("reducescatterv", name, handle), self.rank, self.size, sizes_P[self.rank])

    def allgatherv(self, part_K: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        assert part_K.numel() == sizes_P[self.rank], f"allgatherv of {part_K.numel()} as one of {list(sizes_P)}"
        if not sum(sizes_P):
            return Done(part_K)
        handle = self._hvd.allgather_async(part_K.contiguous(), name=name)
        return self._pending("allgatherv", name, handle, (sum(sizes_P),))

    def broadcast(self, x_N: torch.Tensor, name: str, root: int = 0) -> _Pending:
        return self._pending("broadcast", name, self._hvd.broadcast_async(x_N, root, name=name))

    def _pending(self, kind: str, name: str, handle: int, shape: tuple[int, ...] | None = None) -> _Pending:
        return _Pending(self._hvd, handle, (self.timeout_s, f"Horovod's {kind} {name!r}"), name, shape)


def collectives(kind: str, control: Control, exchange: Any, start_horovod: Callable[..., Any],
                over_host: bool = False) -> HorovodCollectives | StagedCollectives | None:
    """Horovod's collectives for PyTorch, started; None for a kind the core provides.

    ``over_host``: from host memory, also where tensors lie on a GPU.
    """
    if kind != "horovod":
        return None
    wire = HorovodCollectives(start_horovod("torch", exchange), control.timeout_s)
    return stage(wire, control) if over_host else wire


def stage(wire: Collectives, control: Control) -> StagedCollectives:
    """A wire of host memory, for tensors of a GPU: pinned, and overlapping what computes."""
    return StagedCollectives(wire, timeout_s=control.timeout_s)
