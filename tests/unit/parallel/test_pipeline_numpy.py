"""A model that is cut over ranks, in the reference backend on ranks that are threads: the curve of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples

from hvdtrain.comm.collectives.lockstep import LockstepControl, LockstepWorld
from hvdtrain.config import Named, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble

SIZES = (FEATURES, 16, 14, 12, 10, CLASSES)


def model(rank: int = 0) -> Any:
    from hvdtrain.backends.numpy.model import Model

    return Model(SIZES, 3)


def trained(size: int, **changes: Any) -> tuple[dict[str, Any], list[Any]]:
    """All ranks' weights by name after 20 steps, and the runs."""
    settings = config(max_steps=20, global_batch=24, lr=0.05, **changes)
    runs = lockstep(size, settings, model, samples(100), fitted)
    held: dict[str, Any] = {}
    for run in runs:
        for name, array in run.parts.params.made_of() and run.parts.state.state()[0]["model"].items():
            if name in held:
                assert (held[name] == array).all()
            held[name] = array
    return held, runs


@pytest.mark.parametrize(("size", "stages", "order"), [(3, 3, "gpipe"), (4, 2, "interleaved"), (6, 3, "1f1b")])
def test_pipeline_has_the_curve_of_one_process(size: int, stages: int, order: str) -> None:
    momentum = Named("SGD", {"momentum": 0.9})
    want, (alone,) = trained(1, optimizer=momentum)
    got, runs = trained(size, optimizer=momentum, pipeline=PipelineConfig(stages, order))
    assert sorted(got) == sorted(want)
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-9
    assert all(run.state.loss == pytest.approx(alone.state.loss, rel=1e-9) for run in runs)
    assert all(run.state.metrics == pytest.approx(alone.state.metrics) for run in runs)
    for run in runs:
        if order == "1f1b":
            assert run.parts.stage.most_held <= stages - run.mesh.place


def test_rank_that_read_no_pipeline_is_named_before_the_model_is_made() -> None:
    settings = config(global_batch=24, model="of no module:build")

    def rank(control: Any, wire: Any) -> None:
        assemble(replace(settings, pipeline=PipelineConfig(2 - control.rank)), None, samples(100), control, wire)

    with pytest.raises(UserError, match="rank 1 read a configuration that differs from rank 0's"):
        LockstepWorld(2).run(rank, timeout_s=30.0)


def test_ranks_that_cannot_send_messages_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.config import check_launcher

    settings = config(global_batch=24, pipeline=PipelineConfig(2))
    with pytest.raises(UserError, match="under horovodrun --gloo.*Start it with mpirun"):
        check_launcher(settings, "gloo")
    check_launcher(config(), "gloo")
    monkeypatch.setattr(LockstepControl, "carrier", lambda control: None)  # as where MPI lets one thread in only
    with pytest.raises(UserError, match="without a transport for messages.*MPI_THREAD_MULTIPLE"):
        lockstep(2, settings, model, samples(100), fitted)


@pytest.mark.parametrize("pipeline", [PipelineConfig(2), PipelineConfig(2, "interleaved")])
def test_fewer_samples_than_stages_and_an_evaluation_larger_than_the_training(pipeline: PipelineConfig) -> None:
    data, settings = (samples(10), samples(41, 1)), config(max_steps=6, global_batch=2, lr=0.05, eval_every=1)
    alone, = lockstep(1, settings, model, data, fitted)
    for run in lockstep(4, replace(settings, pipeline=pipeline), model, data, fitted):
        assert run.state.metrics == pytest.approx(alone.state.metrics)
        assert run.state.loss == pytest.approx(alone.state.loss)
