"""Buffers of a PyTorch model over the ranks: initial values, BatchNorm's statistics, state written in forward.

Knows no optimizer and no checkpoint; formulas of reductions are `hvdtrain.comm.reducer.written`'s.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch.modules import (
    Entry,
    OneEntry,
    Place,
    PlainNames,
    assign,
    describe,
    flat_bytes,
    holders_of,
    mark_written,
    put_back_buffers,
)
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.comm.reducer.written import combine
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Writable

LARGE = 1 << 16
"""Elements of a buffer that is not copied at every step."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of BatchNorm and InstanceNorm, which do not enter training's result."""

_NORMS = re.compile(r"(torch|hvdtrain)\.|timm\.layers\.norm_act$")
"""The modules whose forward passes of a BatchNorm read running statistics in evaluation only."""


def remember(module: torch.nn.Module) -> Callable[[], list[str]]:
    """Copy the buffers of ``module``; return a function that restores them and returns the names of those changed.

    A buffer that was made or replaced since is restored; one that was resized in place, such as a cache, stays.
    """
    kept = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    holders = holders_of(module)

    @torch.no_grad()
    def put_back() -> list[str]:
        for holder in holders:
            put_back_buffers(*holder, kept, {})
        changed = [(name, buffer) for name, buffer in module.named_buffers() if name in kept
                   and kept[name].shape == buffer.shape and not torch.equal(kept[name], buffer)]
        for name, buffer in changed:
            buffer.copy_(kept[name])
        return [name for name, _ in changed]
    return put_back


class _BufferCopy:
    """Copy of the buffer ``of`` at ``version``, PyTorch's count of writes to it."""

    def __init__(self, of: torch.Tensor, copy: torch.Tensor, version: int) -> None:
        self.of, self.copy, self.version = of, copy, version
        self.large = of.numel() >= LARGE


