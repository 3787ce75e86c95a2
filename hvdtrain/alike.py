"""Makes sure that every rank holds the same model before anything of it is exchanged.

Owns the comparison and its words. What a model is made of, one line for each tensor, is told by its step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest

from hvdtrain.cluster.group import Group, spans
from hvdtrain.errors import UserError
from hvdtrain.protocols import Control


def check_alike(control: Control, group: Group, lines: Sequence[str]) -> None:
    """Compare what this rank's model is made of with that of the other ranks of ``group``; collective over all ranks.

    ``lines``: one for each parameter and buffer, in the order in which they are exchanged, such as
    "parameter fc.weight float32[5, 16]"; what else must be alike (optimizer, schedule) comes last.
    Errors: `UserError` on every rank, naming the first line that differs and the ranks that stand apart.
    """
    digests = control.gather((group.ranks, zlib.crc32("\n".join(lines).encode()), len(lines)))
    if all(len({d for d in digests if d[0] == ranks}) == 1 for ranks in {d[0] for d in digests}):
        return
    rows = control.gather((group.ranks, list(lines)))
    for ranks in sorted({row[0] for row in rows}):
        _refuse_unlike({rank: rows[rank][1] for rank in ranks})


def _refuse_unlike(lines_of: dict[int, list[str]]) -> None:
    """Raise `UserError` unless all ranks' lines are equal. The most ranks are right, or those with the lowest rank."""
    holders: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in lines_of.items():
        holders.setdefault(tuple(lines), []).append(rank)
    if len(holders) == 1:
        return
    right = max(holders, key=lambda lines: (len(holders[lines]), -holders[lines][0]))
    columns = list(zip_longest(*holders, fillvalue="nothing more"))
    first = dict(zip(holders, next(column for column in columns if len(set(column)) > 1)))
    found = [f"{_ranks(holders[lines])} {_has(holders[lines])} {line}" for lines, line in first.items()
             if line != first[right]]
    apart = sorted(rank for lines, ranks in holders.items() if lines != right for rank in ranks)
    more = f" ({_ranks(apart)} stand apart)" if len(holders) > 2 else ""
    raise UserError(f"the ranks' models differ: {', '.join(found)} where {_ranks(holders[right])} "
                    f"{_has(holders[right])} {first[right]}{more}",
                    "the same parameters, buffers, optimizer and schedule in one order on every rank",
                    "build, load and compile the model on every rank in the same way")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(tuple(ranks))}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
