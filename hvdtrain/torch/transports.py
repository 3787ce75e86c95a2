"""Transports of users' tensors: Horovod, or plain MPI where it is not built, and one rank alone.

Owns handles, bounds and named failures of their waits, and types that Horovod does not have. The collectives for users
are `hvdtrain.torch.ops`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.cluster import horovod
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.base import gather_rows
from hvdtrain.core.errors import NotSupported, PeerFailed, WrongMode, WrongValue
from hvdtrain.core.process_sets import KINDS, Adasum, Average, Max, Min, Product
from hvdtrain.core.protocols import Collectives
from hvdtrain.core.timeline import blocked

Tensors = Sequence[torch.Tensor]

KNOWN = frozenset({torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
                   torch.int64})
"""Types that Horovod moves."""
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

FOLD: dict[int, Any] = {Min: np.minimum, Max: np.maximum, Product: np.multiply}


class HorovodInternalError(PeerFailed):
    """A collective that did not complete: the ranks disagree about it, or one has left."""


class AsyncHandle:
    """A collective that was started; `wait` may be called again. ``then``: makes the result of the transport's."""

    def __init__(self, wait: Callable[[], Any], done: Callable[[], bool], then: Callable[[Any], Any]) -> None:
        self._wait, self._done, self._then = wait, done, then
        self._over, self._value = False, None

    def wait(self) -> Any:
        if not self._over:
            value = self._wait()
            with torch.no_grad():
                self._value = self._then(value)
            self._over = True
        return self._value

    def done(self) -> bool:
        return self._over or self._done()


class Wire(Protocol):
    """Collectives of one process set. A group of tensors travels together, and its result is a tuple."""

    size: int

    def allreduce(self, xs: Tensors, name: str, op: int, factors: tuple[float, float], in_place: bool,
                  grouped: bool) -> AsyncHandle:
        """Combine tensors of equal shape; ``factors`` multiply before and after."""

    def allgather(self, xs: Tensors, name: str, grouped: bool) -> AsyncHandle:
        """Return every rank's rows, by rank."""

    def broadcast(self, x: torch.Tensor, root: int, name: str, in_place: bool) -> AsyncHandle:
        """Return the tensor of rank ``root`` of the job."""

    def alltoall(self, x: torch.Tensor, splits: torch.Tensor | None, name: str) -> AsyncHandle:
        """Return (received rows, number of rows from each rank)."""

    def reducescatter(self, xs: Tensors, name: str, op: int, factors: tuple[float, float],
                      grouped: bool) -> AsyncHandle:
        """Return this rank's rows of the sum or mean."""

    def barrier(self) -> None:
        """Wait for every rank of the set."""

    def join(self, device: int) -> int:
        """Wait until every rank has called it; return the number of one that came last."""


class HorovodWire:
    """`Wire` over ``horovod.torch``.

    ``theirs``: Horovod's object for the process set. ``timeout_s``: longest wait of one collective (`deadline`).
    bfloat16, which Horovod lacks, is summed in float32; what it does not move (also bool and complex64) travels as
    whole numbers of as many bits. Tensors that are not contiguous travel as copies.
    """

    def __init__(self, hvd: Any, theirs: Any, size: int, timeout_s: float) -> None:
        self._hvd, self.theirs, self.size, self.timeout_s = hvd, theirs, size, timeout_s

    def allreduce(self, xs: Tensors, name: str, op: int, factors: tuple[float, float], in_place: bool,
                  grouped: bool) -> AsyncHandle:
        sent = [_summable(x) for x in xs]
        kind = f"{'grouped_' * grouped}allreduce_async{'_' * in_place}"
        return self._started(kind, sent if grouped else sent[0], name, _back(xs, sent, in_place, grouped), op=op,
                             prescale_factor=factors[0], postscale_factor=factors[1])

    def allgather(self, xs: Tensors, name: str, grouped: bool) -> AsyncHandle:
        sent = [_movable(x) for x in xs]
        kind = f"{'grouped_' * grouped}allgather_async"
        return self._started(kind, sent if grouped else sent[0], name, _back(xs, sent, False, grouped, bits=True))

    def broadcast(self, x: torch.Tensor, root: int, name: str, in_place: bool) -> AsyncHandle:
        sent = _movable(x)
        back = _back([x], [sent], in_place, False, bits=True)
        return self._started(f"broadcast_async{'_' * in_place}", sent, name, back, root_rank=root)

    def alltoall(self, x: torch.Tensor, splits: torch.Tensor | None, name: str) -> AsyncHandle:
        sent = _movable(x)
        back = _back([x], [sent], False, False, bits=True)
        return self._started("alltoall_async", sent, name, lambda out: (back(out[0]), out[1]), splits=splits)

    def reducescatter(self, xs: Tensors, name: str, op: int, factors: tuple[float, float],
                      grouped: bool) -> AsyncHandle:
        sent = [_summable(x) for x in xs]
        kind = f"{'grouped_' * grouped}reducescatter_async"
        return self._started(kind, sent if grouped else sent[0], name, _back(xs, sent, False, grouped), op=op,
                             prescale_factor=factors[0], postscale_factor=factors[1])

    def barrier(self) -> None:
        what = "Horovod's barrier"
        with _failures(), deadline(self.timeout_s, what), pulse.waiting(what), blocked("barrier"):
            self._hvd.barrier(process_set=self.theirs)

    def join(self, device: int) -> int:
        # No deadline: other ranks continue to train meanwhile.
        with _failures(), pulse.waiting("Horovod's join"), blocked("join"):
            return int(self._hvd.join(device))

    def _started(self, kind: str, sent: Any, name: str, then: Callable[[Any], Any], **options: Any) -> AsyncHandle:
        with _failures():
            handle = getattr(self._hvd, kind)(sent, name=name, process_set=self.theirs, **options)
        what = f"Horovod's {kind.replace('_async', '').rstrip('_')} {name!r}"

        def wait() -> Any:
            with _failures(), deadline(self.timeout_s, what), pulse.waiting(what), blocked(name):
                return self._hvd.synchronize(handle)

        return AsyncHandle(wait, lambda: bool(self._hvd.poll(handle)), then)


