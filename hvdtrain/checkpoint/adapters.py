"""What a training step offers of its state, as `hvdtrain.protocols.state.Stateful`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hvdtrain.checkpoint.transfer import own_group, whole_shards
from hvdtrain.protocols.state import Place, Read, Shard

Arrays = dict[str, np.ndarray]

REPLICATED = ("model", "optimizer")
"""The groups that every rank holds alike."""


class Replicated:
    """State that every rank holds alike: rank 0 gives all of it, and nobody else is asked."""

    def __init__(self, rank: int, state: Callable[[Place | None], tuple[dict[str, Arrays], dict[str, Any]]],
                 load: Callable[[dict[str, Arrays], dict[str, Any]], None]) -> None:
        self._rank, self._state, self._load = rank, state, load
        self._rest: dict[str, Any] = {}

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield every array of every group on rank 0."""
        if self._rank == 0:
            groups, self._rest = self._state(place)
            yield from whole_shards(groups, groups)

    def rest(self) -> dict[str, Any]:
        """Return what came with the latest `shards`."""
        return self._rest

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Undo `shards` and `rest`; return ""."""
        self._load({group: dict(read(group)) for group in REPLICATED}, dict(rest))
        return ""


class Own:
    """State that each rank holds for itself, such as its random generators; nothing of it is shared."""

    def __init__(self, rank: int, state: Callable[[], Arrays], load: Callable[[Arrays], str]) -> None:
        self._group, self._state, self._load = own_group(rank), state, load

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield this rank's arrays."""
        arrays = self._state()
        for name, array in arrays.items():
            memory = None if place is None else place(self._group, name, array.shape, array.dtype)
            if memory is not None:
                memory[...] = array
                arrays[name] = memory
        yield from whole_shards({self._group: arrays}, [self._group])

    def rest(self) -> dict[str, Any]:
        """Return {}: all of it is arrays."""
        return {}

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Undo `shards`; return in words what did not fit and starts anew, or ""."""
        return self._load(dict(read(self._group)))