class Buffers:
    """Implements `hvdtrain.core.protocols.Buffers` for ``model``.

    `keep` copies small buffers at every step, a `LARGE` one (a mask, a table) only where PyTorch has counted a write to
    it since. ``paths``: the names of modules by id, where ``model`` is a shard of a whole one. ``statistics``: names of
    BatchNorm's, where these do not follow from the class of their module. ``aliases``: the names of buffers by those
    that a model may declare.
    """

    def __init__(self, model: torch.nn.Module, transport: Transport, paths: Mapping[int, str] | None = None,
                 statistics: Collection[str] = (), aliases: Mapping[str, str] | None = None) -> None:
        self._model, self._transport, self._aliases = model, transport, dict(aliases or {})
        self._seen = self._kept_seen = self._step_samples = 0
        modules = list(model.named_modules())
        self._holders: list[Any] = [module._buffers for _, module in modules]
        self._prefixes = [(paths or {}).get(id(module), name) for name, module in modules]
        self._kept: dict[tuple[int, str], _BufferCopy] = {}
        self._known: dict[str, Place] = {}
        self._statistics: list[Place] = []
        self._own: list[Place] = []
        """The buffers that are no statistics."""
        self._params: list[Place] = []
        self._fixed: list[Place] = []
        """Parameters that only a forward pass can change before the update."""
        self._versions: list[int] = []
        self._empty: set[tuple[int, str]] = set()
        """The buffers that were None at `keep`."""
        self._transient = {(number, key) for number, (_, module) in enumerate(modules)
                           for key in getattr(module, "_non_persistent_buffers_set", ())}
        self._lazy: dict[str, Writable] = {}
        first: dict[int, Place] = {}
        for number, (prefix, (_, module)) in enumerate(zip(self._prefixes, modules)):
            norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
            counted = STATISTICS if norm and _NORMS.match(type(module).forward.__module__) else ()
            for key, buffer in module._buffers.items():
                place = self._place(number, key)
                shared = place if buffer is None else first.setdefault(id(buffer), place)
                if shared is not place:  # one tensor in several modules is reduced once
                    self._aliases[place.name] = shared.name
                    continue
                (self._statistics if key in counted or place.name in statistics else self._own).append(place)
            for key, param in module._parameters.items():
                place = Place(f"{prefix}.{key}" if prefix else key, module._parameters, key, (-1, ""))
                shared = place if param is None else first.setdefault(id(param), place)
                if shared is place:
                    self._params.append(place)
                else:
                    self._aliases[place.name] = shared.name
                renormalised = getattr(module, "max_norm", None) is not None  # torch.nn.Embedding
                if param is not None and (renormalised or not param.requires_grad) and shared not in self._fixed:
                    self._fixed.append(shared)

        plain = PlainNames(model)
        for place in (*self._own, *self._fixed):  # a model may declare them without the names of wrappers
            if plain(place.name) != place.name:
                self._aliases.setdefault(plain(place.name), place.name)

    def _place(self, number: int, key: str) -> Place:
        prefix = self._prefixes[number]
        return Place(f"{prefix}.{key}" if prefix else key, self._holders[number], key, (number, key))

    def saw(self, samples: int) -> None:
        self._seen += samples
        self._step_samples += samples

    def loaded(self) -> None:
        self._seen = 0

    def keep(self) -> None:
        self._kept_seen, self._step_samples = self._seen, 0
        changed: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for number, buffers in enumerate(self._holders):  # kept: a walk over the model's modules costs more than copies
            for name, buffer in buffers.items():
                kept = self._kept.get((number, name))
                if buffer is None:
                    continue
                if kept is None or kept.of is not buffer or kept.copy.shape != buffer.shape:
                    if number < len(self._prefixes) and all(place.at != (number, name) and place.tensor is not buffer
                                                            for place in (*self._own, *self._statistics)):
                        self._own.append(self._place(number, name))  # registered or no longer shared
                    self._kept[number, name] = _BufferCopy(buffer, buffer.detach().clone(), buffer._version)
                elif not kept.large or kept.version != buffer._version:
                    changed.append(buffer)
                    copies.append(kept.copy)
                    kept.version = buffer._version
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(copies, changed)
        self._empty = {place.at for place in self._own if place.tensor is None}
        self._versions = [-1 if place.tensor is None else place.tensor._version for place in self._fixed]

    def discard(self) -> None:
        for (number, name), kept in self._kept.items():
            holder = self._holders[number]
            buffer = holder[name] if name in holder else None
            if buffer is not None and kept.copy.shape == buffer.shape:
                assign(buffer, kept.copy)
        for place in self._own:
            if place.at in self._empty and isinstance(place.holder, dict) and place.tensor is not None:
                place.holder[place.key] = None  # filled since
        self._seen, self._step_samples = self._kept_seen, 0

    def undone(self) -> Callable[[], None]:
        """Return a function that takes back all writes from here on, except to statistics."""
        copies = [(place, place.tensor.detach().clone()) for place in (*self._own, *self._known.values())
                  if place.tensor is not None]

        def undo() -> None:
            for place, copy in copies:
                if place.tensor is not None and place.tensor.shape == copy.shape:
                    assign(place.tensor, copy)
        return undo

    def share(self) -> None:
        if self._transport.size == 1:
            return
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if tensor.numel():
                got = self._transport.broadcast(flat_bytes(tensor), f"initial.{name}")
                assign(tensor, got.view(tensor.dtype).reshape(tensor.shape))

    def appeared(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Note what the first samples have filled or registered, so that a model may declare it."""
        self._lazy.update({name: describe(tensor) for name, tensor in buffers.items()})

    def writable(self) -> dict[str, Writable]:
        return self._lazy | {place.name: describe(tensor) for place in (*self._own, *self._fixed)
                             if (tensor := place.tensor) is not None and place.name not in self._lazy}

    def statistics(self) -> list[str]:
        return [place.name for place in self._statistics]

    def aliases(self) -> dict[str, str]:
        return self._aliases

    def noticed(self) -> list[str]:
        """Return the buffers and untrained parameters that were written since `keep`, without those tracked.

        PyTorch counts writes; those that it does not count (``.data``) show in the values, which are compared where
        that is cheap.
        """
        found = []
        for place in self._own:
            kept, buffer = self._kept.get(place.at), place.tensor
            if place.at in self._empty - self._transient and buffer is not None and place.name not in self._known:
                found.append(place.name)
                continue
            if kept is None or buffer is None or place.name in self._known or kept.copy.shape != buffer.shape:
                continue
            counted = kept.of is not buffer or kept.version != buffer._version
            if (counted or not kept.large and buffer.device.type == "cpu") and not _same(buffer, kept.copy):
                found.append(place.name)
        for place, version in zip(self._fixed, self._versions):
            if place.tensor is not None and place.tensor._version != version and place.name not in self._known:
                found.append(place.name)
        return found

    def track(self, names: Iterable[str]) -> None:
        fresh = {name for name in names if name not in self._known}
        for name in fresh - {place.name for place in (*self._own, *self._params)}:  # another rank has registered it
            prefix, _, key = name.rpartition(".")
            if prefix in self._prefixes:
                self._own.append(self._place(self._prefixes.index(prefix), key))
        self._known.update({place.name: place for place in self._own if place.name in fresh})
        for place in self._params:
            if place.name in fresh and place.tensor is not None:
                mark_written([place.tensor])
                self._known[place.name] = place._replace(at=(len(self._holders), place.key))
                self._holders.append(OneEntry(place.holder, place.key))

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        if self._transport.size == 1:
            return
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        entries = []
        for place in (self._known[name] for name in reductions if name in self._known):
            kept = self._kept.get(place.at)
            entries.append(Entry(place, None if kept is None else kept.copy, device))
        if entries:
            combine(self._transport, entries, reductions, self._step_samples if samples is None else samples, force)

    def sync(self) -> list[str]:
        """Make the buffers equal: statistics their mean by samples, counts among them their maximum; collective.

        With n_r samples of rank r since the last time, the mean is root + sum(n_r (own_r - root)) / sum(n_r), where
        root is the value of the lowest rank that saw a sample: equal values keep their bits. Without any sample
        statistics stay. All others get root's value; their names are returned.
        """
        if self._transport.size == 1:
            return []
        seen_P, buffers = self._agree()
        root = int(np.flatnonzero(seen_P)[0]) if seen_P.any() else 0
        counted = {id(place.tensor) for place in self._statistics}
        found = self._equalise({n: b for n, b in buffers.items() if id(b) not in counted}, root)
        if seen_P.any():
            self._average({n: b for n, b in buffers.items() if id(b) in counted}, seen_P, root)
            self._seen = 0
        return found

    def _equalise(self, buffers: dict[str, torch.Tensor], root: int) -> list[str]:
        """Give those that differ between ranks the value of rank ``root``; return their names in the whole model."""
        names = {id(place.tensor): place.name for place in (*self._own, *self._known.values())}
        for place in self._known.values():  # parameters
            if place.tensor is not None and all(place.tensor is not b for b in buffers.values()):
                buffers = {**buffers, place.name: place.tensor}
        if not buffers:
            return []
        own_N = torch.tensor([zlib.crc32(flat_bytes(b).cpu().numpy().tobytes()) for b in buffers.values()])
        all_PN = self._transport.allgather(own_N, "buffers.bits").cpu()
        found = []
        for (name, buffer), apart in zip(buffers.items(), (all_PN != all_PN[:1]).any(0).tolist()):
            if apart:
                sent = self._transport.broadcast(flat_bytes(buffer), f"buffer.{name}.from{root}", root)
                assign(buffer, sent.view(buffer.dtype).reshape(buffer.shape))
                found.append(names.get(id(buffer), name))
        return found

    def _average(self, buffers: dict[str, torch.Tensor], seen_P: np.ndarray, root: int) -> None:
        floating = {n: b for n, b in buffers.items() if b.is_floating_point()}
        whole = {n: b for n, b in buffers.items() if not b.is_floating_point()}
        for name, buffer in floating.items():
            own_N = buffer.detach().reshape(-1).double()  # half-precision buffers too: they only travel wider
            sent_N = self._transport.broadcast(own_N.clone(), f"buffer.{name}.root{root}", root)
            root_N = sent_N.to(own_N.device)
            # Equal infinities (an attention mask) have no difference, and a rank without a sample adds nothing.
            still_N = (own_N == root_N) | (self._seen == 0)
            part_N = torch.where(still_N, torch.zeros_like(own_N), (own_N - root_N) * self._seen)
            total_N = self._transport.allreduce(part_N, f"buffer.{name}.sum").to(own_N.device)
            mean_N = torch.where(total_N == 0, root_N, root_N + total_N / int(seen_P.sum()))
            assign(buffer, mean_N.to(buffer.dtype).reshape(buffer.shape))
        for name, buffer in whole.items():
            own_N = buffer.detach().reshape(-1).to(torch.int64)
            all_PN = self._transport.allgather(own_N, f"buffer.{name}")
            assign(buffer, all_PN.amax(0).to(buffer.dtype).reshape(buffer.shape))

    def _agree(self) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """Return samples by rank, and the buffers to make equal: outside the state_dict those of equal shapes."""
        every = {n: b for n, b in self._model.named_buffers() if b.numel()}
        saved = self._model.state_dict().keys() if every else ()
        lasting = {n: b for n, b in every.items() if n in saved}
        own_3 = torch.tensor([self._seen, _print(every), _print(lasting)])
        all_P3 = self._transport.allgather(own_3, "buffers").cpu().numpy()
        if (all_P3[:, 1] == all_P3[0, 1]).all():
            return all_P3[:, 0], every
        if (all_P3[:, 2] == all_P3[0, 2]).all():
            return all_P3[:, 0], lasting
        raise UserError("the model's buffers have different shapes on different ranks",
                        "the same buffers on every rank", "register caches with persistent=False")


def _print(buffers: dict[str, torch.Tensor]) -> int:
    return zlib.crc32(repr([(n, tuple(b.shape), b.dtype) for n, b in buffers.items()]).encode())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare values of one shape; a NaN equals itself."""
    return torch.equal(a, b) or torch.equal(flat_bytes(a), flat_bytes(b))
