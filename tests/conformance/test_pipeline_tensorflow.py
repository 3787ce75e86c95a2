"""A Keras model that is partitioned over ranks, on ranks that are threads, beside the cases of every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples, solo

from hvdtrain.config import Named, PipelineConfig, RebalanceConfig
from hvdtrain.core.errors import UserError

keras = pytest.importorskip("keras", reason="Keras is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


def model(rank: int = 0) -> Any:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(16, activation="tanh", name="one"),
                             layers.Dense(14, activation="tanh", name="two"),
                             layers.Dense(12, activation="relu", name="three"), layers.Dense(CLASSES, name="four")])


def trained(size: int, made: Any = model, steps: int = 20, data: Any = None, work: Any = fitted,
            **changes: Any) -> tuple[dict[str, Any], list[Any]]:
    """All ranks' weights by name after the steps, and the runs."""
    settings = config(**{"max_steps": steps, "global_batch": 24, "lr": 0.05, **changes})
    runs = lockstep(size, settings, made, data or samples(96), work)
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
    want, (alone,) = trained(1, data=samples(100), optimizer=adam)
    got, runs = trained(4, data=samples(100), optimizer=adam, pipeline=PipelineConfig(2), shares=[3, 1])
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-5
    assert all(run.state.loss == pytest.approx(alone.state.loss, rel=1e-5) for run in runs)


def odd(rank: int = 0) -> Any:
    """Integers and complex numbers come out of blocks, and one writes to its weights in its forward."""
    keras.utils.set_random_seed(3)
    layers, tf = keras.layers, pytest.importorskip("tensorflow")

    class There(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.signal.fft(tf.cast(x, "complex64"))

    class Back(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            y = tf.signal.ifft(x * tf.complex(1.0, 0.5))
            return tf.math.real(y) + tf.math.imag(y)

    return keras.Sequential([
        keras.Input((4,), dtype="int32"), layers.Reshape((4,), name="numbers"), layers.Embedding(9, 3, name="embed"),
        layers.Flatten(name="flat"), layers.SpectralNormalization(layers.Dense(6, name="inner"), name="spectral"),
        There(name="there"), Back(name="back"), layers.Dense(CLASSES, name="head")])


def test_what_goes_over_cuts_and_what_layers_write_to_is_that_of_one_process() -> None:
    draw = np.random.default_rng(0)
    data = draw.integers(0, 9, (48, 4)).astype(np.int32), draw.integers(0, CLASSES, 48)
    want, _ = trained(1, odd, 2, data, accumulate=3)
    got, _ = trained(3, odd, 2, data, pipeline=PipelineConfig(3, micro_batches=3, cut=["embed", "back"]))
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < 1e-5


def test_blocks_that_give_unlike_shapes_are_measured_apart() -> None:
    from hvdtrain.backends.tensorflow.chain import _kind

    x = np.zeros((2, 3, 6), np.float32)
    rows = [keras.layers.SimpleRNN(6, return_sequences=many) for many in (True, True, False)]
    for row in rows:
        row.build(x.shape)
    assert _kind(rows[0], x) == _kind(rows[1], x) != _kind(rows[2], x)


def test_blocks_are_measured_with_fewer_samples_where_memory_lacks(monkeypatch, capsys) -> None:
    from hvdtrain.backends.tensorflow import chain as costs

    measure, tried = costs.measure, []

    def short(chain: Any, x: Any, *args: Any, **named: Any) -> Any:
        tried.append(len(x))
        if len(x) > 3:
            raise MemoryError("of a test")
        return measure(chain, x, *args, **named)

    monkeypatch.setattr(costs, "measure", short)
    _, (run, _) = trained(2, steps=1, pipeline=PipelineConfig(2, micro_batches=4), progress="plain")
    with pytest.raises(UserError, match="an earlier pipeline run.*Build the model again"):
        solo(config(), run.spec.model, samples(20))
    assert sorted(tried) == [3, 3, 6, 6] and run.parts.layout.plans[0].task.kinds[0].samples == 6
    assert "measured its blocks with fewer samples than a micro-batch: out of memory" in capsys.readouterr().out


def test_metrics_of_training_batches_are_counted_where_the_outputs_are() -> None:
    from hvdtrain.engine.keras_bridge import Bridge

    def compiled(rank: int = 0) -> Any:
        made = model()
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return made

    def followed(run: Any) -> Any:
        run.callbacks.append(Bridge([], run))
        return fitted(run)

    _, (alone,) = trained(1, compiled, 5, work=followed, metrics=[])
    _, runs = trained(3, compiled, 5, work=followed, metrics=[],
                      pipeline=PipelineConfig(depths=[1, 2], micro_batches=2),
                      balance="static", rebalance=RebalanceConfig(probe_s=0.01))
    want = alone.callbacks[-1].history
    for run in runs:
        assert {name: pytest.approx(values) for name, values in run.callbacks[-1].history.items()} == want
    assert want["accuracy"]
