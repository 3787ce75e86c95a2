"""The same training five ways: numpy in lockstep and over MPI, each framework over Horovod and over MPI."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import CUTS, FRAMEWORKS, apart, config, fitted, lockstep, samples, weights

from hvdtrain.cluster import horovod
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.config import Named
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
SIZES = (12, 16, 5)
STEPS = 5


@pytest.fixture
def settings(control, tmp_path):
    """Five steps on unequal ranks; float32 everywhere."""
    return lambda wire="auto", name="run": config(
        global_batch=13, max_steps=STEPS, collectives=wire, out=control.bcast(str(tmp_path / name)),
        shares=CUTS[control.size][-1], optimizer=Named("SGD", {"momentum": 0.5}))


def reference_model(rank=0):
    from hvdtrain.backends.numpy.model import Model

    return Model(SIZES, 3, "float32")


def by_layer(run):
    """[(in, out) kernels and (out,) biases], from input to output, in numpy's layout."""
    arrays = run.parts.state.state()[0]["model"]
    if run.spec.framework == "numpy":
        return [arrays[name] for name in ("w0", "b0", "w1", "b1")]
    if run.spec.framework == "torch":
        return [arrays["0.weight"].T, arrays["0.bias"], arrays["2.weight"].T, arrays["2.bias"]]
    return weights(run)


def twin(framework):
    """Return the reference's weights in a model of ``framework``."""
    params = reference_model().params
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
        arrays = {f"{2 * i}.{new}": params[f"{old}{i}"].T for i in (0, 1)
                  for old, new in (("w", "weight"), ("b", "bias"))}
        model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()})
        return model
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)])
    model.set_weights([params["w0"], params["b0"], params["w1"], params["b1"]])
    return model


@pytest.fixture
def expected(control, tmp_path):
    """Return the weights after the lockstep run of as many ranks in this process."""
    own = config(global_batch=13, max_steps=STEPS, out=str(tmp_path / "lockstep"), shares=CUTS[control.size][-1],
                 optimizer=Named("SGD", {"momentum": 0.5}))
    runs = lockstep(control.size, own, reference_model, samples(40), fitted)
    assert apart(by_layer(runs[0]), list(reference_model().params.values())) > 0.01
    return by_layer(runs[0])


def test_numpy_over_mpi_is_numpy_in_lockstep(settings, comm, expected):
    run = fitted(assemble(settings(), reference_model(), samples(40), collectives=MpiCollectives(comm, 30.0)))
    assert apart(by_layer(run), expected) < 1e-6


@pytest.mark.tensorflow_size(3)
@pytest.mark.parametrize("wire", ["horovod", "mpi", "shared"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_is_numpy_in_lockstep(settings, framework, wire, expected):
    model = twin(framework)
    reason = horovod.horovod_reason(framework) if wire == "horovod" else None
    if reason:
        pytest.skip(reason)
    run = fitted(assemble(settings(wire), model, samples(40)))
    assert run.collectives.name == wire
    assert apart(by_layer(run), expected) < 1e-6
