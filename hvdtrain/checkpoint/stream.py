"""Order the ranks' shards as a checkpoint's files, cut them into pieces, and check that every element comes once.

Every rank finds the order from its own shards. `hvdtrain.checkpoint.transfer` moves the pieces.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.checkpoint.tensors import Spec, portable
from hvdtrain.core.protocols.run import Head, Shard

PIECE_BYTES = 16 << 20  # most bytes of values that travel at once, those of a bucket of the default size
PACKED_BYTES = 1 << 20
"""Values below this size travel together, up to about as many bytes; larger ones by themselves, without a copy."""

FIRST = ("model", "optimizer")
"""The groups that come first, and have a file also where they are empty; the others follow by name."""

Piece = tuple[int, int, int]  # bytes [low, high) of the values of a shard, by its number


def head(shard: Shard) -> Head:
    return Head(shard.group, shard.name, shard.shape, shard.values.dtype.str, shard.begin, shard.values.size)


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return shards in the order of the files, their values little-endian. `CheckpointError`: no file can hold one."""
    ready = []
    for one in shards:
        values = portable(one.name, one.values, one.group)
        ready.append(one if values is one.values and values.ndim == 1 else
                     Shard(one.group, one.name, one.shape, one.begin, values.reshape(-1)))
    return sorted(ready, key=lambda one: _place(one.group, one.values.itemsize, one.name, one.begin, one.values.size))


@cache
def _dtype(text: str) -> np.dtype:
    return np.dtype(text)


def n_bytes(one: Head) -> int:
    return one.n * _dtype(one.dtype).itemsize


