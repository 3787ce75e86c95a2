"""data_parallel.stage auto: as little is divided as lets every rank fit, and the notes say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import config, lockstep, make_model, samples

from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.core.units import GIB
from hvdtrain.engine import memory_survey as survey
from hvdtrain.parallel.data_parallel.attach import least_stage
from hvdtrain.parallel.data_parallel.zero import Zero

NEEDS = [int(15.2 * GIB), 9 * GIB, int(6.4 * GIB)]
SETTINGS = config(global_batch=24, max_steps=1, optimizer=Named("SGD", {"momentum": 0.9}),
                  exchange=ExchangeConfig(bucket_mb=0.0005), data_parallel=DataParallelConfig("zero", "auto"))


@pytest.mark.parametrize("free, stage, words", [
    ([11.9, 20], 1, "zero stage 1: unsharded needs 15.2 GiB on rank 0, which has 11.9 GiB free; stage 1 needs "
     "9.00 GiB"),
    ([20, 7], 2, "zero stage 2: unsharded needs 15.2 GiB on rank 1, which has 7.00 GiB free; stage 2 needs 6.40 GiB"),
    ([20, 16], 0, "data_parallel.stage auto shards nothing: unsharded needs 15.2 GiB on rank 1, which has 16.0 GiB "
     "free"),
    ([5, 20], 2, "zero stage 2: unsharded needs 15.2 GiB on rank 0, which has 5.00 GiB free; stage 2 needs 6.40 GiB: "
     "no stage fits, and this one is closest"),
    ([None, None], 0, "data_parallel.stage auto shards nothing: unsharded needs 15.2 GiB on rank 0, whose free "
     "memory is unknown"),
])
def test_the_least_stage_that_fits_is_taken(free, stage, words):
    assert least_stage([NEEDS] * 2, [None if f is None else int(f * GIB) for f in free]) == (stage, words)


@pytest.mark.parametrize("room, zero", ((10**12, False), (1, True)))
def test_all_ranks_divide_alike_by_the_room_there_is(room, zero, monkeypatch, tmp_path):
    monkeypatch.setattr(survey, "free_bytes", lambda scene: room if scene.control.rank else 10**12)

    def work(run):
        return isinstance(run.dp, Zero), [n for n in run.notes if "unsharded needs" in n]

    found = lockstep(2, replace(SETTINGS, out=str(tmp_path)), lambda rank: make_model("numpy"), samples(96), work)
    assert [is_zero for is_zero, _ in found] == [zero] * 2 and found[0] == found[1]
    assert len(found[0][1]) == 1
