"""Collectives on tensors, by Horovod's names: `allreduce`, `allgather`, `broadcast`, their asynchronous forms, ...

Owns their arguments, names and gradients. Transports and waits are `hvdtrain.torch.transports`'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain import job
from hvdtrain.core.errors import NotSupported, WrongValue
from hvdtrain.core.process_sets import Adasum, Average, ProcessSet, Sum, global_process_set, reduction
from hvdtrain.torch.basics import member_wire, unnamed
from hvdtrain.torch.compression import Compression, Compressor
from hvdtrain.torch.transports import AsyncHandle

Splits = torch.Tensor | Sequence[int] | None


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `allreduce`; return a handle for `synchronize` and `poll`."""
    return _allreduce([tensor], average, name, op, (prescale_factor, postscale_factor), process_set)


def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `allreduce_`; return a handle for `synchronize` and `poll`."""
    return _allreduce([tensor], average, name, op, (prescale_factor, postscale_factor), process_set, in_place=True)


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Combine a tensor over the ranks: the mean by default, or by ``op`` (Sum, Min, Max, Product, Adasum).

    The same shape and type on every rank, and the same ``name`` where one is given. ``average`` is the old form of
    ``op``. Factors multiply on this rank, before and after. Differentiable. Collective. Errors: `UserError` on a rank
    outside of ``process_set``, `HorovodInternalError` where the ranks differ.
    """
    small, context = compression.compress(tensor)
    out = _Allreduce.apply(False, average, name, op, (prescale_factor, postscale_factor), process_set, small)
    return compression.decompress(out, context)


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Run `allreduce` in the tensor's own memory. Not differentiable. Collective."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `grouped_allreduce`; return one handle for all."""
    return _allreduce(tensors, average, name, op, (prescale_factor, postscale_factor), process_set, grouped=True)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                             op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `grouped_allreduce_`; return one handle for all."""
    return _allreduce(tensors, average, name, op, (prescale_factor, postscale_factor), process_set, in_place=True,
                      grouped=True)


def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                      compression: type[Compressor] = Compression.none, op: int | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Run `allreduce` of several tensors, which travel together. Differentiable. Collective."""
    small, contexts = _compressed(tensors, compression)
    factors = (prescale_factor, postscale_factor)
    outs = _Allreduce.apply(True, average, name, op, factors, process_set, *small) if small else ()
    return [compression.decompress(out, context) for out, context in zip(outs, contexts)]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                       op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> Sequence[torch.Tensor]:
    """Run `grouped_allreduce` in the tensors' own memory. Not differentiable. Collective."""
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: int,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Start the sum or mean of a sparse tensor; return a function that waits and gives it, also to `synchronize`.

    Every rank's indices and values are gathered; indices that occur twice are summed when the result is coalesced.
    """
    if op not in (Average, Sum):
        raise NotSupported(f"a sparse tensor reduced by op={op}", "hvd.Average or hvd.Sum",
                           "pass one of them, or a dense tensor")
    own = tensor.detach()
    indices = allgather_async(own._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(own._values(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        rows, columns = values.wait(), indices.wait().t()
        if op == Average:
            rows = rows / process_set.size()
        return torch.sparse_coo_tensor(columns, rows, own.shape, check_invariants=False)

    return wait


def allgather_async(tensor: torch.Tensor, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `allgather`; return a handle for `synchronize` and `poll`."""
    return _allgather([tensor], name, process_set)


