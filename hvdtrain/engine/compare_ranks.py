"""Makes sure that every rank has the same configuration and model before anything of it is exchanged.

Owns the comparison and its words. What a model is made of, one line for each tensor, is told by its step.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from hvdtrain.config import Config, schema
from hvdtrain.core.comparison import spoken
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.mesh import Group, depths_of, spans
from hvdtrain.core.protocols import Control

if TYPE_CHECKING:
    from hvdtrain.parallel.parts import ModelParts


def check_config(config: Config, control: Control) -> None:
    """Raise `UserError` where ranks read different configurations, before the model is made; collective."""
    digests = control.gather(config.digest())
    other = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if other is not None:
        raise UserError(f"rank {other} read another configuration than rank 0", "the same on every rank",
                        "compare the config file, environment and arguments on their hosts")


def check_world(config: Config, control: Control) -> None:
    """Raise `UserError` where shares or other keys by rank do not fit the number of ranks."""
    copies = len(depths_of(config.pipeline.stages, config.pipeline.depths, control.size))
    if config.shares and not isinstance(config.shares, Mapping) and len(config.shares) != copies:
        raise UserError(f"shares has {count(len(config.shares), 'entry', 'entries')} for {copies} "
                        + ("ranks" if copies == control.size else "copies of the model"),
                        "one per " + ("rank" if copies == control.size else "copy"), f"give {copies} numbers")
    for name, given in schema.per_rank(config).items():
        if name != "shares" and isinstance(given, (list, tuple)) and given and len(given) != control.size:
            raise UserError(f"{name} has {count(len(given), 'entry', 'entries')} for "
                            f"{count(control.size, 'rank')}", "one per rank",
                            f"give {control.size} numbers")


def check_alike(control: Control, group: Group, lines: Sequence[str]) -> None:
    """Compare what this rank's model is made of with that of the other ranks of ``group``; collective over all ranks.

    ``lines``: one for each parameter and buffer, in the order in which they are exchanged, such as
    "parameter fc.weight float32[5, 16]"; what else must be alike (optimizer, schedule) comes last.
    Errors: `UserError` on every rank, naming the first line that differs and the ranks that stand apart.
    """
    _compare(control, {group.ranks: list(lines)})


def check_parts(control: Control, parts: ModelParts, group: Group) -> None:
    """Compare what ``parts`` are made of with those of the ranks that hold the same, as `check_alike` does.

    ``group``: the ranks that hold all that this one does. Of copies of unlike depth, where a rank shares some of its
    blocks with one rank and some with another, it is the trainable tensors of each block that are compared.
    """
    layout = parts.layout
    if layout is not None:  # of the stages of a model, which have other tensors, one optimizer is asked for
        own = [line for line in parts.params.made_of() if line.startswith("optimizer ")]
        check_alike(control, Group(tuple(range(control.size)), control.rank), own)
    if layout is None or len(set(r for ranks in layout.groups() for r in ranks)) == sum(map(len, layout.groups())):
        check_alike(control, group, parts.params.made_of())
        return
    specs = parts.params.specs
    _compare(control, {replicas.group.ranks: [f"parameter {_plain(s.name)} {s.dtype}{list(s.shape)}"
                                              for s in map(specs.__getitem__, replicas.params(specs))]
                       for replicas in parts.replicas})


def _plain(name: str) -> str:
    """A parameter's name without its number in a checkpoint and Keras' counters."""
    return re.sub(r"_\d+(?=/)", "", spoken(name))


def _compare(control: Control, lines_of: dict[tuple[int, ...], list[str]]) -> None:
    """Compare this rank's lines for each of its groups, by the groups' ranks."""
    found = control.gather({ranks: zlib.crc32("\n".join(lines).encode()) for ranks, lines in lines_of.items()})
    groups = sorted({ranks for digests in found for ranks in digests})
    if all(len({found[rank].get(ranks) for rank in ranks}) == 1 for ranks in groups):
        return
    rows = control.gather(lines_of)
    for ranks in groups:
        _refuse_unlike({rank: rows[rank].get(ranks, []) for rank in ranks})


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
