"""A rank's shards on their way to the rank that writes, over a `Channel` and without any collective.

Owns the messages: a note of what comes, then the values, of which small ones travel together. `give` and `take` may run
in a thread beside training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint.assembly import Assembly, Head, head
from hvdtrain.protocols import Channel
from hvdtrain.protocols.state import Shard

SIZE, NOTE, VALUES = 0, 1, 2
"""Tags of the messages, in the order in which they come."""

PACKED_BYTES = 1 << 20
"""Values below this size travel together, up to about as many bytes; larger ones by themselves, without a copy."""


def give(channel: Channel, note: dict[str, Any], shards: Sequence[Shard], to: int = 0) -> None:
    """Send ``shards`` with a JSON-able ``note``; return when all of it has gone. `WaitTimeout`."""
    tell(channel, {**note, "heads": [list(head(shard)) for shard in shards]}, to)
    for run in _runs([head(shard) for shard in shards]):
        parts = [_bytes(shards[i].values) for i in run]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if data.size:
            channel.send(data, to, VALUES).wait()


def take(channel: Channel, source: int, into: Assembly) -> dict[str, Any]:
    """Receive what ``source`` gives into ``into``; return its note. `WaitTimeout`."""
    note = hear(channel, source)
    heads = [Head(group, name, tuple(shape), dtype, begin, n)
             for group, name, shape, dtype, begin, n in note.pop("heads")]
    for run in _runs(heads):
        places = [_bytes(into.place(heads[i])) for i in run]
        n_bytes = sum(place.size for place in places)
        if not n_bytes:
            continue
        if len(places) == 1:
            channel.receive(places[0], source, VALUES).wait()
            continue
        data, at = channel.receive(np.empty(n_bytes, np.uint8), source, VALUES).wait(), 0
        for place in places:
            place[...] = data[at:at + place.size]
            at += place.size
    return note


def tell(channel: Channel, note: dict[str, Any], to: int) -> None:
    """Send a JSON-able note."""
    data = np.frombuffer(json.dumps(note).encode(), np.uint8)
    handles = [channel.send(np.array([data.size], np.int64), to, SIZE), channel.send(data, to, NOTE)]
    for handle in handles:
        handle.wait()


def hear(channel: Channel, source: int) -> dict[str, Any]:
    """Receive a note."""
    size = channel.receive(np.zeros(1, np.int64), source, SIZE).wait()
    note = json.loads(channel.receive(np.empty(int(size[0]), np.uint8), source, NOTE).wait().tobytes())
    assert isinstance(note, dict)
    return note


def _runs(heads: Sequence[Head]) -> Iterator[list[int]]:
    """The numbers of the shards that travel in one message, message by message; the same on both sides."""
    packed: list[int] = []
    n_bytes = 0
    for i, one in enumerate(heads):
        size = one.n * np.dtype(one.dtype).itemsize
        if size >= PACKED_BYTES:
            yield [i]
            continue
        if packed and n_bytes + size > PACKED_BYTES:
            yield packed
            packed, n_bytes = [], 0
        packed.append(i)
        n_bytes += size
    if packed:
        yield packed


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)
