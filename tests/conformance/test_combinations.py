"""Settings together train as one rank alone does, or are refused with their message: `combinations`.

Keras' backend is fixed when it is imported: `test_step_keras_torch` runs this file in a process of Keras on PyTorch.
"""

import ast
import functools
import os
from pathlib import Path

import combinations
import pytest
from combinations import GROUP, KEYS, REFUSED, RUNS, TESTED, distance, settings, tolerance, trained, words

from hvdtrain.core.errors import UserError

TESTS = Path(__file__).resolve().parents[1]
KERAS_ON_TORCH = os.environ.get("KERAS_BACKEND") == "torch"
FRAMEWORKS = ["keras-torch"] if KERAS_ON_TORCH else ["torch", "tensorflow"]


@functools.cache
def model_of(framework):
    """Return the function that makes a model of four blocks; skips where the framework is not installed."""
    pytest.importorskip("torch" if "torch" in framework else "tensorflow", reason=f"{framework} is not installed")
    if framework == "torch":
        from torch_tools import TorchKit

        return TorchKit().chain
    pytest.importorskip("keras", reason="Keras is not installed")
    from keras_kit import KerasKit

    return KerasKit().chain


@pytest.fixture
def two_devices(monkeypatch, framework):
    """Let two devices of a rank be its CPU, in PyTorch."""
    if "torch" in framework:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        from hvdtrain.backends.torch import placement

        monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "run"), [(name, run) for name in FRAMEWORKS for run in RUNS[name]])
def test_settings_train_together_as_one_rank_alone(framework, run, two_devices):
    model, names = model_of(framework), words(run)
    got = trained(model, names, combinations.ranks(names))
    assert distance(model, got) < tolerance(names)


@pytest.mark.parametrize(("framework", "names"), [
    (framework, names) for framework in FRAMEWORKS for names in {**REFUSED[""], **REFUSED[framework]}])
def test_refusals_have_their_message(framework, names, two_devices):
    asked = [name for name in names if name]
    with pytest.raises(UserError) as refused:
        settings(asked)  # without a model, where the configuration tells
        trained(model_of(framework), asked, 2)
    message = combinations.refusal(framework, *names)
    if framework == "tensorflow" and "device split" in names:  # needs devices that are made before TensorFlow starts
        assert message in (TESTS.parent / "hvdtrain/backends/tensorflow/params.py").read_text()
        return
    assert str(refused.value).startswith(message)


@pytest.mark.skipif(KERAS_ON_TORCH, reason="needs no framework")
def test_the_tests_that_are_named_exist():
    named = {test for tests in TESTED.values() for test in tests.values()}
    for file, _, name in (test.partition("::") for test in named):
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in body), name
    assert all(name in KEYS and GROUP[name] for tests in TESTED.values() for run in tests for name in words(run))