class MpiWire:
    """`Wire` over plain MPI, and of one rank alone; ``wire`` takes numpy arrays.

    A call returns when its collective is over: ranks make equal calls in order. ``ranks``: of the process set.
    """

    def __init__(self, wire: Collectives, ranks: Sequence[int]) -> None:
        self.wire, self._ranks, self.size = wire, list(ranks), wire.size

    def allreduce(self, xs: Tensors, name: str, op: int, factors: tuple[float, float], in_place: bool,
                  grouped: bool) -> AsyncHandle:
        def ready(out: Any) -> Any:
            outs = [x.copy_(y) for x, y in zip(xs, out)] if in_place else out
            return tuple(outs) if grouped else outs[0]

        return _ready([self._reduced(x, f"{name}.{i}", op, factors) for i, x in enumerate(xs)], ready)

    def allgather(self, xs: Tensors, name: str, grouped: bool) -> AsyncHandle:
        outs = [self._gathered(x, f"{name}.{i}") for i, x in enumerate(xs)]
        return _ready(tuple(outs) if grouped else outs[0])

    def broadcast(self, x: torch.Tensor, root: int, name: str, in_place: bool) -> AsyncHandle:
        sent = _bytes(x.reshape(1, *x.shape)).reshape(-1)
        got = self.wire.broadcast(np.array(sent), name, self._ranks.index(root)).wait()
        out = _tensor(got, x, x.shape)
        return _ready(out, x.copy_ if in_place else lambda value: value)

    def alltoall(self, x: torch.Tensor, splits: torch.Tensor | None, name: str) -> AsyncHandle:
        if splits is None and x.shape[0] % self.size:
            raise WrongValue(f"alltoall of {x.shape[0]} rows over {self.size} ranks", "a multiple of it",
                             "pass splits, rows for each rank")
        own = torch.full((self.size,), x.shape[0] // self.size) if splits is None else splits
        own_P = own.detach().cpu().numpy().astype(np.int64)
        if own_P.shape != (self.size,) or own_P.sum() > x.shape[0] or (own_P < 0).any():
            raise WrongValue(f"alltoall of {x.shape[0]} rows with splits {own_P.tolist()} over {self.size} ranks",
                             "a number of rows for each rank, not more than there are", "correct splits")
        splits_PP = gather_rows(self.wire, own_P[None], f"{name}.splits")
        rows = gather_rows(self.wire, _bytes(x)[:own_P.sum()], name)
        parts = np.split(rows, np.cumsum(splits_PP.reshape(-1))[:-1])
        place = self.wire.rank
        received_P = splits_PP[:, place]
        out = _tensor(np.concatenate(parts[place::self.size]), x, (int(received_P.sum()), *x.shape[1:]))
        return _ready((out, torch.from_numpy(received_P.copy()).to(torch.int32 if splits is None else own.dtype)))

    def reducescatter(self, xs: Tensors, name: str, op: int, factors: tuple[float, float],
                      grouped: bool) -> AsyncHandle:
        if KINDS.get(op) != "sum":
            raise NotSupported(f"reducescatter by {KINDS.get(op, op)}", "hvd.Average or hvd.Sum", "pass one of them")
        totals = [self._reduced(x, f"{name}.{i}", op, factors) for i, x in enumerate(xs)]
        outs = [total.tensor_split(self.size)[self.wire.rank].clone() for total in totals]
        return _ready(tuple(outs) if grouped else outs[0])

    def barrier(self) -> None:
        gather_rows(self.wire, np.zeros(1, np.uint8), "barrier")

    def join(self, device: int) -> int:
        if self.size == 1:
            return self._ranks[0]
        raise WrongMode("join over plain MPI, where every rank enters every collective", "Horovod",
                        f"{horovod.BUILD}, or give every rank the same number of batches with hvd.shard")

    def _reduced(self, x: torch.Tensor, name: str, op: int, factors: tuple[float, float]) -> torch.Tensor:
        """Return the combined tensor; 16-bit floating point is multiplied, summed and divided in float32."""
        if op == Adasum and self.size > 1:
            raise NotSupported("Adasum over plain MPI", "a built Horovod", f"{horovod.BUILD}, or use op=hvd.Average")
        wide = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
        own = np.array(_times(wide, factors[0]).cpu().numpy())
        if KINDS[op] == "sum":
            total = self.wire.allreduce(own.reshape(-1), name).wait().reshape(own.shape)
        elif op == Adasum:
            total = own
        else:
            total = np.asarray(FOLD[op].reduce(gather_rows(self.wire, own[None], name), axis=0), own.dtype)
        out = _times(torch.from_numpy(np.array(total)).to(x.device), factors[1])
        if op == Average and self.size > 1:
            out = out / self.size if out.is_floating_point() else torch.div(out, self.size, rounding_mode="trunc")
        return out.to(x.dtype)

    def _gathered(self, x: torch.Tensor, name: str) -> torch.Tensor:
        rows = gather_rows(self.wire, _bytes(x), name)
        return _tensor(rows, x, (len(rows), *x.shape[1:]))


@contextmanager
def _failures() -> Iterator[None]:
    """Raise `HorovodInternalError` of this package for Horovod's."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "HorovodInternalError":
            raise
        raise HorovodInternalError(f"Horovod could not complete a collective: {error}") from error


def _ready(value: Any, then: Callable[[Any], Any] = lambda value: value) -> AsyncHandle:
    """Return the handle of a collective that is over."""
    handle = AsyncHandle(lambda: value, lambda: True, then)
    handle.wait()
    return handle


def _summable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in a type that Horovod sums, contiguous."""
    return (x.float() if x.dtype == torch.bfloat16 else x).contiguous()


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its bits read as a type that Horovod moves, contiguous."""
    own = x.contiguous()
    return own if x.dtype in KNOWN else own.view(SAME_SIZE.get(x.element_size(), x.dtype))


def _back(xs: Tensors, sent: Tensors, in_place: bool, grouped: bool, bits: bool = False) -> Callable[[Any], Any]:
    """Return what makes the result of Horovod's: in the type of ``xs``, and in their memory if ``in_place``."""
    def back(out: Any) -> Any:
        outs = []
        for x, own, y in zip(xs, sent, out if grouped else [out]):
            if y.dtype != x.dtype:
                y = y.view(x.dtype) if bits else y.to(x.dtype)
            outs.append(y if not in_place or own is x else x.copy_(y))
        if in_place:
            outs = list(xs)
        return tuple(outs) if grouped else outs[0]

    return back


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x times factor; whole numbers in float64, towards zero."""
    if factor == 1.0:
        return x
    return x * factor if x.is_floating_point() else (x.double() * factor).to(x.dtype)


def _bytes(x: torch.Tensor) -> np.ndarray:
    """Return the rows of ``x`` as bytes, (R, B)."""
    row_bytes = int(np.prod(x.shape[1:], dtype=np.int64)) * x.element_size()
    if not x.numel():
        return np.zeros((len(x), row_bytes), np.uint8)
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().reshape(len(x), row_bytes)


def _tensor(rows: np.ndarray, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes as a tensor of the type and device of ``like``."""
    flat = torch.from_numpy(np.array(rows).reshape(-1))
    return (flat.view(like.dtype) if flat.numel() else flat.to(like.dtype)).reshape(tuple(shape)).to(like.device)
