"""What recomputing each block of a model saves and costs, measured while a batch is computed.

Owns whose a saved tensor is: what a block saves is saved by recomputing it unless somebody else keeps it anyway, which
are the block's inputs (recomputing needs them), parameters, buffers and what other blocks save too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.recompute.frame import Block, Clock, tree_tensors
from hvdtrain.core.protocols import BlockCost

OUTSIDE = ""
"""Stands for what is no block."""


class Storages:
    """Whose memory is saved for backward: bytes of each storage, by block.

    What is saved is held until this goes, so that an address stays that of one storage.
    """

    def __init__(self, lasting: Iterable[torch.Tensor]) -> None:
        self._lasting = {t.untyped_storage().data_ptr() for t in lasting}
        self._held: list[Any] = []
        self._saved: dict[str, dict[int, int]] = {OUTSIDE: {}}
        self._inputs: dict[str, dict[int, int]] = {}

    def of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the hook that notes what ``name`` saves."""
        saved = self._saved.setdefault(name, {})

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._note(saved, tensor)
            return tensor
        return note

    def given(self, name: str, inputs: Any) -> None:
        """Note what a block is called with."""
        for tensor in tree_tensors(inputs):
            self._note(self._inputs.setdefault(name, {}), tensor)

    def _note(self, into: dict[int, int], tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._held.append(tensor.detach())
            into[storage.data_ptr()] = storage.nbytes()

    def inner_bytes(self, name: str) -> int:
        """Return what only this block keeps from its forward pass to its backward, its inputs left out."""
        return sum(n for key, n in self._saved.get(name, {}).items()
                   if key not in self._inputs.get(name, {}) and not self._kept_by_others(name, key))

    def extra_bytes(self, name: str) -> int:
        """Return the block's inputs that nobody keeps unless it is recomputed."""
        return sum(n for key, n in self._inputs.get(name, {}).items()
                   if key not in self._saved.get(name, {}) and not self._kept_by_others(name, key))

    def _kept_by_others(self, name: str, key: int) -> bool:
        return key in self._lasting or any(key in saved for other, saved in self._saved.items() if other != name)


class Seconds(Clock):
    """How long each block takes to be computed again, over all its calls in one pass."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._begun = 0.0

    def start(self) -> None:
        """A block is about to be computed again."""
        self._synchronize()
        self._begun = time.perf_counter()

    def stop(self, block: Block) -> None:
        """It has been."""
        self._synchronize()
        self.seconds[block.name] = self.seconds.get(block.name, 0.0) + time.perf_counter() - self._begun


def found(names: Sequence[str], storages: Storages, rounds: Sequence[Seconds]) -> list[BlockCost]:
    """Return the costs of the blocks ``names``; of several rounds the shortest seconds count."""
    return [BlockCost(name, storages.inner_bytes(name) - storages.extra_bytes(name),
                      min(r.seconds.get(name, 0.0) for r in rounds), storages.inner_bytes(name)) for name in names]
