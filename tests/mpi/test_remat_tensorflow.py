"""Keras models on TensorFlow over each wire: the same model to the bit whether blocks are recomputed or not."""

from __future__ import annotations

import pytest
from small_runs import CUTS, bits, config, fitted, samples

from hvdtrain.cluster import horovod
from hvdtrain.config import DataParallelConfig, ExchangeConfig
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


def model():
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([keras.Input((12,)), *(keras.Sequential(
        [layers.Dense(16), layers.BatchNormalization(), layers.Activation("gelu"), layers.Dropout(0.2)],
        name=f"block_{i}") for i in range(2)), layers.Dense(5)])


@pytest.mark.parametrize("wire, changes", [
    pytest.param("horovod", {"sync_batchnorm": True, "clip_norm": 0.5}, marks=pytest.mark.world_size(2)),
    pytest.param("shared", {"data_parallel": DataParallelConfig("zero", 2), "accumulate": 2},
                 marks=pytest.mark.world_size(3)),
], ids=["horovod, BatchNorm over ranks", "shared, zero"])
def test_recomputed_blocks_train_the_same_model(control, wire, changes, tmp_path):
    if wire == "horovod" and horovod.horovod_reason("tensorflow"):
        pytest.skip(horovod.horovod_reason("tensorflow"))
    out = control.bcast(str(tmp_path / "run"))

    def run(remat):
        settings = config(global_batch=24, max_steps=3, lr=0.01, shares=CUTS[control.size][-2], collectives=wire,
                          exchange=ExchangeConfig(bucket_mb=0.0005), out=f"{out}-{remat}", remat=remat, **changes)
        done = fitted(assemble(settings, model(), samples(48)))  # each number of samples is a graph to trace
        return bits(done), done.parts.describe().get("recomputed", "")

    (without, nothing), (got, blocks) = run("off"), run("every:1")
    assert got == without and not nothing and blocks.startswith("block_0, block_1")
    if "sync_batchnorm" in changes:  # else each rank has statistics of its own
        assert len(set(control.gather(got))) == 1
