"""Cases of a model that is partitioned over ranks, for any backend, on ranks that are threads: see `step_cases`.

A kit's ``chain`` is cut; the kit that cannot be cut says so in ``lacks``. One process trains the same, once for all
cases that ask for it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from small_runs import apart, config, fitted, lockstep, samples
from step_kit import COUNTER, needs

from hvdtrain.config import FOR_EACH, Named, PipelineConfig

DATA = samples(100)
"""Four global batches of 24 samples and one of four, of which some micro-batches have none."""
WITHIN = {"float64": 1e-9, "float32": 1e-5}


def settings(**changes):
    """Twenty steps of SGD with momentum."""
    return config(**{"max_steps": 20, "global_batch": 24, "lr": 0.05, "optimizer": Named("SGD", {"momentum": 0.9}),
                     **changes})


def trained(kit, size, asked, data=DATA):
    """({name: array} of all ranks, the same wherever two of them have it; the runs)."""
    runs = lockstep(size, asked, lambda rank: kit.chain(), data, fitted)
    held = {}
    for run in runs:
        for name, array in run.parts.state.state()[0]["model"].items():
            name = COUNTER.sub("", name)
            assert name not in held or (held[name] == array).all(), name
            held[name] = array
    return held, runs


@functools.lru_cache(maxsize=8)
def alone_with(kind, clip_norm):
    """Return what one process trains, once for several cases."""
    return trained(kind(), 1, settings(clip_norm=clip_norm))


def same_curve(kit, size, cut, clip_norm=0.0):
    """Train over ``size`` ranks, hold it against one process, and return the runs of both."""
    want, (alone,) = alone_with(type(kit), clip_norm)
    got, runs = trained(kit, size, settings(clip_norm=clip_norm, pipeline=cut))
    assert sorted(got) == sorted(want)
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < WITHIN[kit.dtype]
    for run in runs:
        assert run.state.loss == pytest.approx(alone.state.loss, rel=WITHIN[kit.dtype])
        assert run.state.metrics == pytest.approx(alone.state.metrics, rel=1e-5)
    return runs, alone


@needs("pipelines")
@pytest.mark.parametrize(("size", "cut"), [
    (2, PipelineConfig(2, "gpipe")), (4, PipelineConfig(4)), (2, PipelineConfig(2, "interleaved"))], ids=str)
def test_stages_have_the_curve_of_one_process_and_keep_no_more_than_their_order_needs(kit, size, cut):
    runs, _ = same_curve(kit, size, cut)
    for run in runs:
        stage, mesh = run.parts.stage, run.mesh
        assert stage.held == 0
        if cut.order == "1f1b":
            assert stage.most_held == mesh.depth - mesh.place
        if cut.order == "gpipe":
            assert stage.most_held == FOR_EACH * mesh.depth


@needs("pipelines")
def test_a_whole_copy_beside_a_cut_one_clips_by_the_norm_of_the_whole_gradient(kit):
    runs, alone = same_curve(kit, 3, PipelineConfig(depths=[1, 2]), clip_norm=0.05)
    assert sorted(len(run.parts.replicas) for run in runs) == [1, 1, 2]
    assert alone.state.grad_norm > 0.05
    assert all(run.state.grad_norm == pytest.approx(alone.state.grad_norm, rel=1e-5) for run in runs)


@needs("pipelines")
def test_fewer_samples_than_stages_and_an_evaluation_larger_than_the_training(kit):
    data, asked = (samples(10), samples(41, 1)), settings(max_steps=6, global_batch=2, eval_every=1)
    _, (alone,) = trained(kit, 1, asked, data)
    for run in trained(kit, 4, replace(asked, pipeline=PipelineConfig(depths=[3, 1])), data)[1]:
        assert run.state.metrics == pytest.approx(alone.state.metrics, rel=1e-5)
        assert run.state.loss == pytest.approx(alone.state.loss, rel=1e-5)


__all__ = [name for name in dir() if name.startswith("test_")]
