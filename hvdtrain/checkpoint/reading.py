"""The arrays of a checkpoint on disk, read where and when they are asked for.

Owns where each array's values lie, in files of whole tensors or of shards; ``snapshot`` has verified them before.
Values are read, not mapped: pages of a mapped file count as this process's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import CheckpointError, Manifest, group_name
from hvdtrain.checkpoint.stream import Tensor, pieces_of, tensors_of
from hvdtrain.checkpoint.tensors import Spec, read_header
from hvdtrain.core.protocols.run import Head

Places = dict[tuple[int, str, str], tuple[Path, int]]
"""By number of file, group and name: the file, and the byte at which the values begin there."""


class Group(Mapping[str, np.ndarray]):
    """Arrays by name, sorted; each look at one reads it anew."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], places: Places) -> None:
        self.name, self._tensors, self._places = name, {key: tensors[key] for key in sorted(tensors)}, places

    def called(self, names: Mapping[str, str]) -> Group:
        """Return these arrays with other names; ``names``: those here by new names."""
        new = {old: new for new, old in names.items()}
        places = {(source, group, new.get(name, name) if group == self.name else name): place
                  for (source, group, name), place in self._places.items()}
        return Group(self.name, {new.get(name, name): tensor for name, tensor in self._tensors.items()}, places)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        spec = self._tensors[name].spec
        flat = np.empty(math.prod(spec.shape), spec.dtype)
        self.read(name, 0, flat)
        return flat.reshape(spec.shape)

    def specs(self) -> dict[str, Spec]:
        """What arrays there are."""
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def heads(self) -> list[Head]:
        """Each array as one shard without its values."""
        return [Head(self.name, name, spec.shape, spec.dtype.str, 0, math.prod(spec.shape))
                for name, spec in self.specs().items()]

    def read(self, name: str, begin: int, into: np.ndarray) -> None:
        """Fill ``into`` (n,) with elements [begin, begin + n) of an array in row-major order. CheckpointError."""
        self._read(name, begin * into.itemsize, into.view(np.uint8).data)

    def blocks(self, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the bytes of arrays, end to end, each piece good until the next is asked for."""
        for name in names:
            for low, high in pieces_of(self._tensors[name].spec.n_bytes):
                piece = np.empty(high - low, np.uint8).data
                self._read(name, low, piece)
                yield piece

    def _read(self, name: str, first: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of an array from ``first`` on, of whatever shards they lie in."""
        itemsize, last = self._tensors[name].spec.dtype.itemsize, first + len(memory)
        for source, one in self._tensors[name].parts:
            begin = one.begin * itemsize
            low, high = max(first, begin), min(last, begin + one.n * itemsize)
            if low >= high:
                continue
            path, offset = self._places[source, self.name, name]
            try:
                files.read_into(path, offset + low - begin, memory[low - first:high - first])
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error})", "a readable checkpoint",
                                      "check its permissions and disk") from None


class Kept:
    """A checkpoint on disk: implements `hvdtrain.checkpoint.tensors.Content`.

    ``tensors``: its groups, of which nothing is in memory; ``meta``: as it was written.
    """

    def __init__(self, tensors: Mapping[str, Group], meta: Mapping[str, Any]) -> None:
        self.tensors, self.meta = tensors, meta

    def called(self, names: Mapping[tuple[str, str], str]) -> Kept:
        """Return this checkpoint with other names; ``names``: those here by (group, new name)."""
        return Kept({name: group.called({new: old for (of, new), old in names.items() if of == name})
                     for name, group in self.tensors.items()}, self.meta) if names else self

    def specs(self) -> dict[str, dict[str, Spec]]:
        """What arrays there are, by group and name."""
        return {name: group.specs() for name, group in self.tensors.items()}

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        """Read arrays of ``group``, end to end."""
        return self.tensors[group].blocks(names)


def opened(directory: Path, manifest: Manifest) -> Kept:
    """Return the checkpoint in ``directory``, whose files have been verified. OSError, `CheckpointError`."""
    heads_F: list[list[Head]] = []
    places: Places = {}
    for i, file in enumerate(manifest.files):
        arrays = read_header(directory / file)
        shards = manifest.shards.get(file)
        if shards is not None and set(shards) != set(arrays):
            raise CheckpointError(f"{directory / file} holds other arrays than its manifest lists", "the same",
                                  "use another checkpoint: this one is damaged")
        heads_F.append([])
        for key, (spec, offset) in arrays.items():
            group, name, begin, shape = str(group_name(file)), key, 0, spec.shape
            if shards is not None:
                (begin, shape), (group, _, name) = shards[key], key.partition("/")
            heads_F[-1].append(Head(group, name, tuple(shape), spec.dtype.str, begin, math.prod(spec.shape)))
            places[i, group, name] = directory / file, offset
    found = tensors_of(heads_F)
    groups = list(found) if manifest.shards else [str(group_name(file)) for file in manifest.files]
    return Kept({name: Group(name, found.get(name, {}), places) for name in groups}, manifest.meta)
