"""Compressed training for real: the same bits on every rank after every step, state that survives a checkpoint, and
steps that leave no trace where they are left out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_runs import CUTS, FRAMEWORKS, apart, bits, config, fitted, make_model, samples, solo, weights

from hvdtrain.cluster import horovod
from hvdtrain.config import CheckpointConfig, ExchangeConfig, Named
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
BATCH = 23
DATA = samples(2 * BATCH)
"""Whole batches: TensorFlow traces graphs for each number of samples."""
OPTIONS = {"fp16": {}, "bf16": {}, "int8": {}, "powersgd": {"powersgd_rank": 1},
           "topk": {"topk_ratio": 0.1, "topk_momentum": 0.5, "topk_warmup_steps": 4}}
"""A rank low enough that the tiny model's matrices are compressed; a warm-up of two stages and two steps after it."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture(params=["horovod", "shared"])
def wire(request, framework):
    if request.param == "horovod" and horovod.horovod_reason(framework):
        pytest.skip(horovod.horovod_reason(framework))
    if request.param == "shared" and framework == "tensorflow":
        pytest.skip("TensorFlow goes over Horovod unless told otherwise; eager sums over plain MPI are test_training's")
    return request.param


@pytest.fixture
def two(control):
    """Skip at three and four ranks what does not depend on their number."""
    if control.size > 2:
        pytest.skip("tried on 2 ranks")


@pytest.fixture
def out(control, tmp_path):
    """Return a directory of rank 0's that all ranks name alike."""
    return control.bcast(str(tmp_path / "run"))


@pytest.fixture
def settings(control, out):
    """Configure a compressor: unequal shares, two micro-batches, clipping, buckets of a few parameters."""
    count = itertools.count()

    def made(name, wire="auto", at="", **changes):
        """``at``: a directory to use again; each call has its own otherwise."""
        exchange = ExchangeConfig(bucket_mb=0.0005, **OPTIONS.get(name, {}))
        return replace(config(global_batch=BATCH, out=f"{out}-{at or next(count)}", collectives=wire,
                              compression=name, exchange=exchange, shares=CUTS[control.size][-1],
                              accumulate=2, clip_norm=0.5), **changes)
    return made


class SameBits(Callback):
    """After every step the parameters' bits are the same on all ranks, and have changed."""

    where = "all"
    last = None

    def step_end(self, run):
        own = bits(run)
        assert set(run.control.gather(own)) == {own} and own != self.last
        self.last = own


@pytest.mark.tensorflow_size(2, 3)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_on_every_rank_after_every_step(control, settings, framework, wire, name):
    """In PyTorch all on 2 ranks, each on 3 and 4 over one of the transports in turn; in TensorFlow on 2 or on 3."""
    if framework == "tensorflow" and control.size == (2 if name in ("int8", "topk", "powersgd") else 3):
        pytest.skip("a compressor with state runs with 3 ranks, a cast with 2")
    turn = (list(OPTIONS).index(name) + control.size) % 2 == (wire == "shared")
    if control.size > 2 and framework == "torch" and turn:
        pytest.skip("over the other transport with this number of ranks")
    run = assemble(settings(name, wire, max_steps=6), make_model(framework), DATA)
    assert run.collectives.name == wire and run.dp.reducer.compressor.name == name and len(run.dp.reducer.buckets) > 1
    check = SameBits()
    run.callbacks.append(check)
    fitted(run)
    assert check.last is not None and run.state.cursor.step == 6
    moved = apart(weights(run), weights(solo(settings(name), make_model(framework), DATA)))
    assert 1e-3 < moved < 10


def test_rounding_stays_near_the_uncompressed_run(two, settings, framework):
    def trained(name):
        return weights(fitted(assemble(settings(name, max_steps=10), make_model(framework), DATA)))

    exact = trained("none")
    for name, most in (("fp16", 2e-3), ("bf16", 2e-2), ("int8", 2e-2)):
        assert 0 < apart(trained(name), exact) < most, name


@pytest.mark.world_size(3)
def test_powersgd_does_not_depend_on_how_samples_are_cut(control, settings, framework):
    """It is linear: equal and unequal shares, over other numbers of ranks, follow one curve (law 2)."""
    own = {"max_steps": 10, "accumulate": 1}
    uneven = fitted(assemble(settings("powersgd", **own), make_model(framework), DATA))
    even = fitted(assemble(settings("powersgd", shares=[], **own), make_model(framework), DATA))
    exact = fitted(assemble(settings("none", **own), make_model(framework), DATA))
    assert apart(weights(uneven), weights(even)) < 1e-4 < 1e-3 < apart(weights(even), weights(exact))


@pytest.mark.parametrize("framework, name", [("torch", "int8"), ("torch", "powersgd"), ("tensorflow", "topk")],
                         indirect=["framework"])