def allgather(tensor: torch.Tensor, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return every rank's rows, one rank behind the other: (R_r, ...) -> (sum R_r, ...).

    All dimensions but the first are the same on every rank. Differentiable, with the mean of the ranks' gradients as
    Horovod's has. Collective.
    """
    return _Allgather.apply(False, name, process_set, tensor)


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `grouped_allgather`; return one handle for all."""
    return _allgather(tensors, name, process_set, grouped=True)


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Run `allgather` of several tensors, which travel together. Differentiable. Collective."""
    return list(_Allgather.apply(True, name, process_set, *tensors)) if tensors else []


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `broadcast`; return a handle for `synchronize` and `poll`."""
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `broadcast_`; return a handle for `synchronize` and `poll`."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return rank ``root_rank``'s tensor, on every rank; the same shape everywhere, the root counted in the job.

    Differentiable, as `allgather` is. Collective.
    """
    return _Broadcast.apply(root_rank, name, process_set, tensor)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Run `broadcast` in the tensor's own memory. Not differentiable. Collective."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def alltoall_async(tensor: torch.Tensor, splits: Splits = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> AsyncHandle:
    """Start `alltoall`; the handle's result is always (rows, number of rows from each rank)."""
    given = splits if splits is None or torch.is_tensor(splits) else torch.tensor(splits, dtype=torch.int32)
    return member_wire(process_set).alltoall(tensor, given, name or unnamed(process_set))


def alltoall(tensor: torch.Tensor, splits: Splits = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank: ``splits[p]`` of them to the p-th, the same number to each if ``splits`` is None.

    Return the received rows, by source; with ``splits`` also how many came from each rank. Differentiable. Collective.
    """
    rows, received_P = _Alltoall.apply(splits, name, process_set, tensor)
    return rows if splits is None else (rows, received_P)


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> AsyncHandle:
    """Start `reducescatter`; return a handle for `synchronize` and `poll`."""
    return _reducescatter([tensor], name, op, process_set, (prescale_factor, postscale_factor))


def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
                  op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:
    """Return this rank's rows of the mean (or sum) over the ranks: (R, ...) -> (R_r, ...).

    If the number of ranks does not divide R the first ranks get a row more. Differentiable. Collective.
    """
    small, context = compression.compress(tensor)
    out = _Reducescatter.apply(False, name, op, process_set, (prescale_factor, postscale_factor), small)
    return compression.decompress(out, context)


def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> AsyncHandle:
    """Start `grouped_reducescatter`; return one handle for all."""
    return _reducescatter(tensors, name, op, process_set, (prescale_factor, postscale_factor), grouped=True)


def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None = None,
                          compression: type[Compressor] = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    """Run `reducescatter` of several tensors, which travel together. Differentiable. Collective."""
    small, contexts = _compressed(tensors, compression)
    factors = (prescale_factor, postscale_factor)
    outs = _Reducescatter.apply(True, name, op, process_set, factors, *small) if small else ()
    return [compression.decompress(out, context) for out, context in zip(outs, contexts)]


def poll(handle: AsyncHandle | Callable[[], torch.Tensor]) -> bool:
    """Return whether a collective that was started is over, so that `synchronize` does not wait."""
    return handle.done() if isinstance(handle, AsyncHandle) else False


def synchronize(handle: AsyncHandle | Callable[[], torch.Tensor]) -> Any:
    """Wait for a collective that was started, and return its result: a tensor, or a tuple of a group's.

    A wait that takes longer than ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` (600 unless it is set) ends the job, with the
    name of the collective and of the ranks that are missing.
    """
    if isinstance(handle, AsyncHandle):
        return handle.wait()
    if callable(handle):
        return handle()
    raise WrongValue(f"synchronize({handle!r})", "what an asynchronous collective returned", "pass such a handle")


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of ``process_set`` has called it. Collective."""
    member_wire(process_set).barrier()


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the reduction of ``op`` and the old ``average``; `ValueError` if both are given."""
    return reduction(op, average)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is 1, 2, 4, 8, ..., as Adasum needs it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def _allreduce(xs: Sequence[torch.Tensor], average: bool | None, name: str | None, op: int | None,
               factors: tuple[float, float], process_set: ProcessSet, in_place: bool = False,
               grouped: bool = False) -> AsyncHandle:
    how, wire = reduction(op, average), member_wire(process_set)
    if how == Adasum and process_set.process_set_id != 0:
        raise NotSupported("Adasum among some ranks", "all ranks of the job", "use op=hvd.Average")
    return wire.allreduce(xs, name or unnamed(process_set), how, factors, in_place, grouped)


def _allgather(xs: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet,
               grouped: bool = False) -> AsyncHandle:
    wire = member_wire(process_set)
    return wire.allgather([_with_rows(x) for x in xs], name or unnamed(process_set), grouped)


def _broadcast(x: torch.Tensor, root: int, name: str | None, process_set: ProcessSet,
               in_place: bool = False) -> AsyncHandle:
    wire = member_wire(process_set)
    if root not in (process_set.ranks or []):
        raise WrongValue(f"root_rank {root} among ranks {process_set.ranks}", "one of them", "pass such a rank")
    return wire.broadcast(x, root, name or unnamed(process_set), in_place)


def _reducescatter(xs: Sequence[torch.Tensor], name: str | None, op: int, process_set: ProcessSet,
                   factors: tuple[float, float], grouped: bool = False) -> AsyncHandle:
    wire = member_wire(process_set)
    return wire.reducescatter([_with_rows(x) for x in xs], name or unnamed(process_set), op, factors, grouped)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; `UserError` for a scalar, which has no rows."""
    if not x.dim():
        raise WrongValue("a scalar tensor where rows are gathered or scattered", "a tensor of one dimension or more",
                         "pass tensor.reshape(1)")
    return x


def _compressed(tensors: Sequence[torch.Tensor], compression: type[Compressor]) -> tuple[list[Any], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [small for small, _ in pairs], [context for _, context in pairs]


class _Allreduce(torch.autograd.Function):
    """Gradients are combined as the tensors were."""

    @staticmethod
    def forward(ctx: Any, grouped: bool, average: bool | None, name: str | None, op: int | None,
                factors: tuple[float, float], process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.call = grouped, average, None, op, factors, process_set
        return _allreduce(tensors, average, name, op, factors, process_set, grouped=grouped).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        outs = _Allreduce.apply(*ctx.call, *grads)
        return (*[None] * 6, *(outs if ctx.call[0] else [outs]))


class _Allgather(torch.autograd.Function):
    """A rank's gradient is the mean over ranks of what its rows got."""

    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        handle = _allgather(tensors, name, process_set, grouped)
        ctx.rows, ctx.process_set = [len(x) for x in tensors], process_set
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        among = ctx.process_set
        means = grouped_allreduce(grads, op=Average, process_set=among)
        rows_P = allgather(torch.tensor([ctx.rows]), process_set=among)
        begins = rows_P[:among.rank()].sum(0).tolist()
        return (None, None, None, *(g.narrow(0, begin, n) for g, begin, n in zip(means, begins, ctx.rows)))


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the mean over ranks; other ranks' are zero."""

    @staticmethod
    def forward(ctx: Any, root: int, name: str | None, process_set: ProcessSet, tensor: torch.Tensor) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return _broadcast(tensor, root, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return None, None, None, mean if job.rank() == ctx.root else torch.zeros_like(mean)


class _Alltoall(torch.autograd.Function):
    """Gradients go back to where their rows came from."""

    @staticmethod
    def forward(ctx: Any, splits: Splits, name: str | None, process_set: ProcessSet, tensor: torch.Tensor) -> Any:
        rows, received_P = alltoall_async(tensor, splits, name, process_set).wait()
        ctx.received_P, ctx.process_set = received_P, process_set
        ctx.mark_non_differentiable(received_P)
        return rows, received_P

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = alltoall(grads[0], ctx.received_P, process_set=ctx.process_set)
        return None, None, None, back


class _Reducescatter(torch.autograd.Function):
    """Gradients are gathered: each row's from the rank that holds its sum."""

    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, op: int, process_set: ProcessSet,
                factors: tuple[float, float], *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        ctx.factor = factors[0] * factors[1] * ((process_set.size() or 1) if op == Sum else 1)
        return _reducescatter(tensors, name, op, process_set, factors, grouped).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        outs = grouped_allgather([g * ctx.factor for g in grads], process_set=ctx.process_set)
        return (*[None] * 5, *outs)
