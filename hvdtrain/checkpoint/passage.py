"""A rank's shards on their way to the rank that writes, over a `Channel` and without any collective.

Owns the messages: a note of what comes, then the values, in the order of the files. Both ends may be in a thread beside
training. A rank sends its next message when its last one has come, so that nobody holds what another has yet to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint.stream import head, packed, unpacked
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.protocols import Channel, Handle
from hvdtrain.core.protocols.run import Head, Shard

SIZE, NOTE, VALUES = 0, 1, 2
"""Tags of the messages, in the order in which they come."""

PATIENCE = 12
"""How many times a channel's bound a sender waits: meanwhile the receiver writes what comes before."""


def give(channel: Channel, note: dict[str, Any], shards: Sequence[Shard], to: int = 0) -> None:
    """Send ``shards``, `in_order`, with a JSON-able ``note``; return when all of it has gone. `WaitTimeout`."""
    tell(channel, {**note, "heads": [list(head(shard)) for shard in shards]}, to)
    for data in packed(shards):
        _gone(channel.send(data, to, VALUES))


def take(channel: Channel, source: int) -> tuple[dict[str, Any], list[Head], Iterator[np.ndarray]]:
    """Return ``source``'s note, the heads of its shards, and what receives their values, piece by piece.

    All pieces are to be taken, before the next note. `WaitTimeout`.
    """
    note = hear(channel, source)
    heads = [Head(group, name, tuple(shape), dtype, begin, n)
             for group, name, shape, dtype, begin, n in note.pop("heads")]
    return note, heads, unpacked(heads, lambda memory: channel.receive(memory, source, VALUES).wait())


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


def _gone(handle: Handle) -> None:
    """Wait until a message has gone. `WaitTimeout`."""
    for _ in range(PATIENCE - 1):
        try:
            handle.wait()
            return
        except WaitTimeout:
            continue
    handle.wait()
