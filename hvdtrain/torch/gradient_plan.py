"""Plan of one exchange of gradients, equal on all ranks: `ParameterPlan`, with the memory in which they are summed.

Which ranks bring what to it, and when, is `hvdtrain.torch.exchange`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from hvdtrain import job
from hvdtrain.backends.torch.collectives import HorovodCollectives
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.comm.collectives.host_sums import HostSums
from hvdtrain.comm.collectives.shared import SharedCollectives
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.process_sets import global_process_set
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.torch import basics
from hvdtrain.torch.transports import MpiWire

WHAT = "gradients of hvd.DistributedOptimizer"


@dataclass(frozen=True)
class ExchangeSettings:
    """Arguments of an optimizer that decide about its exchange; ``compression``: a class of `Compression`."""

    average: bool
    compression: Any
    sparse_as_dense: bool

    def __str__(self) -> str:
        return (f"op={'Average' if self.average else 'Sum'}, compression={self.compression.made().describe()}, "
                f"sparse_as_dense={self.sparse_as_dense}")


@dataclass(frozen=True)
class ParamFacts:
    """Facts of a parameter that ranks compare. ``trains``: needs or has a gradient. ``sparse``: that is sparse."""

    shape: tuple[int, ...]
    dtype: str
    trains: bool
    sparse: bool


class SumMemory(Protocol):
    """Memory of the vectors that are summed; ``own``: this rank's."""

    own: list[torch.Tensor]

    def add(self) -> list[torch.Tensor]:
        """Return the sums or means of the vectors, by bucket; collective."""


class _InHost:
    """Sums in memory that the ranks of one host share."""

    def __init__(self, wire: SharedCollectives, buckets: Sequence[Bucket], divisor: int) -> None:
        self._sums, self._divisor = HostSums(wire, [(b.n, b.dtype) for b in buckets]), divisor
        self.own = [torch.from_numpy(x) for x in self._sums.own]

    def add(self) -> list[torch.Tensor]:
        self._sums.add(self._divisor, WHAT)
        return self.own


class _Reduced:
    """Sums by a compressor, or over a transport between hosts."""

    def __init__(self, wire: Any, buckets: Sequence[Bucket], divisor: int, compressor: Any, device: Any) -> None:
        self._reducer, self._divisor = Reducer(buckets, compressor, wire, Ops(device)), divisor
        self.own = [self._reducer.buffer(b) for b in buckets]

    def add(self) -> list[torch.Tensor]:
        self._reducer.begin()
        for i, flat_N in enumerate(self.own):
            self._reducer.start(i, flat_N)
        sums = self._reducer.finish(finite_only=True)
        if self._divisor > 1:
            torch._foreach_div_(sums, float(self._divisor))
        return sums


class ParameterPlan:
    """Plan of an exchange, equal on all ranks: ``items`` by name, memory of dense gradients. Collective to make.

    ``number``: of the plan, the same on every rank. ``sparse``: names whose gradients travel as rows.
    """

    def __init__(self, number: int, items: dict[str, ParamFacts], settings: ExchangeSettings,
                 device: torch.device) -> None:
        self.number, self.world = number, job.world()
        self.sparse = [n for n, facts in items.items() if facts.sparse and not settings.sparse_as_dense]
        self.densified = {n for n, facts in items.items() if facts.sparse and settings.sparse_as_dense}
        self.dense = [n for n in items if n not in self.sparse]
        wire, compressor = wire_of(), settings.compression.made()
        taken = compressor.dtypes
        specs = [ParamSpec(n, items[n].shape, items[n].dtype if taken is None or items[n].dtype in taken else "float32")
                 for n in self.dense if math.prod(items[n].shape)]
        plain = isinstance(wire, SharedCollectives) and compressor.in_place
        buckets = plan_buckets(specs, math.inf if plain else ExchangeConfig().unmeasured_mb)
        divisor = wire.size if settings.average else 1
        self._sums: SumMemory = (_InHost(wire, buckets, divisor) if plain else
                                 _Reduced(wire, buckets, divisor, compressor, device))
        self._places = {specs[i].name: (b.index, offset, specs[i]) for b in buckets
                        for i, offset in zip(b.params, b.offsets)}
        self._views = self._viewed(self._sums.own)

    def _viewed(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the vectors as tensors, in the order of ``dense``."""
        out = []
        for name in self.dense:
            if name not in self._places:
                out.append(torch.empty(0))
                continue
            index, offset, spec = self._places[name]
            out.append(flats[index][offset:offset + spec.n].view(spec.shape))
        return out

    def fill(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy dense gradients, in the order of ``dense``, into this rank's vectors; zeros for those missing."""
        into, copied, zeroed = [], [], []
        for view, grad in zip(self._views, grads):
            if grad is None:
                zeroed.append(view)
            elif grad.numel():
                into.append(view)
                copied.append(grad)
        if into:
            torch._foreach_copy_(into, copied)
        if zeroed:
            torch._foreach_zero_(zeroed)

    def clear(self) -> None:
        """Fill this rank's vectors with zeros."""
        for flat_N in self._sums.own:
            flat_N.zero_()

    def add(self) -> list[torch.Tensor]:
        """Return the sums or means of the dense gradients over all ranks; collective."""
        flats = self._sums.add()
        same = all(flat_N is own_N for flat_N, own_N in zip(flats, self._sums.own))
        return self._views if same else self._viewed(flats)


def wire_of() -> Any:
    """Return the transport of dense gradients: shared memory, Horovod, or MPI. Collective the first time."""
    here = job.world()
    shared = basics.shared_wire(global_process_set)
    if shared is not None:
        return shared
    if here.hvd is None:
        return cast(MpiWire, basics.member_wire(global_process_set)).wire
    return HorovodCollectives(here.hvd, here.control.timeout_s)
