"""ZeRO with Keras on TensorFlow, over ranks as threads: the unsharded run's bits, whatever the parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import bits, config, fitted, lockstep, make_model, samples

from hvdtrain.config import DataParallel, Exchange, Named
from hvdtrain.protocols.state import Head

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

RUN = config(global_batch=24, max_steps=5, lr=0.01, exchange=Exchange(bucket_mb=0.0005))
DATA = samples(96)
OPTIMIZERS = {
    "SGD": {}, "momentum": {"momentum": 0.9}, "Nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {}, "AMSGrad": {"amsgrad": True}, "AdamW": {"weight_decay": 0.1}, "RMSprop": {"centered": True},
    "Adagrad": {}, "Nadam": {}, "Lion": {}, "Adadelta": {}, "Adamax": {}, "Ftrl": {}, "clipvalue": {"clipvalue": 0.01}}
CLASSES = {"momentum": "SGD", "Nesterov": "SGD", "AMSGrad": "Adam", "clipvalue": "Adam"}


def trained(size, settings, out):
    return lockstep(size, replace(settings, out=str(out)), lambda rank: make_model("tensorflow"), DATA, fitted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_the_bits_of_the_unsharded_run(name, tmp_path):
    settings = replace(RUN, optimizer=Named(CLASSES.get(name, name), OPTIMIZERS[name]), shares=[3, 1])
    want = bits(trained(2, settings, tmp_path / "whole")[0])
    for stage in (1, 2):
        runs = trained(2, replace(settings, data_parallel=DataParallel("zero", stage, [2, 1])),
                       tmp_path / f"stage{stage}")
        assert {bits(run) for run in runs} == {want}


def test_the_state_of_slices_is_that_of_the_unsharded_run(tmp_path):
    from hvdtrain.backends.tensorflow.state import without_counters

    settings = replace(RUN, optimizer=Named("Nadam"))
    whole = trained(3, settings, tmp_path / "whole")[0].parts.state.state()[0]["optimizer"]
    whole = {without_counters(name): array for name, array in whole.items()}
    runs = trained(3, replace(settings, data_parallel=DataParallel("zero", 2, [3, 0, 2])), tmp_path / "zero")
    given = [shard for run in runs for shard in run.parts.state.slices()]
    assert len({shard.name for shard in given}) == len(whole)  # rank 0's names, whatever numbers Keras gave
    found = {name: np.full(array.shape, -9, array.dtype) for name, array in whole.items()}
    for shard in given:
        array = found[without_counters(shard.name)]
        assert shard.shape == array.shape and (array.flat[shard.begin:shard.begin + shard.values.size] == -9).all()
        array.flat[shard.begin:shard.begin + shard.values.size] = shard.values
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)
    heads = [Head("optimizer", name, a.shape, a.dtype.str, 0, a.size) for name, a in whole.items()]
    for run in runs:
        state = run.parts.state
        before = [shard.values for shard in state.slices()]
        wanted = state.wanted(heads)
        state.load_slices({name: np.zeros(end - begin, whole[name].dtype) for name, begin, end in wanted})
        assert not any(shard.values.any() for shard in state.slices())
        state.load_slices({name: whole[name].reshape(-1)[begin:end] for name, begin, end in wanted})
        for got, want in zip(state.slices(), before, strict=True):
            np.testing.assert_array_equal(got.values, want)
