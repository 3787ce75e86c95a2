"""Shares of the flat buckets that each rank owns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.protocols.types import Bucket

ALIGN = 16
"""Elements: every rank's part of a bucket begins at a multiple of them, 64 bytes in float32, a line of the cache."""

ALIKE = 0.1
"""Ranks whose free memory differs by less than this part of the largest get equal parts."""

Span = tuple[int, int]
"""Elements [begin, end) of a row-major tensor."""


def by_room(room_bytes_P: Sequence[float]) -> list[float]:
    """Return each rank's share of the state, in sum 1, in proportion to its free memory.

    A share so made exceeds no rank's memory if the state fits at all. Amounts that differ by less than `ALIKE` count as
    equal, since free memory is never still.

    >>> by_room([30, 10]), by_room([100, 96]), by_room([0, 0])
    ([0.75, 0.25], [0.5, 0.5], [0.5, 0.5])
    """
    rooms = [max(0.0, float(room)) for room in room_bytes_P]
    most = max(rooms)
    if min(rooms) >= (1 - ALIKE) * most:
        return [1 / len(rooms)] * len(rooms)
    return [room / sum(rooms) for room in rooms]


def sizes(n: int, parts_P: Sequence[float]) -> list[int]:
    """Return how many of ``n`` elements each rank owns: consecutive parts in the order of the ranks, in sum ``n``.

    >>> sizes(200, [0.5, 0.5]), sizes(100, [3, 1, 0])
    ([96, 104], [64, 36, 0])
    """
    total, held, edges = sum(parts_P), 0.0, [0]
    last = max(r for r, part in enumerate(parts_P) if part > 0)  # a rank without a part gets no remainder either
    for r, part in enumerate(parts_P):
        held += part
        edges.append(n if r >= last else int(n * held / total) // ALIGN * ALIGN)
    return [end - begin for begin, end in zip(edges, edges[1:])]


def spans(buckets: Sequence[Bucket], sizes_BP: Sequence[Sequence[int]], rank: int, n_params: int) -> list[Span]:
    """Return the elements of each parameter that ``rank`` owns; (0, 0): none of it.

    A parameter lies in one bucket in one piece, and so do a rank's elements of the bucket: one span is enough.
    """
    found: list[Span] = [(0, 0)] * n_params
    for bucket, sizes_P in zip(buckets, sizes_BP):
        first = sum(sizes_P[:rank])
        for i, (begin, end) in in_bucket(bucket, first, first + sizes_P[rank]):
            found[i] = begin, end
    return found


def in_bucket(bucket: Bucket, first: int, last: int) -> list[tuple[int, Span]]:
    """Return (parameter, its elements) of all that lies within elements [first, last) of ``bucket``, in its order."""
    found = []
    for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
        n = 1
        for length in shape:
            n *= length
        begin, end = max(0, first - offset), min(n, last - offset)
        if begin < end:
            found.append((i, (begin, end)))
    return found
