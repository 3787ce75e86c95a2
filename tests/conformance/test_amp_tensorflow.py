"""Computing in 16 bits with Keras: whose layers follow, and what stays float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tensorflow_tools import SGD, attached, batch, close, cut, mlp, run, weights  # noqa: E402

from hvdtrain.backends.keras import compiled  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.parallel.precision import LONG, Precision  # noqa: E402

PLAIN = replace(SGD, optimizer=Named("sgd"), loss_scale=1024.0)


def made(own, model, config=PLAIN, size=1, **parts):
    """Return a step whose only real rank computes in ``own``."""
    return attached(model, config, NullCollectives(0, size), precision=Precision((own, "fp32")[:size]), **parts)


def types(model):
    """compute dtypes of the layers, without the model's own."""
    return [layer.compute_dtype for layer in model.layers]


@pytest.mark.parametrize("own", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_model_computes_narrow_and_the_update_is_that_of_an_unscaled_gradient(own, size):
    step, exact = made(own, mlp(), size=size), made("fp32", mlp(), size=size)
    before = weights(step)
    for s in (step, exact):
        (finite, _), pairs = run(s, cut(batch(0), 20, 12), 1 / 32)
        assert finite
    assert types(step.model) == [LONG[own]] * 2 and step.model(batch(0)[0]).dtype == LONG[own]
    for got, want, start in zip(weights(step), weights(exact), before):
        assert got.dtype == np.float32 and 0 < np.abs(got - want).max() < 2e-2 * np.abs(want - start).max()
    assert keras.config.dtype_policy().name == "float32" and step.describe()["compute"].startswith(own)


def test_a_changed_scale_needs_no_new_graph():
    step, exact = made("fp16", mlp(), size=2), made("fp32", mlp(), size=2)
    for t in range(3):
        assert run(step, [batch(t)], 1 / 32)[0][0] and run(exact, [batch(t)], 1 / 32)[0][0]
        step.scale.update([0])
    assert len(step.stage.calls._graphs) == 1 and step.scale.value == 128
    close(weights(step), weights(exact), 1e-2)


def test_evaluation_computes_in_the_same_type_and_its_loss_and_metrics_are_float32():
    step, exact = made("bf16", mlp()), made("fp32", mlp())
    for s in (step, exact):
        s.evaluate(batch(0))
    got, want = step.eval_totals(), exact.eval_totals()
    assert list(got) == list(want) and got["loss"][0] != want["loss"][0]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-2)
    np.testing.assert_array_equal(got["shapes of targets and outputs"], want["shapes of targets and outputs"])


def test_a_layer_with_a_type_of_its_own_keeps_it():
    model = mlp(dtype="float32")
    made("fp16", model)
    assert types(model) == ["float16", "float32"] and model(batch(0)[0]).dtype == tf.float32


def test_layers_of_mixed_precision_by_the_users_doing_set_the_example():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, dtype="mixed_bfloat16"),
                              keras.layers.Dense(5)])
    made("fp32", model)
    assert types(model) == ["bfloat16", "float32"], "fp32 stands for the model's own types"
    made("fp16", model)
    assert types(model) == ["float16", "float32"]


def test_a_model_from_a_file_follows_and_is_written_as_it_was_built(tmp_path):
    mlp().save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    step = made("bf16", model)
    assert types(model) == ["bfloat16"] * 2
    step.export(tmp_path)
    assert types(keras.saving.load_model(tmp_path / "model.keras")) == ["float32"] * 2
    assert types(model) == ["bfloat16"] * 2
    made("fp32", model)
    assert types(model) == ["float32"] * 2, "the next run has the model as it was built"


def test_compiled_for_its_optimizer():
    model = mlp()
    model.compile("sgd", "mse")
    made("fp16", model, replace(PLAIN, optimizer=Named("auto")))
    assert type(model.optimizer) is keras.optimizers.SGD


def test_the_scale_comes_back_with_a_checkpoint():
    step, other = made("fp16", mlp()), made("fp16", mlp(seed=4))
    step.scale.update([0])
    step.scale.update([])
    other.load(*step.state())
    assert other.scale.state() == step.scale.state() == {"loss_scale": [512.0, 1, 1]}


@pytest.mark.parametrize("own", ["bf16", "fp16"])
def test_a_model_that_was_given_back_has_its_own_types(own, tmp_path):
    """Also what Keras keeps of graphs that a callback had traced; and a run has it again where it continues."""
    model, x = mlp(extra=[keras.layers.Dropout(0.0), keras.layers.Activation("relu", dtype="float64")]), batch(0)[0]
    built = [layer.dtype_policy for layer in model._flatten_layers()]
    step = made(own, model)
    totals = []
    for t in range(2):
        step.join()
        assert types(model) == [LONG[own], LONG[own], "float64", LONG[own]]
        assert run(step, [batch(t)], 1 / 32)[0][0]
        step.evaluate(batch(t, 5 + t))
        totals.append(step.eval_totals()["loss"])
        assert t or model.predict(x[:3], verbose=0).dtype == LONG[own]
        step.leave()
        step.leave()
        assert all(layer.dtype_policy is policy for layer, policy in zip(model._flatten_layers(), built))
        assert model.predict(x[:3], verbose=0).dtype == np.float32
    exact = made("fp32", mlp(extra=model.layers[1:3]))
    exact.model.set_weights(model.get_weights())
    exact.evaluate(batch(1, 6))
    assert 0 < abs(exact.eval_totals()["loss"][0] - totals[1][0]) < 2e-2 * totals[1][0], "evaluated in the run's type"
    model.save(tmp_path / "model.keras")
    read = keras.saving.load_model(tmp_path / "model.keras")
    assert types(read) == ["float32", "float32", "float64", "float32"]
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.SGD and model.predict(x[:3], verbose=0).dtype == np.float32


def test_layers_that_stay_in_float32_are_named():
    layers = [keras.layers.Reshape((4, 4)), keras.layers.Bidirectional(keras.layers.LSTM(2), name="both")]
    words = made("bf16", mlp(extra=layers)).describe()
    assert words["float32 layers"].count("both/") == 2 and "dense" not in words["float32 layers"]
    for own in ("bf16", "fp32"):
        assert "float32 layers" not in made(own, mlp()).describe()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_variables_of_another_type_are_refused(dtype):
    model = keras.Sequential([keras.Input((12,), dtype=dtype), keras.layers.Dense(5, dtype=dtype)])
    with pytest.raises(UserError, match=f"precision bf16 with variables of {dtype}; expected float32"):
        made("bf16", model)


@pytest.mark.parametrize("own", ["bf16", "fp16"])
def test_what_is_not_narrow_is_left_alone(own):
    for x in (tf.zeros(2), tf.zeros(2, tf.float64), tf.zeros(2, tf.int32), "text"):
        assert compiled.widened(x) is x
    assert compiled.widened(tf.zeros(2, LONG[own])).dtype == tf.float32
