"""Ranks that compute in other types than each other: one curve, one set of weights, one vote on overflow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, SLOW_TENSORFLOW, apart, bits, config, lockstep, make_model, samples, weights

from hvdtrain.config import ExchangeConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks.base import Callback

UNSHUFFLED = replace(config().data, shuffle=False)
CURVE = 2e-2
"""How far bf16 on a part of the ranks may take the loss of 20 steps off the fp32 curve, relative (8 bits a number)."""


class Watch(Callback):
    """After each step: loss, loss scale, hash of the weights; and the steps that were told as not finite."""

    where = "all"

    def __init__(self):
        self.losses, self.scales, self.bits, self.states, self.stopped_at = [], [], [], [], []

    def step_end(self, run):
        self.losses.append(run.state.loss)
        self.scales.append(run.parts.scale.value)
        self.bits.append(bits(run))
        self.states.append([a.tobytes() for n, a in sorted(run.dp.saved().items())])

    def non_finite(self, run):
        self.stopped_at.append(run.state.cursor.step)


def trained(run):
    """Return (what `Watch` saw, weights, how it ended, the summary's lines) of a fit."""
    run.callbacks[:0] = [watch := Watch()]
    try:
        loop.fit(run)
        end = "completed"
    except UserError as error:
        end = str(error)
    return watch, weights(run), end, run.parts.describe()


def job(framework, precision, tmp_path, data=None, size=2, feed=config().data, **changes):
    """Return what every rank's `trained` returned; ``feed``: the configuration's section data."""
    make_model(framework)
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    setting = replace(config(global_batch=8, max_steps=20, out=str(out), precision=precision, data=feed), **changes)
    return lockstep(size, setting, lambda rank: make_model(framework), samples(40) if data is None else data, trained)


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_bf16_beside_fp32_follows_the_fp32_curve(framework, tmp_path):
    plain = job(framework, "fp32", tmp_path)
    assert job(framework, "fp32:fp32", tmp_path)[0][0].bits == plain[0][0].bits, "the default, spelled out"
    mixed = job(framework, "bf16:fp32", tmp_path)
    assert mixed[0][0].bits == mixed[1][0].bits and mixed[0][2] == "completed"
    assert mixed[0][0].bits[0] != plain[0][0].bits[0], "rank 0 rounded"
    assert np.allclose(mixed[0][0].losses, plain[0][0].losses, rtol=CURVE)
    assert all(w.dtype == np.float32 for w in mixed[0][1] if w.dtype.kind == "f")
    assert mixed[0][3]["compute"] == mixed[1][3]["compute"] == "bf16 on rank 0, fp32 on rank 1"
    assert "compute" not in plain[0][3] and "loss scale" not in mixed[0][3]


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_a_rank_in_fp16_without_a_sample_changes_no_bit(framework, tmp_path):
    """The others never see the scale: what they compute and exchange is as in fp32, in two micro-batches too."""
    plain = job(framework, "fp32", tmp_path, shares=[1, 0], accumulate=2)
    mixed = job(framework, "fp32:fp16", tmp_path, shares=[1, 0], accumulate=2)
    assert mixed[0][0].bits == mixed[1][0].bits == plain[0][0].bits
    assert mixed[0][3]["loss scale"] == "65536"


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_the_scale_leaves_no_trace_in_the_gradient(framework, tmp_path):
    """Powers of two only move the exponent: away from float16's ends every scale gives the same gradient."""
    small = job(framework, "fp16:fp32", tmp_path, loss_scale=128.0, accumulate=2)
    large = job(framework, "fp16:fp32", tmp_path, loss_scale=1024.0, accumulate=2)
    plain = job(framework, "fp32", tmp_path, accumulate=2)
    assert large[0][0].bits == large[1][0].bits and large[0][0].scales == [1024.0] * 20
    assert apart(small[0][1], large[0][1]) < 1e-4 and 0 < apart(large[0][1], plain[0][1]) < 1e-2


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("compression", ["none", "topk", "powersgd"])
def test_an_overflow_on_one_rank_is_skipped_by_all(framework, compression, tmp_path):
    """2^24 is too much for float16 in a step of 8 samples: the first steps are left out, and seldom a later one."""
    exchange = ExchangeConfig(bucket_mb=0.0005, powersgd_rank=1, topk_ratio=0.1)
    results = job(framework, "fp32:fp16", tmp_path, loss_scale=2.0**24, compression=compression, exchange=exchange,
                  optimizer=Named("SGD", {"momentum": 0.5}), threads=1)
    a, b = (result[0] for result in results)
    assert results[0][2] == results[1][2] == "completed" and not a.stopped_at and not b.stopped_at
    assert a.scales == b.scales and a.bits == b.bits
    left_out = [after < before for before, after in zip([2.0**24, *a.scales], a.scales)]
    assert all(left_out[:3]) and sum(left_out) < 12 and not left_out[-1]
    for t in range(1, 20):
        assert (a.bits[t] == a.bits[t - 1]) == left_out[t]
        for watch in (a, b) if compression != "none" else ():  # error feedback, and the count of steps of a warm-up
            assert (watch.states[t] == watch.states[t - 1]) == left_out[t]
    assert results[0][3]["loss scale"] == f"{a.scales[-1]:g}, {sum(left_out)} steps skipped (overflow)"


def nan_at(at):
    x, y = samples(24)
    x[at] = np.nan
    return x, y


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_what_a_smaller_scale_does_not_mend_is_nan_guards(framework, tmp_path):
    """Sample 14 is in rank 1's part of step 1. On a rank in fp32 that is no overflow, nor is it at a scale of 1."""
    def ends(precision, **changes):
        results = job(framework, precision, tmp_path, nan_at(14), max_steps=3,
                      **{"loss_scale": 1024.0, "feed": UNSHUFFLED, **changes})
        assert results[0][2] == results[1][2] and results[0][0].scales == results[1][0].scales
        assert all(np.isfinite(w).all() for w in results[0][1])
        return results[0][2], results[0][0]

    end, _ = ends("fp16:fp32")
    assert "not finite at step 1 on rank 1" in end
    end, _ = ends("fp32:fp16", loss_scale=1.0)
    assert "not finite at step 1 on rank 1" in end
    end, watch = ends("fp32:fp16")
    assert end == "completed" and watch.scales == [1024.0, 512.0, 512.0] and not watch.stopped_at
    end, watch = ends("fp32:fp16", loss_scale=1.0, nan_guard="skip")
    assert end == "completed" and watch.scales == [1.0] * 3 and watch.stopped_at == [1]


def test_a_loss_read_one_step_late_condemns_no_clean_step(tmp_path):
    """As on a GPU: the check of the gradient has decided by then."""
    make_model("torch")
    setting = config(global_batch=8, epochs=1, data=UNSHUFFLED, out=str(tmp_path), precision="fp32:fp16",
                     loss_scale=1024.0)

    def late(run):
        run.parts.stage.asynchronous = run.parts.optimizer.looks = True
        return trained(run)

    for watch, _, end, _ in lockstep(2, setting, lambda rank: make_model("torch"), nan_at(14), late):
        assert end == "completed" and watch.scales == [1024.0, 512.0, 512.0] and not watch.stopped_at


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_rank_alone_scales_and_skips_too(framework, tmp_path):
    [(watch, end_weights, end, _)] = job(framework, "fp16", tmp_path, size=1, loss_scale=2.0**24)
    [(plain, plain_weights, _, _)] = job(framework, "fp32", tmp_path, size=1)
    assert end == "completed" and watch.scales[0] == 2.0**23 and watch.scales[-1] == watch.scales[-2]
    assert watch.bits[0] == watch.bits[1] != watch.bits[-1] and len(end_weights) == len(plain_weights)


def test_a_list_for_other_ranks_is_refused_by_all(tmp_path):
    with pytest.raises(UserError, match="precision bf16:fp32 names 2 types for 3 ranks"):
        lockstep(3, config(precision="bf16:fp32", out=str(tmp_path)), lambda rank: make_model("numpy"), samples(40),
                 trained)


def test_the_reference_refuses_16_bits(tmp_path):
    with pytest.raises(UserError, match="precision bf16 with the numpy backend"):
        lockstep(2, config(precision="bf16", out=str(tmp_path)), lambda rank: make_model("numpy"), samples(40), trained)
