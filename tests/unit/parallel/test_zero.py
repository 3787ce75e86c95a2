"""ZeRO in numpy over ranks as threads: the unsharded run's bits, whatever the parts, and what each rank keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_runs import CLASSES, CUTS, FEATURES, HIDDEN, bits, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.backends.numpy.model import Model
from hvdtrain.comm.collectives.lockstep import LockstepCollectives
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.parallel.data_parallel.zero import Zero

MOMENTUM = config(global_batch=24, max_steps=6, optimizer=Named("SGD", {"momentum": 0.9}),
                  exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(96)


def trained(size, settings, out, dtype="float64"):
    return lockstep(size, replace(settings, out=str(out)), lambda rank: Model((FEATURES, HIDDEN, CLASSES), 0, dtype),
                    DATA, fitted)


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 3, 4))
def test_it_gives_the_bits_of_the_unsharded_run(size, tmp_path):
    for i, shares in enumerate(CUTS[size]):
        settings = replace(MOMENTUM, shares=shares)
        want = bits(trained(size, settings, tmp_path / f"whole{i}")[0])
        for stage, shards in itertools.product((1, 2), ([], list(range(size, 0, -1)), [1] + [0] * (size - 1))):
            runs = trained(size, replace(settings, data_parallel=DataParallelConfig("zero", stage, shards)),
                           tmp_path / f"zero{i}{stage}{len(shards)}{sum(shards)}")
            assert {bits(run) for run in runs} == {want}
            assert all(isinstance(run.dp, Zero) for run in runs)


def test_each_rank_keeps_the_state_of_its_part_alone(tmp_path):
    runs = trained(3, replace(MOMENTUM, data_parallel=DataParallelConfig("zero", 2, [2, 1, 1])), tmp_path / "run")
    held = [sum(array.size for _, _, array in run.parts.optimizer.slots()) for run in runs]
    total = sum(array.size for array in weights(runs[0]))
    assert sum(held) == total and held[0] == pytest.approx(total / 2, rel=0.2)  # edges are multiples of 16


def test_the_norm_is_clipped_as_a_whole(tmp_path):
    settings = replace(MOMENTUM, clip_norm=0.05)
    want = weights(trained(3, settings, tmp_path / "whole")[0])
    runs = trained(3, replace(settings, data_parallel=DataParallelConfig("zero", 2, [5, 0, 2])), tmp_path / "zero")
    assert len({bits(run) for run in runs}) == 1
    for a, b in zip(weights(runs[0]), want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_keep_their_bits(tmp_path):
    settings = replace(MOMENTUM, accumulate=3, shares=[3, 1])
    want = bits(trained(2, settings, tmp_path / "whole")[0])
    runs = trained(2, replace(settings, data_parallel=DataParallelConfig("zero", 2)), tmp_path / "zero")
    assert {bits(run) for run in runs} == {want}
    assert any("gradients are not sharded" in note for note in runs[0].notes)


@pytest.mark.parametrize("stage, most", [(1, None), (2, 2)])
@pytest.mark.parametrize("compression, kind", [("none", "reducescatterv"), ("bf16", "alltoallv")])
def test_stage_2_has_two_buckets_under_way_where_the_wire_works_beside_backward(
        compression, kind, stage, most, tmp_path, monkeypatch):
    """Such a transport holds a bucket's memory until its sum is taken."""
    begin, open_, found = getattr(LockstepCollectives, kind), [set(), set()], []
    settings = replace(MOMENTUM, compression=compression, exchange=ExchangeConfig(bucket_mb=0.0001))

    class Handle:
        def __init__(self, wire, handle):
            self.mine, self.handle = open_[wire.rank], handle
            self.mine.add(self)
            found.append(len(self.mine))

        def wait(self):
            self.mine.remove(self)
            return self.handle.wait()

    monkeypatch.setattr(LockstepCollectives, "overlaps", True)
    monkeypatch.setattr(LockstepCollectives, kind, lambda wire, *of: Handle(wire, begin(wire, *of)))
    runs = trained(2, replace(settings, data_parallel=DataParallelConfig("zero", stage)), tmp_path / "run", "float32")
    n = len(runs[0].dp.buckets)
    assert n > 3 and max(found) == (n if most is None else most + 1)  # one more while it is handed over
    assert {bits(run) for run in runs} == {bits(trained(2, settings, tmp_path / "whole", "float32")[0])}


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UserError, match="parameters sharded, too.*model_parallel"):
        replace(MOMENTUM, data_parallel=DataParallelConfig("zero", 3)).check()
    for stage, given, many in ((2, [1, 1, 1], "3 entries"), ("auto", [1], "1 entry")):
        with pytest.raises(UserError, match=f"shards has {many} for 2 ranks"):
            trained(2, replace(MOMENTUM, data_parallel=DataParallelConfig("zero", stage, given)), tmp_path / "run")


def test_time_that_backward_waits_for_other_ranks_is_no_computing(tmp_path):
    """The rank that another one waits for in the midst of backward must not count as the slow one."""
    settings = replace(MOMENTUM, data_parallel=DataParallelConfig("zero", 2), emulate_speed=[1.0, 0.01], max_steps=4)

    def waited(run):
        fitted(run)
        return run.timeline.totals.seconds["compute"], run.timeline.totals.seconds["wait"]

    (fast_s, wait_s), (slow_s, _) = lockstep(2, replace(settings, out=str(tmp_path / "run")),
                                             lambda rank: make_model("numpy"), DATA, waited)
    assert fast_s < slow_s and wait_s > 0
