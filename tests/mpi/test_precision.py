"""Ranks of unlike types for real: one set of weights, overflows that all skip, a scale that outlives a checkpoint."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, bits, config, fitted, make_model, samples, weights

from hvdtrain.cluster import horovod
from hvdtrain.config import CheckpointConfig, ExchangeConfig
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture(params=["horovod", "shared"])
def wire(request, framework):
    if request.param == "horovod" and horovod.horovod_reason(framework):
        pytest.skip(horovod.horovod_reason(framework))
    if request.param == "shared" and framework == "tensorflow":
        pytest.skip("TensorFlow goes over Horovod unless told otherwise")
    return request.param


@pytest.fixture
def settings(control, tmp_path):
    """Two micro-batches, buckets of a few parameters; rank 0 in the type given, the others in fp32."""
    if control.size > 2:
        pytest.skip("tried on 2 ranks")
    out, count = control.bcast(str(tmp_path / "run")), itertools.count()

    def made(first, wire="auto", at="", **changes):
        """``at``: a directory to use again; each call has its own otherwise."""
        base = config(global_batch=16, out=f"{out}-{at or next(count)}", collectives=wire, accumulate=2, max_steps=12,
                      exchange=ExchangeConfig(bucket_mb=0.0005, topk_ratio=0.1), precision=f"{first}:fp32")
        return replace(base, **changes)
    return made


class Watch(Callback):
    """The weights' bits and the loss scale after every step, which are the same on all ranks."""

    where = "all"

    def __init__(self):
        self.bits, self.scales = [], []

    def step_end(self, run):
        self.bits.append(bits(run))
        self.scales.append(run.parts.scale.value)
        assert set(run.control.gather((self.bits[-1], self.scales[-1]))) == {(self.bits[-1], self.scales[-1])}


def watched(settings, framework, seed=0):
    run = assemble(settings, make_model(framework, seed), samples(60))
    run.callbacks.append(watch := Watch())
    return run, fitted(run), watch


def test_unlike_types_follow_one_curve(settings, framework, wire):
    run, _, watch = watched(settings("bf16", wire), framework)
    exact, _, plain = watched(settings("fp32", wire), framework)
    assert run.collectives.name == wire and len(set(watch.bits)) == 12
    assert any(note.startswith("rank 0: bf16 on ") for note in run.notes)
    assert any("computing in bf16 on rank 0, fp32 on rank 1" in note for note in run.notes)
    assert 0 < apart(weights(run), weights(exact)) < 2e-2
    assert run.state.loss == pytest.approx(exact.state.loss, rel=2e-2)


def test_an_overflow_on_one_rank_is_skipped_by_all(settings, framework, wire):
    """In TensorFlow's graph too, where the state of topk lies in variables."""
    run, _, watch = watched(settings("fp16", wire, loss_scale=2.0**24, compression="topk"), framework)
    left_out = [after < before for before, after in zip([2.0**24, *watch.scales], watch.scales)]
    assert all(left_out[:3]) and not left_out[-1] and run.parts.scale.skipped == sum(left_out)
    assert [a == b for a, b in zip(watch.bits, watch.bits[1:])] == left_out[1:]
    assert all(np.isfinite(a).all() for a in (*weights(run), *run.dp.saved().values()))


def test_the_scale_goes_on_from_a_checkpoint(settings, framework):
    each = CheckpointConfig(every_steps=6, at_end=False)
    whole, _, watch = watched(settings("fp16", loss_scale=2.0**20, compression="topk"), framework)
    watched(settings("fp16", at="kept", loss_scale=2.0**20, compression="topk", max_steps=6, checkpoint=each),
            framework)
    again, _, rest = watched(settings("fp16", at="kept", loss_scale=2.0**20, compression="topk", resume="auto"),
                             framework, seed=1)
    assert rest.scales == watch.scales[6:] and rest.bits == watch.bits[6:]
    assert again.parts.scale.state() == whole.parts.scale.state() and whole.parts.scale.skipped > 0
