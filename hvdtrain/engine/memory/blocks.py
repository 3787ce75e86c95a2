"""Sets what recomputing each block was reckoned to save and cost beside what it does: `plan --memory`'s table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from hvdtrain.core.protocols import BlockCost
from hvdtrain.core.units import format_bytes, format_ms
from hvdtrain.engine.memory import survey
from hvdtrain.engine.memory.survey import Scene
from hvdtrain.planning.memory import knapsack

COLUMNS = ("block", "saves, predicted", "measured", "costs, predicted", "measured")
"""Headings of `rows`."""

REPEATS = 5

LONGEST_S = 60.0
"""Time after which what is left is not measured: TensorFlow traces a graph for each set of blocks."""


def rows(scene: Scene, costs: Sequence[BlockCost], n: int) -> list[list[str]]:
    """Return a row for each block and one for all: peak and time of a trial of ``n`` samples less than without.

    ``costs``: measured with ``n`` samples. Nothing is recomputed afterwards. Not collective.
    """
    remat = scene.parts.remat
    assert remat is not None
    remat.choose(())
    whole, begin = survey.pass_bytes(scene, n), time.monotonic()
    found: list[list[str]] = []
    for names in [tuple(cost.name for cost in costs), *((cost.name,) for cost in costs)]:
        seconds = sum(cost.forward_s for cost in costs if cost.name in names)
        row = ["all" if not found else names[0], format_bytes(whole - knapsack.peak(costs, names, whole)), "-",
               format_ms(seconds), "-"]
        if time.monotonic() - begin < LONGEST_S:
            remat.choose(names)
            row[2] = format_bytes(whole - survey.pass_bytes(scene, n))
            row[4] = format_ms(_longer_s(scene, names, n))
        found.append(row)
    remat.choose(())
    return [*found[1:], found[0]]


def _longer_s(scene: Scene, names: Sequence[str], n: int) -> float:
    """Seconds by which a trial takes longer with these blocks recomputed: the median of pairs, one after the other."""
    remat, batch, seconds = scene.parts.remat, scene.sample(n), []
    assert remat is not None
    for _ in range(REPEATS + 1):  # the first pair may trace graphs
        pair = []
        for chosen in ((), names):
            remat.choose(chosen)
            begin = time.perf_counter()
            scene.parts.stage.trial(batch)
            pair.append(time.perf_counter() - begin)
        seconds.append(pair[1] - pair[0])
    return statistics.median(seconds[1:])
