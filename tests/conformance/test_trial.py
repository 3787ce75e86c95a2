"""`Step.trial`: a batch computed for its time leaves the run as it was, in every backend."""

from __future__ import annotations

import pytest
from small_runs import apart, bits, config, fitted, make_model, samples, solo

from hvdtrain import backends
from hvdtrain.config import Named

TRIED = [1, 3, 8]


def model_of(framework, seed=0):
    """With all that a forward pass changes: BatchNorm's statistics, and dropout's generator."""
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2),
                                   torch.nn.Linear(6, 5))
    if framework == "tensorflow":
        pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
        keras = pytest.importorskip("keras", reason="Keras is not installed")
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                                 keras.layers.Dropout(0.2), keras.layers.Dense(5)])
    return make_model(framework, seed)


def run_of(framework, out, steps):
    return solo(config(global_batch=16, max_steps=steps, out=str(out), optimizer=Named("SGD", {"momentum": 0.5})),
                model_of(framework), samples(64))


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_a_trial_leaves_no_trace(framework, tmp_path):
    plain = fitted(run_of(framework, tmp_path / "plain", 6))
    tried = run_of(framework, tmp_path / "tried", 6)
    sizes = TRIED if framework == "numpy" else TRIED[1:]  # BatchNorm takes no statistics of one
    for n in sizes:
        tried.step.trial(tried.feed.sample(n))
    fitted(tried)
    assert bits(tried) == bits(plain) and tried.state.loss == plain.state.loss


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_trial_between_steps_leaves_no_trace(framework, tmp_path):
    from hvdtrain.callbacks.base import Callback

    class Try(Callback):
        where = "all"

        def step_end(self, run):
            run.step.trial(run.feed.sample(5))

    plain = fitted(run_of(framework, tmp_path / "plain", 5))
    tried = run_of(framework, tmp_path / "tried", 5)
    tried.callbacks.insert(0, Try())
    fitted(tried)
    assert apart([a for _, a in sorted(tried.step.state()[0]["optimizer"].items())],
                 [a for _, a in sorted(plain.step.state()[0]["optimizer"].items())]) == 0
    assert bits(tried) == bits(plain)


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_backends_tell_out_of_memory_from_other_errors(framework):
    if framework != "numpy":
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    backend = backends.load(framework)
    assert backend.out_of_memory(MemoryError()) and not backend.out_of_memory(ValueError("shapes"))
    if framework == "torch":
        import torch

        assert backend.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
        assert not backend.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    if framework == "tensorflow":
        import tensorflow as tf

        assert backend.out_of_memory(tf.errors.ResourceExhaustedError(None, None, "OOM"))
    calls = []
    assert backend.peak_bytes(lambda: calls.append(1)) == 0 and calls == [1]