def test_state_goes_on_bit_by_bit_from_a_checkpoint(two, settings, framework, name):
    """The state of each compressor in each framework: conformance/compressor_cases.py."""
    each = CheckpointConfig(every_steps=3, at_end=False)
    whole = fitted(assemble(settings(name, max_steps=6), make_model(framework), DATA))
    fitted(assemble(settings(name, at="kept", max_steps=3, checkpoint=each), make_model(framework), DATA))
    again = assemble(settings(name, at="kept", max_steps=6, resume="auto"), make_model(framework, seed=1), DATA)
    assert again.state.cursor.step == 3 and not any("anew" in note for note in again.notes)
    assert bits(fitted(again)) == bits(whole)


def test_state_of_another_plan_starts_anew_and_says_so(two, settings, framework):
    fitted(assemble(settings("topk", at="kept", max_steps=3, checkpoint=CheckpointConfig(every_steps=3, at_end=False)),
                    make_model(framework), DATA))
    again = assemble(settings("int8", at="kept", max_steps=6, resume="auto"), make_model(framework), DATA)
    assert any("compressor state starts from scratch" in note for note in again.notes)
    fitted(again)
    assert again.state.cursor.step == 6


@pytest.mark.tensorflow_size(3)
def test_a_checkpoint_without_state_clears_the_state(control, framework, out):
    options = {"global_batch": 12, "max_steps": 3}
    fitted(assemble(config(out=out, checkpoint=CheckpointConfig(every_steps=3), **options), make_model(framework),
                    samples(60)))
    run = fitted(assemble(config(out=out + "-topk", compression="topk", **options), make_model(framework), samples(60)))
    exchange = run.dp.reducer
    owed = sum(float(np.abs(np.array(exchange.ops.to_host(s["residual"]))).sum()) for s in exchange.state.all())
    assert control.agree(owed > 0)
    kept = {name: x for name, x in run.rank_state().items() if not name.startswith("compressor.")}
    assert "starts from scratch" in run.load_rank(kept)
    assert exchange.state.steps == 0
    assert all(not np.array(exchange.ops.to_host(s["residual"])).any() for s in exchange.state.all())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_a_skipped_step_leaves_no_trace_in_the_state(control, settings, framework, name):
    """In TensorFlow of topk, which has most state; all: conformance/compressor_cases.py."""
    if framework == "tensorflow" and name != "topk":
        pytest.skip("one compressor in TensorFlow, whose graphs take long to trace")
    x, y = DATA
    run = assemble(settings(name, max_steps=6, nan_guard="skip", optimizer=Named("SGD")), make_model(framework),
                   (np.where(np.arange(len(x))[:, None] == 7, np.nan, x).astype(np.float32), y))
    seen = []

    class Watch(Callback):
        where = "all"

        def step_start(self, run):
            self.before = state(run)

        def non_finite(self, run):
            seen.append(apart(state(run), self.before))

    run.callbacks.append(Watch())
    fitted(run)
    assert seen and max(seen) == 0.0 and all(np.isfinite(a).all() for a in state(run))
    assert control.agree(any(np.abs(a).max() > 0 for a in state(run)))  # a rank without samples owes nothing


def test_adasum_of_a_short_batch_has_the_gradients_own_size(control, out):
    """Only one rank has a sample: the result is its gradient, not P times it."""
    if control.size not in (2, 4):
        pytest.skip("Adasum takes 2, 4, 8, ... ranks")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))
    settings = {"global_batch": 4 * control.size, "max_steps": 1, "exchange": ExchangeConfig(adasum=True)}
    run = fitted(assemble(config(out=out, **settings), make_model("torch"), samples(1)))
    assert run.collectives.name == "horovod" and run.dp.reducer.compressor.name == "adasum"
    alone = fitted(solo(config(global_batch=4, max_steps=1, out=out + f"-solo{control.rank}"), make_model("torch"),
                        samples(1)))
    assert apart(weights(run), weights(alone)) < 1e-6


@pytest.mark.parametrize("name", ["none", "int8", "topk", "powersgd", "bf16"])
def test_a_parameter_without_elements_is_carried_along(control, name, out):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(12, 5)
            self.empty = torch.nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return self.linear(x) + self.empty.sum()

    torch.manual_seed(0)
    run = fitted(assemble(config(global_batch=12, max_steps=2, compression=name, out=out,
                                 exchange=ExchangeConfig(bucket_mb=1e-5)), Model(), samples(60)))
    assert 0 in [b.n for b in run.dp.reducer.buckets]
    assert set(control.gather(bits(run))) == {bits(run)}


def state(run):
    """Return the compressor's arrays on this rank."""
    return [a.astype(np.float64) for n, a in sorted(run.dp.saved().items())
            if n not in ("compressor.mark", "compressor.steps")]
