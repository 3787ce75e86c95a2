"""Combinations of ZeRO in PyTorch: each gives the bits of the unsharded run, on every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import Record, apart, bits, config, fitted, hiding_model, lockstep, make_model, samples, weights
from sync_models import with_norms

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402

ADAM = config(global_batch=24, max_steps=8, lr=0.01, optimizer=Named("Adam"), exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(96)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(tmp_path, settings=ADAM, size=3, shards=(2, 0, 1), model=lambda rank: make_model("torch"), data=DATA,
         work=fitted):
    """Return what each rank's ``work`` gives, unsharded and with zero in both stages."""
    found = []
    for stage in (0, 1, 2):
        way = DataParallelConfig("zero", stage, list(shards)) if stage else DataParallelConfig()
        found.append(lockstep(size, replace(settings, out=str(tmp_path / f"stage{stage}"), data_parallel=way), model,
                              data, work))
    return found


def one_curve(tmp_path, *args, **more):
    """Both ways have the same bits; the runs of zero in stage 2."""
    runs = both(tmp_path, *args, **more)
    assert len({bits(run) for each in runs for run in each}) == 1
    return runs[2]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"compression": "fp16"}, {"compression": "bf16"}, {"compression": "int8"},
    {"compression": "topk", "exchange": ExchangeConfig(bucket_mb=0.0005, topk_ratio=0.2)},
    {"compression": "powersgd", "threads": 1}, {"shares": [1, 0, 3]}, {"accumulate": 3, "shares": [1, 0, 3]},
    {"micro_batch": 3}, {"emulate_speed": [1.0, 0.9, 1.0]}, {"check_every": 2, "audit": 3},
    {"precision": "bf16:fp32:fp32"}, {"precision": "fp16:fp32:fp32", "loss_scale": 1024.0},
    {"metrics": ["accuracy"], "eval_every": 1}], ids=str)
def test_it_goes_with(changes, tmp_path):
    runs = one_curve(tmp_path, replace(ADAM, **changes))
    assert {run.dp.compression for run in runs} == {changes.get("compression", "none")}


def test_a_compressors_memory_is_the_unsharded_runs(tmp_path):
    settings = replace(ADAM, compression="topk", exchange=ExchangeConfig(bucket_mb=0.0005, topk_ratio=0.2))
    whole, _, zero = both(tmp_path, settings)
    for run, of_zero in zip(whole, zero):
        own, other = run.dp.saved(), of_zero.dp.saved()
        assert set(own) == set(other) and any(array.any() for array in own.values())
        for name, array in own.items():
            np.testing.assert_array_equal(other[name], array)


def test_a_clipped_norm_is_that_of_all_parts(tmp_path):
    whole, first, second = both(tmp_path, replace(ADAM, clip_norm=0.05))
    assert len({bits(run) for run in (*first, *second)}) == 1
    assert apart(weights(second[0]), weights(whole[0])) < 1e-5


def watched(run):
    run.callbacks.insert(0, record := Record())
    loop.fit(run)
    return bits(run), record.non_finite_at, record.losses, run.parts.scale.value, run.parts.optimizer.updates


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_a_step_that_is_left_out_is_left_out_by_every_owner(compression, tmp_path):
    x, y = (array.copy() for array in DATA)
    x[[7, 40]] = np.nan
    settings = replace(ADAM, nan_guard="skip", max_skipped=9, compression=compression)
    runs = both(tmp_path, settings, model=lambda rank: hiding_model("torch"), data=(x, y), work=watched)
    assert len({(found[0], tuple(found[1]), found[4]) for each in runs for found in each}) == 1
    assert runs[0][0][1] and 0 < runs[0][0][4] < 8


def test_an_overflow_on_one_rank_is_an_update_of_none(tmp_path):
    settings = replace(ADAM, precision="fp16:fp32:fp32", loss_scale=2.0**24)
    runs = both(tmp_path, settings, work=watched)
    assert len({(found[0], found[3], found[4]) for each in runs for found in each}) == 1
    assert runs[0][0][3] < 2.0**24 and runs[0][0][4] < 8


