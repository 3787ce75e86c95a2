"""What recomputing blocks changes in a rank's plan, by what each block was measured to save and cost; pure."""

from __future__ import annotations

import sys
from dataclasses import replace

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.memory import knapsack
from hvdtrain.planning.memory.facts import Facts
from hvdtrain.planning.memory.forecast import MARGIN, forecast
from hvdtrain.planning.memory.knapsack import Choice


def costs(facts: Facts, micro_batch: int) -> list[BlockCost]:
    """Return what recomputing each block saves and costs with so many samples; fragmentation is saved along."""
    measured = facts.measured
    return knapsack.scaled(measured.blocks, micro_batch / measured.block_samples, MARGIN[facts.model.framework])


def choice(facts: Facts, free: int | None) -> Choice:
    """Return the cheapest blocks that bring what this rank holds down to ``free`` bytes; None: there is room."""
    return knapsack.cheapest(costs(facts, facts.rank.micro_batch), forecast(facts).total,
                             sys.maxsize if free is None else free)


def spared(facts: Facts, chosen: Choice) -> Facts:
    """Return the facts of a rank that recomputes what was chosen of it by `choice`."""
    less = (forecast(facts).total - chosen.peak) / (1 + MARGIN[facts.model.framework])
    return replace(facts, measured=replace(facts.measured, spared=int(less)))
