"""The ranks' state on its way to the rank that writes a checkpoint, and from the rank that has read one.

Owns who sends when, and how much at once: one rank after another, in rounds of at most `ROUND_BYTES`, in each of which
all ranks meet, so that a rank waits for one round and never for all of another rank's state. Nobody but its receiver
keeps a rank's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from hvdtrain.checkpoint.assembly import Assembly, head
from hvdtrain.cluster.exit import agreed
from hvdtrain.protocols import Control
from hvdtrain.protocols.state import Shard

ROUND_BYTES = 64 << 20
"""Most bytes of values in a round; also the longest message, which without MPI every rank receives for a moment."""

ROUND_SHARDS = 4096
"""Most shards in a round, whose names and shapes all ranks are told."""

Groups = dict[str, dict[str, np.ndarray]]


def own_group(rank: int) -> str:
    """The group of what a rank holds for itself."""
    return f"rank-{rank:04d}"


def collect(control: Control, shards: Iterable[Shard]) -> Groups:
    """Return the arrays that all ranks' ``shards`` make up, by group and name, on rank 0; {} elsewhere. Collective.

    Errors, on every rank: the `UserError` that a rank raised while it gave its shards, or one that names what of a
    tensor is missing or came twice.
    """
    together = Assembly()
    for source in range(control.size):
        _move(control, shards if control.rank == source else (), source, 0, together)
    return agreed(control, together.finish, "saving")


def spread(control: Control, tensors: Mapping[str, Mapping[str, np.ndarray]], own: bool) -> Groups:
    """Return what this rank needs of rank 0's ``tensors``; collective.

    That is every group but the ranks' own and, where ``own`` (the same on every rank), its own.
    """
    mine, groups = Assembly(), [own_group(rank) for rank in range(control.size)] if own else []
    shared = [group for group in tensors if not group.startswith("rank-")]
    _move(control, whole_shards(tensors, shared), 0, None, mine)
    for rank, group in enumerate(groups):
        _move(control, whole_shards(tensors, [group]), 0, rank, mine)
    return mine.finish()


def whole_shards(tensors: Mapping[str, Mapping[str, np.ndarray]], groups: Iterable[str]) -> Iterator[Shard]:
    """Yield each array of ``groups``, as far as there are such, as one shard."""
    for group in groups:
        for name, array in tensors.get(group, {}).items():
            yield Shard(group, name, array.shape, 0, np.ascontiguousarray(array).reshape(-1))


def _move(control: Control, shards: Iterable[Shard], source: int, target: int | None, into: Assembly) -> None:
    """Add ``source``'s shards to ``into`` on ``target``, or on every rank where that is None; collective."""
    rounds = _rounds(shards, cut=source != target)
    takes = target is None or control.rank == target
    while True:
        own = agreed(control, lambda: next(rounds, []), "saving" if target == 0 else "restore")
        heads = control.gather([head(shard) for shard in own])[source]
        if not heads:
            return
        arrays = [shard.values for shard in own]
        if takes and control.rank == source:
            for shard in own:
                into.add(shard)
        elif takes:
            arrays = [into.place(one) for one in heads]
        if source != target:
            control.send(arrays, source, target)


def _rounds(shards: Iterable[Shard], cut: bool) -> Iterator[list[Shard]]:
    """Pack shards into lists of at most `ROUND_BYTES`; larger ones are cut, or come alone where not ``cut``."""
    packed: list[Shard] = []
    n_bytes = 0
    for shard in shards:
        for piece in _pieces(shard) if cut else [shard]:
            if packed and (n_bytes + piece.values.nbytes > ROUND_BYTES or len(packed) == ROUND_SHARDS):
                yield packed
                packed, n_bytes = [], 0
            packed.append(piece)
            n_bytes += piece.values.nbytes
    if packed:
        yield packed


def _pieces(shard: Shard) -> Iterator[Shard]:
    """Cut a shard into pieces of at most `ROUND_BYTES`; at least one, also of a shard without values."""
    most = max(1, ROUND_BYTES // shard.values.itemsize)
    for at in range(0, max(1, shard.values.size), most):
        yield replace(shard, begin=shard.begin + at, values=shard.values[at:at + most])
