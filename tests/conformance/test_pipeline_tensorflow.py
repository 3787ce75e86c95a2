"""A Keras model that is cut over ranks, on ranks that are threads: the curve of one process."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples

from hvdtrain.config import Named, Pipeline

keras = pytest.importorskip("keras", reason="Keras is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


def model(rank: int = 0) -> Any:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(16, activation="tanh", name="one"),
                             layers.Dense(14, activation="tanh", name="two"),
                             layers.Dense(12, activation="relu", name="three"), layers.Dense(CLASSES, name="four")])


def trained(size: int, made: Any = model, steps: int = 20, **changes: Any) -> tuple[dict[str, Any], list[Any]]:
    """All ranks' weights by name after the steps, and the runs."""
    settings = config(**{"max_steps": steps, "global_batch": 24, "lr": 0.05, **changes})
    runs = lockstep(size, settings, made, samples(100), fitted)
    held: dict[str, Any] = {}
    for run in runs:
        for name, array in run.parts.state.state()[0]["model"].items():
            name = name[:5]
            if name in held:
                assert (held[name] == array).all()
            held[name] = array
    return held, runs


@pytest.mark.parametrize(("size", "stages", "order"), [(2, 2, "1f1b"), (3, 3, "gpipe"), (4, 4, "1f1b"), (4, 2, "1f1b")])
def test_pipeline_has_the_curve_of_one_process(size: int, stages: int, order: str) -> None:
    momentum = Named("SGD", {"momentum": 0.9})
    want, (alone,) = trained(1, optimizer=momentum)
    got, runs = trained(size, optimizer=momentum, pipeline=Pipeline(stages, order))
    assert sorted(got) == sorted(want)
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-5
    assert all(run.state.loss == pytest.approx(alone.state.loss, rel=1e-5) for run in runs)
    assert all(run.state.metrics == pytest.approx(alone.state.metrics) for run in runs)
    for run in runs:
        if order == "1f1b":
            assert run.parts.stage.most_held <= stages - run.mesh.place


def test_a_whole_copy_beside_a_cut_one_clips_by_the_norm_of_the_whole_gradient() -> None:
    want, (alone,) = trained(1, clip_norm=0.05)
    got, runs = trained(3, clip_norm=0.05, pipeline=Pipeline(depths=[1, 2]))
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-5
    assert sorted(len(run.parts.replicas) for run in runs) == [1, 1, 2]
    assert all(run.state.grad_norm == pytest.approx(alone.state.grad_norm, rel=1e-5) for run in runs)
    assert alone.state.grad_norm > 0.05
