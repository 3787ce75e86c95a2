"""How many bytes a rank will hold, by kind; pure arithmetic over `facts`.

With Adam in float32 a parameter takes 4 bytes, its gradient 4 and its state 8: 16 where every rank holds all, 8 + 8/N
in stage 1 of ZeRO over N ranks, 4 + 12/N in stage 2, and a few bytes a tensor (PyTorch counts updates for each).

When a step holds most is looked for at two moments: within forward and backward, and in the update, when activations
are gone and the optimizer has its scratch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.units import Footprint
from hvdtrain.planning import shards
from hvdtrain.planning.memory.facts import MemoryFacts
from hvdtrain.planning.memory.pass_trace import first_copies

MARGIN = {"torch": 0.17, "tensorflow": 0.08, "numpy": 0.06}
"""Part of what is allocated and freed in a step that fragmentation of the heap takes beside it, as measured on CPUs."""

SCRATCH = {"torch": 5.0, "tensorflow": 3.0, "numpy": 1.0}
"""Copies of the largest tensor that an update makes on its way, and what fragmentation of the heap makes of them."""


def forecast(facts: MemoryFacts) -> Footprint:
    """Return what this rank holds when a step holds most."""
    model, rank, way, measured = facts.model, facts.rank, facts.way, facts.measured
    param_bytes = model.param_bytes
    parameters = sum(param_bytes) + model.other_bytes + model.average_bytes
    sizes_BP = way.cut() if way.stage else []
    spans = shards.spans(way.buckets, sizes_BP, rank.rank, len(model.specs)) if way.stage else None
    own_B = [sizes_P[rank.rank] * (b.nbytes // max(1, b.n)) for b, sizes_P in zip(way.buckets, sizes_BP)]
    state = model.state_bytes(spans)
    divided = way.stage == 2 and rank.micros == 1
    gradients = sum(own_B) if divided else sum(param_bytes)
    step = max(0, _pass(facts, own_B, divided) - measured.spared)
    largest = max(param_bytes, default=0)
    if way.stage:
        largest = max(own_B, default=0)
    in_graph = model.framework == "tensorflow" and not way.buckets  # backward lets go of what the update has read
    update = 0 if in_graph else int(SCRATCH[model.framework] * largest)
    scratch = int(max(measured.scratch[0] * rank.micro_batch, measured.scratch[1]))
    workspace = (scratch + update + int(MARGIN[model.framework] * (step + scratch)) + measured.held_bytes
                 + rank.batch_bytes * rank.ahead)
    copies = 0
    if rank.saves:  # rank 0 copies what all hold alike; what is divided each owner copies
        copies = (parameters + state) if rank.rank == 0 else state if way.stage else 0
    return Footprint(parameters, gradients, state, step, _buckets(facts, divided), workspace + max(0, copies - step))


def _pass(facts: MemoryFacts, own_B: Sequence[int], divided: bool) -> int:
    """The most that forward and backward hold beside parameters, state and the gradients' lasting memory."""
    model, rank, way, measured = facts.model, facts.rank, facts.way, facts.measured
    param_bytes = model.param_bytes
    if measured.line is None:
        return 0
    line = measured.line
    total = sum(param_bytes)
    if measured.with_gradients:  # of the framework's own, at the end of backward
        beside = 0 if way.buckets else total
        return max(0, line.peak(rank.micro_batch) - beside)
    n = len(line.base_E)
    groups = [b.params for b in way.buckets]
    held_E: np.ndarray = first_copies(line.made, n, param_bytes, groups)
    if divided:
        held_E = held_E + _done(line.made, n, way.buckets, own_B) - sum(own_B)
    elif not way.buckets:
        held_E = held_E - total  # all of them are counted as gradients
    return max(0, line.peak(rank.micro_batch, held_E))


def _done(made: Sequence[tuple[int, int]], n_events: int, buckets: Sequence[Bucket],
          own_B: Sequence[int]) -> np.ndarray:
    """int64 (E,): bytes of this rank's slices of the buckets that have been summed by each moment."""
    held_E = np.zeros(n_events + 1, np.int64)
    at = {i: event for event, i in made}
    for bucket, own in zip(buckets, own_B):
        held_E[min(n_events, max((at.get(i, n_events) for i in bucket.params), default=n_events))] += own
    found_E: np.ndarray = np.cumsum(held_E)[:n_events]
    return found_E


def _buckets(facts: MemoryFacts, divided: bool) -> int:
    """The memory of the exchange beside the gradients themselves."""
    rank, way = facts.rank, facts.way
    if not way.buckets:
        return 0
    total, largest = sum(b.nbytes for b in way.buckets), max(b.nbytes for b in way.buckets)
    held = way.remembered
    if way.compression != "none":
        held += 3 * largest + (0 if divided else total)  # sums are vectors of their own
    elif way.wire == "shared" and rank.local > 1:
        # Of each other rank's row this one reads and writes its own stripe.
        rows = largest if divided else total
        held += rows * (rank.local - 1) // rank.local
    elif way.wire != "null":
        held += largest
    if divided:
        held += largest  # the vector in flight
    if way.stage:
        held += 2 * largest  # parameters on the wire: own part and the whole
    return held