def test_statistics_over_all_ranks(tmp_path):
    """Whose collectives run in backward: buckets are handed over after it."""
    settings = replace(ADAM, sync_batchnorm=True, shares=[2, 1, 0])
    runs = one_curve(tmp_path, settings, model=lambda rank: with_norms("torch"))
    assert any("gradients are not sharded" in note and "sync_batchnorm" in note for note in runs[0].notes)


class Sometimes(torch.nn.Module):
    """Layers that only some samples, or none, pass through: gradients that only some ranks have."""

    def __init__(self):
        super().__init__()
        self.first, self.rare = torch.nn.Linear(12, 16), torch.nn.Linear(16, 16)
        self.never, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 5)

    def forward(self, x):
        h = self.first(x).tanh()
        if bool(x[0, 0] > 0):  # whether a rank does depends on its samples
            h = h + self.rare(h)
        return self.last(h)


def sometimes(rank):
    torch.manual_seed(0)
    return Sometimes()


@pytest.mark.slow
def test_gradients_that_only_some_ranks_have(tmp_path):
    one_curve(tmp_path, model=sometimes)
    one_curve(tmp_path / "more", replace(ADAM, accumulate=2, shares=[1, 2, 0]), model=sometimes)


class Forgetful(torch.nn.Module):
    """Drops all gradients before it computes: of several micro-batches the last one's is left."""

    def __init__(self):
        super().__init__()
        self.inner = make_model("torch")

    def forward(self, x):
        self.zero_grad()
        return self.inner(x)


def test_a_model_that_drops_its_gradients(tmp_path):
    one_curve(tmp_path, replace(ADAM, accumulate=2), model=lambda rank: Forgetful())


def test_a_model_may_be_moved_in_memory_between_fits(tmp_path):
    """As ``model.to(memory_format=...)`` does: an owner updates the parameters where they are."""
    def moved(run):
        for epoch in (1, 2):
            run.config = replace(run.config, max_steps=4 * epoch)
            run.state.stop = ""
            loop.fit(run)
            for param in run.parts.params.tensors:
                param.data = param.data.clone()
        return run

    one_curve(tmp_path, work=moved)


def test_bytes_to_come_are_those_of_the_own_slices(tmp_path):
    found = both(tmp_path, shards=(3, 0, 1), work=lambda run: run.parts.optimizer.bytes_to_come())
    assert sum(found[2]) == found[0][0] and found[2][1] == 0 and found[2][0] > found[2][2] > 0


def test_gradients_whose_parameter_gets_them_twice_are_refused(tmp_path):
    class Twice(torch.nn.Module):
        """Runs backward through a part within its own backward, as checkpoints of the old kind do."""

        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(12, 16), torch.nn.Linear(16, 5)

        def forward(self, x):
            return self.outer(torch.utils.checkpoint.checkpoint(
                lambda v: self.inner(torch.utils.checkpoint.checkpoint(self.inner_and_back, v, use_reentrant=True)),
                x.requires_grad_(), use_reentrant=True))

        def inner_and_back(self, v):
            return v + 0 * self.inner(v).sum()

    with pytest.raises(UserError, match="received its gradient twice.*use_reentrant"):
        lockstep(2, replace(ADAM, exchange=ExchangeConfig(bucket_mb=0.0001), out=str(tmp_path),
                            data_parallel=DataParallelConfig("zero", 2)), lambda rank: Twice(), DATA, fitted)


def test_a_rank_alone_divides_nothing(tmp_path):
    (run,) = lockstep(1, replace(ADAM, data_parallel=DataParallelConfig("zero", 2), out=str(tmp_path)),
                      lambda rank: make_model("torch"), DATA, fitted)
    assert any("there is one rank" in note for note in run.notes)
