"""What a PyTorch model holds beside its gradients, over the ranks: initial values, and statistics of forward passes.

Owns the broadcast of parameters and buffers, the mean of buffers that ranks changed on their own (BatchNorm), and
their way back where a step is left out. Knows no optimizer and no checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import torch

from hvdtrain.errors import UserError
from hvdtrain.exchange.transport import Transport


LARGE = 1 << 16
"""Elements of a buffer that is not copied at every step."""


def remember(module: torch.nn.Module) -> Callable[[], list[str]]:
    """Copy the buffers of ``module``; the function returned gives them these values again, and tells which had others.

    A buffer that has another shape by then, such as a cache that has grown, stays.
    """
    kept = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    @torch.no_grad()
    def put_back() -> list[str]:
        changed = [(name, buffer) for name, buffer in module.named_buffers() if name in kept
                   and kept[name].shape == buffer.shape and not torch.equal(kept[name], buffer)]
        for name, buffer in changed:
            buffer.copy_(kept[name])
        return [name for name, _ in changed]
    return put_back


class _Kept:
    """A copy of the buffer ``of`` as it was at ``version``, PyTorch's count of writes to it."""

    def __init__(self, of: torch.Tensor, copy: torch.Tensor, version: int) -> None:
        self.of, self.copy, self.version = of, copy, version
        self.large = of.numel() >= LARGE


class Buffers:
    """The buffers of ``model``, and how many samples this rank has put through it since they were last equal.

    Implements `hvdtrain.protocols.Buffers`. `keep` copies them, so that `discard` can undo a step: statistics at every
    step, a `LARGE` buffer (a mask, a table) only where PyTorch has counted a write to it since.
    """

    def __init__(self, model: torch.nn.Module, transport: Transport) -> None:
        self._model, self._transport = model, transport
        self._seen = self._kept_seen = 0
        self._holders = [module._buffers for module in model.modules()]
        self._kept: dict[tuple[int, str], _Kept] = {}

    def saw(self, samples: int) -> None:
        """Count the samples of one forward pass."""
        self._seen += samples

    def loaded(self) -> None:
        """Note that every rank has been given the same buffers."""
        self._seen = 0

    def keep(self) -> None:
        """Remember the buffers as they are before a step."""
        self._kept_seen = self._seen
        changed: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for number, buffers in enumerate(self._holders):  # kept: a walk over the model's modules costs more than copies
            for name, buffer in buffers.items():
                kept = self._kept.get((number, name))
                if buffer is None:
                    continue
                if kept is None or kept.of is not buffer or kept.copy.shape != buffer.shape:
                    self._kept[number, name] = _Kept(buffer, buffer.detach().clone(), buffer._version)
                elif not kept.large or kept.version != buffer._version:
                    changed.append(buffer)
                    copies.append(kept.copy)
                    kept.version = buffer._version
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(copies, changed)

    def discard(self) -> None:
        """Give the buffers the values they had at `keep`."""
        for (number, name), kept in self._kept.items():
            buffer = self._holders[number].get(name)
            if buffer is not None and kept.copy.shape == buffer.shape:
                _assign(buffer, kept.copy)
        self._seen = self._kept_seen

    def share(self) -> None:
        """Give every rank rank 0's parameters and buffers, those outside the state_dict too; collective."""
        if self._transport.size == 1:
            return
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if tensor.numel():
                bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # so that every dtype travels
                got = self._transport.broadcast(bits, f"initial.{name}")
                _assign(tensor, got.view(tensor.dtype).reshape(tensor.shape))

    def sync(self) -> None:
        """Make the buffers equal: floating ones their mean by samples, whole numbers their maximum; collective.

        With n_r samples of rank r since the last time, the mean is root + sum(n_r (own_r - root)) / sum(n_r), where
        root is the value of the lowest rank that saw a sample: a rank without one has no say, and what is equal
        everywhere keeps its bits. Without any sample nothing changes.
        """
        if self._transport.size == 1:
            return
        seen_P, buffers = self._agree()
        if not seen_P.any():
            return
        floating = {n: b for n, b in buffers.items() if b.is_floating_point()}
        whole = {n: b for n, b in buffers.items() if not b.is_floating_point()}
        root = int(np.flatnonzero(seen_P)[0])
        for name, buffer in floating.items():
            own_N = buffer.detach().reshape(-1).double()  # half-precision buffers too: they only travel wider
            sent_N = self._transport.broadcast(own_N.clone(), f"buffer.{name}.root{root}", root)
            root_N = sent_N.to(own_N.device)
            # Equal infinities (an attention mask) have no difference, and a rank without a sample adds nothing.
            still_N = (own_N == root_N) | (self._seen == 0)
            part_N = torch.where(still_N, torch.zeros_like(own_N), (own_N - root_N) * self._seen)
            total_N = self._transport.allreduce(part_N, f"buffer.{name}.sum").to(own_N.device)
            mean_N = torch.where(total_N == 0, root_N, root_N + total_N / int(seen_P.sum()))
            _assign(buffer, mean_N.to(buffer.dtype).reshape(buffer.shape))
        for name, buffer in whole.items():
            own_N = buffer.detach().reshape(-1).to(torch.int64)
            all_PN = self._transport.allgather(own_N, f"buffer.{name}")
            _assign(buffer, all_PN.amax(0).to(buffer.dtype).reshape(buffer.shape))
        self._seen = 0

    def _agree(self) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """Samples by rank, and the buffers to make equal.

        Those outside the state_dict are among them only if they are shaped alike everywhere: a cache that grows
        with the longest sequence a rank has met differs rightly.
        """
        every = {n: b for n, b in self._model.named_buffers()
                 if b.numel() and b.dtype != torch.bool and not b.is_complex()}
        saved = self._model.state_dict().keys()
        lasting = {n: b for n, b in every.items() if n in saved}
        own_3 = torch.tensor([self._seen, _print(every), _print(lasting)])
        all_P3 = self._transport.allgather(own_3, "buffers").cpu().numpy()
        if (all_P3[:, 1] == all_P3[0, 1]).all():
            return all_P3[:, 0], every
        if (all_P3[:, 2] == all_P3[0, 2]).all():
            return all_P3[:, 0], lasting
        raise UserError("the model's buffers have other shapes on one rank than on another",
                        "the same buffers on every rank", "register with persistent=False what only caches")


def _print(buffers: dict[str, torch.Tensor]) -> int:
    """A checksum of names, shapes and dtypes."""
    return zlib.crc32(repr([(n, tuple(b.shape), b.dtype) for n, b in buffers.items()]).encode())


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` in, unless it is there: an expanded buffer cannot be written to, and seldom needs it."""
    value = value.to(tensor.device)
    with torch.no_grad():
        if not torch.equal(tensor, value):
            tensor.copy_(value)
