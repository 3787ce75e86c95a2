"""Which ranks recompute whose micro-batch in an audit. Pure.

All ranks take part at once, in pairs: of each pair one computes its own micro-batch once more and the other the same
one. A faulty rank is in every audit that way, and the others would wait for a single pair anyway. Pairs rotate as in a
round-robin tournament (the circle method), among ranks that compute alike where there are such.
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]


def tournament(players: Sequence[int], turn: int) -> list[Pair]:
    """Return the pairs of turn ``turn``: each two of ``players`` meet once in n - 1 turns (n even) or n (n odd).

    The order within a pair changes from one such series to the next.

    >>> [tournament([0, 1, 2], turn) for turn in range(3)]
    [[(1, 2)], [(2, 0)], [(0, 1)]]
    """
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    if len(seats) < 2:
        return []
    series, shift = divmod(turn, len(seats) - 1)
    fixed, ring = seats[-1], seats[:-1]
    ring = ring[shift:] + ring[:shift]
    table = [(fixed, ring[0]), *((ring[i], ring[-i]) for i in range(1, len(seats) // 2))]
    found = [(a, b) for a, b in table if a is not None and b is not None]
    return [(b, a) for a, b in found] if series % 2 else found


def pairs(kinds: Sequence[str], turn: int) -> list[Pair]:
    """Return (whose micro-batch, who recomputes it too) of turn ``turn``, no rank twice; by each rank's kind.

    Ranks of one kind meet each other. A rank without its like meets the others without their like, or where it is the
    only one, in every second turn one of the other ranks, whose own pair is left out then.
    """
    groups = [[r for r, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
    alone = [group[0] for group in groups if len(group) == 1]
    found = [pair for group in groups if len(group) > 1 for pair in tournament(group, turn)]
    if len(alone) != 1 or len(kinds) == 1:
        return found + tournament(alone, turn)
    if turn % 2:
        return found
    others = [r for r in range(len(kinds)) if r != alone[0]]
    series, at = divmod(turn // 2, len(others))
    found = [pair for pair in found if others[at] not in pair]
    return [*found, (alone[0], others[at]) if series % 2 else (others[at], alone[0])]


def comparable(found: Sequence[Pair], kinds: Sequence[str], narrow: Sequence[bool]) -> list[Pair]:
    """Return the pairs whose results tell anything: of one kind, or of two that both compute in their own types.

    ``narrow``: which ranks compute in 16 bits. A small gradient is nothing but rounding there, and a ReLU is often on
    the other side of zero, so that a rank of another kind, or in another type, is rightly as far away as a faulty one.
    """
    return [(a, b) for a, b in found if kinds[a] == kinds[b] or not (narrow[a] or narrow[b])]


def left_out(kinds: Sequence[str], narrow: Sequence[bool]) -> list[int]:
    """Return the ranks that no turn has in a pair that is `comparable`.

    >>> left_out(["cpu, fp32", "cpu, bf16"], [False, True]), left_out(["a", "b", "c, bf16"], [False, False, True])
    ([0, 1], [2])
    """
    if not any(narrow) or len(set(kinds)) == 1:
        return []
    met = {rank for turn in range(2 * len(kinds)) for pair in comparable(pairs(kinds, turn), kinds, narrow)
           for rank in pair}
    return [rank for rank in range(len(kinds)) if rank not in met]
