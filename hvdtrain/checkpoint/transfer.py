"""Move shards between ranks, over a `Channel` in the background or by the control plane's collectives.

Rounds of at most `PIECE_BYTES`: no rank waits for all of another's state, and rank 0 holds no more than what travels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint import stream
from hvdtrain.checkpoint.snapshot import OpenCheckpoint
from hvdtrain.checkpoint.stream import head, local_pieces, packed, pieces_of, unpacked
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.protocols import Channel, Control, Handle
from hvdtrain.core.protocols.run import Head, Place, Shard, Want

ROUND_SHARDS = 4096  # most windows in a round
Groups = dict[str, dict[str, np.ndarray]]


def own_group(rank: int) -> str:
    """Return the group of a rank's own state."""
    return f"rank-{rank:04d}"


def whole_shards(tensors: Mapping[str, Mapping[str, np.ndarray]], groups: Iterable[str]) -> Iterator[Shard]:
    """Yield each array of ``groups``, as far as there are such, as one shard."""
    for group in groups:
        yield from copied_shards(group, tensors.get(group, {}).items())


def copied_shards(group: str, arrays: Iterable[tuple[str, np.ndarray]], place: Place | None = None) -> Iterator[Shard]:
    """Yield ``arrays`` by name as shards of ``group``, copied into the memory that ``place`` gives."""
    for name, array in arrays:
        memory = None if place is None else place(group, name, array.shape, array.dtype)
        if isinstance(memory, np.ndarray):
            memory[...] = array
            array = memory
        yield Shard(group, name, array.shape, 0, np.ascontiguousarray(array).reshape(-1))


def arriving(control: Control, heads_P: Sequence[Sequence[Head]],
             shards: Sequence[Shard]) -> list[Iterator[np.ndarray]]:
    """Return iterators that bring each rank's values to rank 0, as `receive_shards` does, by collectives.

    All ranks take the same pieces in the same order. ``shards``: this rank's, of ``heads_P[control.rank]``.
    """
    messages = packed(shards)

    def moved(source: int) -> Iterator[np.ndarray]:
        def move(memory: np.ndarray) -> np.ndarray:
            data = next(messages) if control.rank == source else memory
            control.send([data] if control.rank in (0, source) else [], source, 0)
            return data

        return unpacked(heads_P[source], move)

    own = local_pieces(shards) if control.rank == 0 else unpacked(heads_P[0], lambda memory: memory)
    return [own, *(moved(source) for source in range(1, control.size))]


def fetch(control: Control, kept: OpenCheckpoint | None, wants: Sequence[Want], heads: Sequence[Head]) -> Groups:
    """Return what this rank ``wants`` of the checkpoint that rank 0 has open (elsewhere None); collective.

    An array of ``heads`` wanted as a whole keeps its shape, a window is (n,). Wants that all ranks share are broadcast.
    Errors: `UserError` on every rank where rank 0 cannot read.
    """
    wants_P = [[Want(*want) for want in row] for row in control.gather([tuple(want) for want in wants])]
    alike = set(wants_P[0]).intersection(*wants_P[1:])
    plan: list[tuple[int | None, list[Want]]] = [(None, [want for want in wants_P[0] if want in alike])]
    plan += [(rank, [want for want in row if want not in alike]) for rank, row in enumerate(wants_P)]
    held_as = {(one.group, one.name): one for one in heads}
    mine = {want[:2]: np.empty(want.end - want.begin, held_as[want[:2]].dtype) for want in wants}
    for target, items in plan:
        for row in _rounds(items, held_as):
            takes = target in (None, control.rank)
            places = [mine[want[:2]][low:high] if takes else np.empty(high - low, held_as[want[:2]].dtype)
                      for want, low, high in row if takes or control.rank == 0]
            agreed(control, lambda: _read(kept, row, places), "restore")  # called at once
            if target != 0:
                control.send(places, 0, target)
    groups: Groups = {}
    for (group, name), flat in mine.items():
        shape = held_as[group, name].shape
        groups.setdefault(group, {})[name] = flat.reshape(shape) if flat.size == math.prod(shape) else flat
    return groups


def _read(kept: OpenCheckpoint | None, row: Sequence[tuple[Want, int, int]], places: Sequence[np.ndarray]) -> None:
    for (want, low, _), place in zip(row, places if kept else ()):
        assert kept is not None
        kept.tensors[want.group].read(want.name, want.begin + low, place)


def _rounds(wants: Sequence[Want], heads: Mapping[tuple[str, str], Head]) -> Iterator[list[tuple[Want, int, int]]]:
    """Pack windows, cut where they are larger, into rounds of at most `PIECE_BYTES`: (window, elements of it)."""
    packed: list[tuple[Want, int, int]] = []
    so_far = 0
    for want in wants:
        itemsize = np.dtype(heads[want[:2]].dtype).itemsize
        for low, high in pieces_of((want.end - want.begin) * itemsize, itemsize):
            if packed and (so_far + high - low > stream.PIECE_BYTES or len(packed) == ROUND_SHARDS):
                yield packed
                packed, so_far = [], 0
            packed.append((want, low // itemsize, high // itemsize))
            so_far += high - low
    if packed:
        yield packed


SIZE, NOTE, VALUES = 0, 1, 2  # tags of the messages, in the order in which they come
PATIENCE = 12
"""How many times a channel's bound a sender waits: meanwhile the receiver writes what comes before."""


def send_shards(channel: Channel, note: dict[str, Any], shards: Sequence[Shard], to: int = 0) -> None:
    """Send ``shards``, `in_order`, with a JSON-able ``note``; return when all of it has gone. `WaitTimeout`."""
    send_note(channel, {**note, "heads": [list(head(shard)) for shard in shards]}, to)
    for data in packed(shards):
        _wait_sent(channel.send(data, to, VALUES))


def receive_shards(channel: Channel, source: int) -> tuple[dict[str, Any], list[Head], Iterator[np.ndarray]]:
    """Return a note, heads, and an iterator of the values, to be exhausted before the next. `WaitTimeout`."""
    note = receive_note(channel, source)
    heads = [Head(group, name, tuple(shape), dtype, begin, n)
             for group, name, shape, dtype, begin, n in note.pop("heads")]
    return note, heads, unpacked(heads, lambda memory: channel.receive(memory, source, VALUES).wait())


def send_note(channel: Channel, note: dict[str, Any], to: int) -> None:
    data = np.frombuffer(json.dumps(note).encode(), np.uint8)
    handles = [channel.send(np.array([data.size], np.int64), to, SIZE), channel.send(data, to, NOTE)]
    for handle in handles:
        handle.wait()


def receive_note(channel: Channel, source: int) -> dict[str, Any]:
    size = channel.receive(np.zeros(1, np.int64), source, SIZE).wait()
    note = json.loads(channel.receive(np.empty(int(size[0]), np.uint8), source, NOTE).wait().tobytes())
    assert isinstance(note, dict)
    return note


def _wait_sent(handle: Handle) -> None:
    for _ in range(PATIENCE - 1):
        try:
            handle.wait()
            return
        except WaitTimeout:
            continue
    handle.wait()
