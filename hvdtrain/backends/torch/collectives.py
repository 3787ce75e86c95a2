"""Horovod's collectives for PyTorch (sums only, law 1), and host collectives for tensors of a GPU.

Names come from the reducer (law 5); copies and their threads are `hvdtrain.backends.torch.pinned`'s.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.pinned import CudaLane, DirectLane, Key, Pipe, Transfer
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.base import ReadyHandle, WithoutMemory
from hvdtrain.core.errors import PeerFailed, UserError
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Control, Handle
from hvdtrain.core.timeline import blocked


class _Pending:
    """Handle of an asynchronous Horovod operation."""

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
        return bool(self._hvd.poll(self._handle))


class _Parts(Handle):
    """Handle of all ranks' rows of this rank's shard, summed in rank order on arrival."""

    def __init__(self, pending: _Pending, rank: int, size: int, k: int) -> None:
        self._pending, self._rank, self._size, self._k = pending, rank, size, k

    def wait(self) -> torch.Tensor:
        rows = self._pending.wait()
        if rows.numel() != self._size * self._k:
            raise RuntimeError(f"ranks disagree about their shards: rank {self._rank} received {rows.numel()} elements "
                               f"in place of {self._size} x {self._k}")
        rows_PK = rows.reshape(self._size, self._k)
        total_K = rows_PK[0].to(torch.float32) if rows.dtype == torch.float16 else rows_PK[0].clone()
        for row_K in rows_PK[1:]:
            total_K += row_K
        return total_K.to(rows.dtype)


class HorovodCollectives(WithoutMemory):
    """`hvdtrain.core.protocols.Collectives` over ``horovod.torch``: asynchronous, in place, overlapping backward.

    CPU tensors use Horovod's MPI (or Gloo) operations, a GPU's those that Horovod was built with. ``timeout_s``:
    longest wait for one of them (`deadline`).
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
        raise UserError("a pipeline over ranks with collectives horovod", "a transport for groups of ranks",
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
        """Send each rank its shard and add what arrives in rank order; takes P times the shard's memory.

        Horovod's own reduce-scatter divides evenly, and adds in an order of its own.
        """
        assert flat_N.numel() == sum(sizes_P), f"reducescatterv of {flat_N.numel()} elements into {list(sizes_P)}"
        if not flat_N.numel():  # on every rank, which all know
            return ReadyHandle(flat_N)
        splits_P = torch.tensor(sizes_P, dtype=torch.int32)
        handle = self._hvd.alltoall_async(flat_N.contiguous(), splits=splits_P, name=name)
        return _Parts(self._pending("reducescatterv", name, handle), self.rank, self.size, sizes_P[self.rank])

    def allgatherv(self, part_K: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        assert part_K.numel() == sizes_P[self.rank], f"allgatherv of {part_K.numel()} as one of {list(sizes_P)}"
        if not sum(sizes_P):
            return ReadyHandle(part_K)
        handle = self._hvd.allgather_async(part_K.contiguous(), name=name)
        return self._pending("allgatherv", name, handle, (sum(sizes_P),))

    def broadcast(self, x_N: torch.Tensor, name: str, root: int = 0) -> _Pending:
        return self._pending("broadcast", name, self._hvd.broadcast_async(x_N, root, name=name))

    def _pending(self, kind: str, name: str, handle: int, shape: tuple[int, ...] | None = None) -> _Pending:
        return _Pending(self._hvd, handle, (self.timeout_s, f"Horovod's {kind} {name!r}"), name, shape)


class _OwnResult:
    """Handle whose numpy result outlives the next call of its wire: a transfer's is read while others continue."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> Any:
        found = self._handle.wait()
        return found if isinstance(found, torch.Tensor) else found.copy()

    def done(self) -> bool:
        return self._handle.done()


class StagedCollectives(WithoutMemory):
    """Implements `hvdtrain.core.protocols.Collectives` for tensors of a GPU, over ``inner`` collectives of host memory.

    ``inner``: takes CPU tensors, or numpy where its ``host`` is set. ``timeout_s``: bound of one `Handle.wait`.
    ``lane``: of every tensor, for tests; by default each tensor's device decides. A tensor that lies in host memory is
    passed on in the same sequence: ranks with and without a GPU can be in one job.
    """

    overlaps = True
    in_graph = False
    host = False
    hierarchical = False

    def __init__(self, inner: Collectives, timeout_s: float = 600.0, lane: DirectLane | None = None) -> None:
        self.name = f"{inner.name} over host memory"
        self.rank, self.size = inner.rank, inner.size
        self.dtypes, self.reductions = inner.dtypes, inner.reductions
        self.timeout_s = timeout_s
        self._inner, self._lane = inner, lane
        self._lanes: dict[torch.device, DirectLane] = {}
        self._pipe: Pipe | None = None

    def among(self, group: Group) -> StagedCollectives:
        return StagedCollectives(self._inner.among(group), self.timeout_s, self._lane)

    def allreduce(self, flat_N: torch.Tensor, name: str, op: str = "sum") -> Handle:
        return self._issue("allreduce", name, flat_N, lambda h: self._inner.allreduce(h, name, op), in_place=True)

    def allgather(self, x_K: torch.Tensor, name: str) -> Handle:
        return self._issue("allgather", name, x_K, lambda h: self._inner.allgather(h, name))

    def alltoall(self, x_PK: torch.Tensor, name: str) -> Handle:
        return self._issue("alltoall", name, x_PK, lambda h: self._inner.alltoall(h, name))

    def alltoallv(self, flat_N: torch.Tensor, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> Handle:
        return self._issue("alltoallv", name, flat_N, lambda h: self._inner.alltoallv(h, sent_P, got_P, name))

    def reducescatter(self, flat_N: torch.Tensor, name: str) -> Handle:
        return self._issue("reducescatter", name, flat_N, lambda h: self._inner.reducescatter(h, name))

    def reducescatterv(self, flat_N: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        return self._issue("reducescatterv", name, flat_N, lambda h: self._inner.reducescatterv(h, sizes_P, name),
                           key="parts")

    def allgatherv(self, part_K: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        return self._issue("allgatherv", name, part_K, lambda h: _OwnResult(self._inner.allgatherv(h, sizes_P, name)),
                           key="parts")

    def broadcast(self, x_N: torch.Tensor, name: str, root: int = 0) -> Handle:
        """Send ``root``'s vector; its host memory is not kept, as a start sends each parameter once."""
        return self._issue("broadcast", name, x_N, lambda h: self._inner.broadcast(h, name, root), keep=False)

    def _issue(self, kind: str, name: str, x: torch.Tensor, call: Callable[[Any], Handle], in_place: bool = False,
               keep: bool = True, key: str = "") -> Handle:
        """Begin the copy and queue its collective; ``keep``: host memory for the next of its name, or ``key``."""
        if self._pipe is None:
            self._pipe = Pipe()
            weakref.finalize(self, self._pipe.issued.put, None).atexit = False  # the threads end with their owner
        x = x.detach()
        own = x.contiguous()
        borrowed: Key | None = (key or f"{kind} {name}", x.dtype, x.numel()) if keep else None
        as_numpy = self._inner.host
        what = f"{kind} {name!r} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} over host memory"
        transfer = Transfer(self._lane_of(x.device), own, borrowed, lambda h: call(h.numpy() if as_numpy else h),
                            in_place, (self.timeout_s, what), name)
        self._pipe.issued.put(transfer)
        return transfer

    def _lane_of(self, device: torch.device) -> DirectLane:
        if self._lane is not None:
            return self._lane
        if device not in self._lanes:
            self._lanes[device] = CudaLane(device) if device.type == "cuda" else DirectLane()
        return self._lanes[device]


def collectives(kind: str, control: Control, exchange: Any, start_horovod: Callable[..., Any],
                over_host: bool = False) -> HorovodCollectives | StagedCollectives | None:
    """Return Horovod's started collectives, ``over_host`` from host memory; None for a kind of the core."""
    if kind != "horovod":
        return None
    wire = HorovodCollectives(start_horovod("torch", exchange), control.timeout_s)
    return stage(wire, control) if over_host else wire


def stage(wire: Collectives, control: Control) -> StagedCollectives:
    """Return ``wire``, which takes host memory, for tensors of a GPU: pinned, and overlapping computation."""
    return StagedCollectives(wire, timeout_s=control.timeout_s)
