"""ZeRO with Keras on TensorFlow over each wire: one model on all ranks, the unsharded run's, also when it continues."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from small_runs import CUTS, apart, bits, config, fitted, make_model, samples, weights

from hvdtrain.backends import imported
from hvdtrain.cluster import horovod
from hvdtrain.config import CheckpointConfig, DataParallelConfig, ExchangeConfig, Named
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120), pytest.mark.usefixtures("few_ranks")]
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.fixture
def wire(request):
    if request.param == "horovod" and horovod.horovod_reason("tensorflow"):
        pytest.skip(horovod.horovod_reason("tensorflow"))
    return request.param


@pytest.fixture
def trained(control, wire, tmp_path):
    """Return a run to its end under `DataParallelConfig` of these arguments, in a directory of its own."""
    out, count = control.bcast(str(tmp_path / "run")), itertools.count()

    def run(*way, **changes):
        settings = config(global_batch=23, max_steps=4, lr=0.01, optimizer=Named("AdamW", {"weight_decay": 0.1}),
                          shares=CUTS[control.size][-1], collectives=wire, exchange=ExchangeConfig(bucket_mb=0.0005),
                          out=f"{out}-{next(count)}", data_parallel=DataParallelConfig(*way))
        return fitted(assemble(replace(settings, **changes), make_model("tensorflow"), samples(46)))
    return run


def check(control, wire, run, whole):
    """Equal to the bit where both add in the order of the ranks."""
    own = bits(run)
    assert set(control.gather(own)) == {own} and run.collectives.name == wire
    if wire == "shared" or control.size == 2:
        assert own == bits(whole)
    assert apart(weights(run), weights(whole)) < 1e-5


@pytest.mark.parametrize("wire", [*(pytest.param(name, marks=pytest.mark.world_size(2)) for name in ("shared", "mpi")),
                                  "horovod"], indirect=True)
def test_it_gives_the_unsharded_run_s_model(control, wire, trained):
    """In stage 2; the other, and three ranks over shared memory, below; more in conformance/test_zero_tensorflow.py."""
    whole, shards = trained(), list(range(control.size))
    check(control, wire, trained("zero", 2, shards), whole)
    assert "tensorflow" in imported()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("wire", ["horovod"], indirect=True)
def test_shards_of_compressed_gradients_have_the_bits_of_the_whole(control, wire, trained):
    more = {"max_steps": 2, "compression": "topk", "exchange": ExchangeConfig(bucket_mb=0.0005, topk_ratio=0.2)}
    own = bits(trained("zero", 2, list(range(control.size)), **more))
    assert set(control.gather(own)) == {own} and own == bits(trained(**more))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("wire", ["shared"], indirect=True)
def test_a_run_goes_on_with_other_parts_and_unsharded(control, wire, trained):
    whole, kept = trained(), CheckpointConfig(at_end=True)
    first = trained("zero", 2, max_steps=2, checkpoint=kept)
    for way in ((), ("zero", 1, [1] + [0] * (control.size - 1))):
        check(control, wire, trained(*way, resume=str(first.out)), whole)