def pieces_of(size: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return the pieces [low, high) of ``size`` bytes: at least one, each of at most `PIECE_BYTES`, in whole units."""
    most = max(1, PIECE_BYTES // unit) * unit
    if size <= most:
        return [(0, size)]
    return [(low, min(size, low + most)) for low in range(0, size, most)]


def messages(heads: Sequence[Head]) -> Iterator[list[Piece]]:
    """Yield the pieces that travel together, message by message; the same at both ends."""
    together: list[Piece] = []
    so_far = 0
    for i, one in enumerate(heads):
        pieces = [(i, *piece) for piece in pieces_of(n_bytes(one))]
        alone = n_bytes(one) >= PACKED_BYTES or len(pieces) > 1
        if together and (alone or so_far + n_bytes(one) > PACKED_BYTES):
            yield together
            together, so_far = [], 0
        if alone:
            yield from ([piece] for piece in pieces)
        else:
            together, so_far = together + pieces, so_far + n_bytes(one)
    if together:
        yield together


def packed(shards: Sequence[Shard]) -> Iterator[np.ndarray]:
    """Yield the messages uint8 (n,) that carry shards, without empty ones."""
    for message in messages([head(shard) for shard in shards]):
        parts = [_bytes(shards[i].values)[low:high] for i, low, high in message]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if data.size:
            yield data


def unpacked(heads: Sequence[Head], receive: Callable[[np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """Undo `packed`: yield the pieces uint8 (n,) of shards; ``receive`` fills memory (n,) with the next message."""
    for message in messages(heads):
        size = sum(high - low for _, low, high in message)
        data = np.empty(size, np.uint8)
        data, ends = receive(data) if size else data, accumulate(high - low for _, low, high in message)
        left = deque(data[end - high + low:end] for end, (_, low, high) in zip(ends, message))
        del data  # a rank whose turn comes later would keep its last message meanwhile
        while left:
            yield left.popleft()


def local_pieces(shards: Sequence[Shard]) -> Iterator[np.ndarray]:
    """Yield the pieces of shards in this rank's memory, without a copy."""
    for shard in shards:
        data = _bytes(shard.values)
        if data.size <= PIECE_BYTES:  # most are
            yield data
            continue
        for low, high in pieces_of(data.size):
            yield data[low:high]


class LocatedShard(NamedTuple):
    """A shard of a tensor, and the number of its source."""

    source: int
    head: Head


@dataclass
class Tensor:
    """A tensor, and its shards in order, which cover it."""

    spec: Spec
    parts: list[LocatedShard]


def tensors_of(heads_P: Sequence[Sequence[Head]]) -> dict[str, dict[str, Tensor]]:
    """Return tensors by group and name; `CheckpointError` unless each element comes exactly once. Pure."""
    parts = [LocatedShard(source, one) for source, heads in enumerate(heads_P) for one in heads]
    tensors: dict[str, dict[str, Tensor]] = {}
    ends: dict[tuple[str, str], int] = {}
    faults = []
    for part in sorted(parts, key=lambda part: (part.head.group, part.head.name, part.head.begin, part.head.n)):
        one, named = part.head, tensors.setdefault(part.head.group, {})
        tensor = named.setdefault(one.name, Tensor(Spec(_dtype(one.dtype), tuple(one.shape)), []))
        fault = _fault(tensor.spec, one, ends.get((one.group, one.name), 0))
        if fault:
            faults.append(f"{one.name!r} of group {one.group!r}: {fault}")
            continue
        tensor.parts.append(part)
        ends[one.group, one.name] = max(ends.get((one.group, one.name), 0), one.begin + one.n)
    for group, named in tensors.items():
        for name, tensor in named.items():
            n, came = math.prod(tensor.spec.shape), sum(part.head.n for part in tensor.parts)
            if came < n:
                faults.append(f"{name!r} of group {group!r}: {n - came} of {n} elements are missing")
    if faults:
        raise CheckpointError(f"the ranks' shards do not form complete tensors; {'; '.join(faults[:3])}",
                              "every element from exactly one rank", "fix the code that returned these shards")
    order = [_place(group, tensor.spec.dtype.itemsize, name, 0, 0) for group, named in tensors.items()
             for name, tensor in named.items()]
    found: dict[str, dict[str, Tensor]] = {}
    for _, group, _, name, _, _ in sorted(order):
        found.setdefault(group, {})[name] = tensors[group][name]
    return found


class StreamedContent:
    """All ranks' shards as the content of a checkpoint, of which nobody holds more than the current pieces.

    Implements `hvdtrain.checkpoint.tensors.Content`. ``heads_P``: of each rank's shards, `in_order`; ``pieces_P``:
    iterators of their values, piece by piece. ``earlier``: the order of another save, which holds for the
    same shards: to find it takes a fifth of a small save. Errors: those of `tensors_of`.
    """

    def __init__(self, heads_P: Sequence[Sequence[Head]], pieces_P: Sequence[Iterator[np.ndarray]],
                 meta: Mapping[str, Any], earlier: FileOrder | None = None) -> None:
        self.meta = meta
        self.order = earlier if earlier is not None and earlier.heads_P == heads_P else FileOrder.of(heads_P)
        sources = (source for of_group in self.order.sources.values() for source in of_group)
        self._left = (next(pieces_P[source]) for source in sources)

    def specs(self) -> dict[str, dict[str, Spec]]:
        return self.order.specs

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the values of a group; groups must be requested in the order of `specs`."""
        assert list(names) == list(self.order.specs[group]), "the order of files differs from the stream's"
        for _ in self.order.sources[group]:
            yield next(self._left).data

    def drain(self) -> None:
        """Receive and drop the rest: a rank that has begun to send sends all."""
        deque(self._left, 0)


@dataclass(frozen=True)
class FileOrder:
    """Arrays by group and name in the order of the files, and the number of the rank that each piece comes from."""

    heads_P: Sequence[Sequence[Head]]
    specs: dict[str, dict[str, Spec]]
    sources: dict[str, list[int]]

    @classmethod
    def of(cls, heads_P: Sequence[Sequence[Head]]) -> FileOrder:
        tensors = {**{group: {} for group in FIRST}, **tensors_of(heads_P)}
        specs = {group: {name: tensor.spec for name, tensor in named.items()} for group, named in tensors.items()}
        sources = {group: [source for tensor in named.values() for source, one in tensor.parts
                           for _ in range(max(1, -(-n_bytes(one) // PIECE_BYTES)))] for group, named in tensors.items()}
        return cls(heads_P, specs, sources)


def _place(group: str, itemsize: int, name: str, begin: int, n: int) -> tuple[int, str, int, str, int, int]:
    """Return a shard's sort key: by group, then as `hvdtrain.checkpoint.tensors.layout` orders a file."""
    first = FIRST.index(group) if group in FIRST else len(FIRST)
    return first, group, -itemsize, name, begin, n


def _fault(spec: Spec, one: Head, end: int) -> str:
    """Describe why a shard does not continue a tensor that is there up to ``end``, or return ""."""
    n, dtype = math.prod(spec.shape), _dtype(one.dtype)
    if (tuple(one.shape), dtype) != (spec.shape, spec.dtype):
        return f"it was sent as {spec.dtype}{list(spec.shape)} and as {dtype}{list(one.shape)}"
    if not 0 <= one.begin <= one.begin + one.n <= n:
        return f"elements {one.begin} to {one.begin + one.n} of {n}"
    if one.begin < end and one.n:
        return f"some of the elements {one.begin} to {one.begin + one.n} were sent twice"
    return ""


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)
