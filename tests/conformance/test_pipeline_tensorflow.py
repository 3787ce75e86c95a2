"""A Keras model that is cut over ranks, on ranks that are threads, beside the cases of every backend."""

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


def test_copies_with_unequal_shares_have_the_curve_of_one_process() -> None:
    adam = Named("Adam", {"epsilon": 1e-3})
    want, (alone,) = trained(1, optimizer=adam)
    got, runs = trained(4, optimizer=adam, pipeline=Pipeline(2), shares=[3, 1])
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-5
    assert all(run.state.loss == pytest.approx(alone.state.loss, rel=1e-5) for run in runs)
