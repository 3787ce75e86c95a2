"""A rank that runs out of memory repeats the step with all others, alone with smaller micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import CUTS, apart, bits, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.data.cursor import Cursor
from hvdtrain.data.feed import StepBatch
from hvdtrain.errors import UserError
from hvdtrain.out_of_memory.recut import recut

SETTINGS = replace(config(), max_steps=6, global_batch=24)
DATA = samples(96)


def test_a_part_is_cut_again_in_its_own_order():
    x = np.arange(10)
    batch = StepBatch(Cursor(), Cursor(), [(x[:6],), (x[6:],)], 10, 20, 20.0, 10.0)
    parts = [micro[0] for micro in recut(batch, 4).micros]
    assert [len(part) for part in parts] == [3, 3, 4] and np.array_equal(np.concatenate(parts), x)
    assert recut(batch, 6) is batch and recut(batch, 0) is batch


def failing(run: Any, rank: int, at: set[int]) -> Any:
    """Train ``run``, whose ``rank`` runs out of memory in its runs of a micro-batch number ``at`` (from 0)."""
    stage, count = run.parts.stage, iter(range(10_000))
    own = stage.run
    stage.sizes = []

    def step(micro: Any, scale: float, final: bool, sink: Any) -> Any:
        stage.sizes.append(len(micro[0]))
        if run.control.rank == rank and next(count) in at:
            raise MemoryError
        return own(micro, scale, final, sink)

    stage.run = step
    return fitted(run)


@pytest.mark.parametrize("size, shares", [(n, cut) for n in (1, 2, 3) for cut in CUTS[n] if cut[-1]])
def test_a_step_is_repeated_at_its_size_first_and_then_in_halves(size, shares):
    settings = replace(SETTINGS, shares=shares)
    runs = {at: lockstep(size, settings, lambda r: make_model("numpy"), DATA,
                         lambda run, at=at: failing(run, size - 1, at)) for at in ((), (2,), (2, 3))}
    assert {bits(run) for run in runs[()]} == {bits(run) for run in runs[2,]}
    assert len({bits(run) for run in runs[2, 3]}) == 1
    assert apart(weights(runs[2, 3][0]), weights(runs[()][0])) < 1e-5
    n = max(runs[()][-1].parts.stage.sizes)
    assert runs[2, 3][-1].parts.stage.sizes[-1] <= -(-n // 2)
    for rank in range(size - 1):
        assert set(runs[2, 3][rank].parts.stage.sizes) == set(runs[()][rank].parts.stage.sizes)


def test_every_rank_ends_alike_where_one_has_no_smaller_size():
    def work(run: Any) -> str:
        with pytest.raises(UserError, match="rank 1 is out of memory in training with a micro-batch of 1") as error:
            failing(run, 1, set(range(2, 1000)))
        return str(error.value)

    said = lockstep(2, SETTINGS, lambda r: make_model("numpy"), DATA, work)
    assert said[0] == said[1]


def test_the_run_ends_with_the_error_where_it_is_to_stop():
    with pytest.raises(UserError, match="out of memory in training with micro-batches of 24"):
        lockstep(1, replace(SETTINGS, on_oom="stop"), lambda r: make_model("numpy"), DATA,
                 lambda run: failing(run, 0, {2}))
