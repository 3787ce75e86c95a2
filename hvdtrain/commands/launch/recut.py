"""How a model that is cut over ranks is cut over those that are left, when a job is launched again on other hosts.

Owns the rule and its words. Whether the parts then fit the ranks' memory the job itself finds out before it trains; if
not it says so and ends, and is not launched again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.commands.launch.supervisor import refit
from hvdtrain.core.mesh import depths_of

if TYPE_CHECKING:
    from hvdtrain.config import Config


class Recut(NamedTuple):
    """``depths``: ranks of each copy of the model. ``owners``: the copy of before that each takes its settings from.

    ``why``: in words, "" where the cut is the user's own.
    """

    depths: tuple[int, ...]
    owners: tuple[int, ...]
    why: str = ""


def recut(config: Config, before: Sequence[HostSlots], after: Sequence[HostSlots]) -> Recut:
    """Return the copies of a model for the ranks of ``after``, where the user's configuration is for ``before``.

    A multiple of ``pipeline.stages`` keeps them. Other ranks make as many copies as keep each as deep as may be, none
    deeper than it was: 2 ranks of 3 stages are one copy over 2, and 5 are copies over 3 and 2. Given depths are those
    of the ranks that are left of each copy.
    """
    old, new = _ranks(before), _ranks(after)
    stages, given = config.pipeline.stages, config.pipeline.depths
    if not given and new % stages == 0:
        return _taken(config, before, after, (stages,) * (new // stages), "")
    if not given:
        copies = -(-new // stages)
        depths = tuple(new // copies + (i < new % copies) for i in range(copies))
        return _taken(config, before, after, depths, f"{new} rank{'s are' * (new > 1) or ' is'} no multiple of "
                      f"pipeline.stages {stages}: the model is {_shown(depths)}")
    if sum(given) == new and before == after:
        return Recut(tuple(given), tuple(range(len(given))))
    owners = [copy for copy, depth in enumerate(given) for _ in range(depth)]
    if sum(given) != old:  # never the user's own ranks: the job refuses it in words
        return Recut(tuple(given), tuple(range(len(given))))
    left = [int(copy) for copy in refit([str(copy) for copy in owners], before, after)]
    found: list[tuple[int, int]] = []
    for copy, ranks in groupby(left):
        n = len(list(ranks))
        found += [(copy, min(given[copy], n - at)) for at in range(0, n, given[copy])]
    depths, taken = tuple(depth for _, depth in found), tuple(copy for copy, _ in found)
    why = "" if depths == tuple(given) else f"of pipeline.depths {given} the ranks that are left make {list(depths)}"
    return Recut(depths, taken, why)


def options(config: Config, found: Recut) -> list[str]:
    """Return the options of ``train`` for these copies, with the user's shares of them; none for the user's own."""
    words: list[str] = []
    if found.why:
        alike = len(set(found.depths)) == 1
        words += ["--pipeline.stages", str(found.depths[0] if alike else 1)]
        words += ["--pipeline.depths", "[]" if alike else str(list(found.depths))]
        words += ["--pipeline.cut", "[]"] if config.pipeline.cut else []
    shares = config.shares
    if isinstance(shares, (list, tuple)) and max(found.owners) < len(shares):
        own = [shares[copy] for copy in found.owners]
        words += ["--shares", str(own if any(own) else [1] * len(own))]
    return words


def _taken(config: Config, before: Sequence[HostSlots], after: Sequence[HostSlots], depths: tuple[int, ...],
           why: str) -> Recut:
    """The copies of ``depths``, each with the settings of the one that its first rank was in."""
    stages, old = config.pipeline.stages, _ranks(before)
    if old % stages:
        return Recut(depths, tuple(0 for _ in depths), why)
    copy_of = [copy for copy, depth in enumerate(depths_of(stages, [], old)) for _ in range(depth)]
    left = refit([str(copy) for copy in copy_of], before, after)
    firsts = [sum(depths[:i]) for i in range(len(depths))]
    return Recut(depths, tuple(int(left[first]) for first in firsts), why)


def _ranks(hosts: Sequence[HostSlots]) -> int:
    return sum(host.slots for host in hosts)


def _shown(depths: Sequence[int]) -> str:
    if set(depths) == {1}:
        return "trained whole on each"
    if len(set(depths)) == 1:
        return f"cut over {depths[0]}" + (f" in each of {len(depths)} copies" if len(depths) > 1 else "")
    return f"cut over {', '.join(map(str, depths[:-1]))} and {depths[-1]} in {len(depths)} copies"
