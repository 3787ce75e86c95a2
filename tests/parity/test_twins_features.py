"""Each twin, in both frameworks: recomputed, divided over ranks, cut over devices and over ranks, it has the curve of
one process.

Ranks are threads of this process. In Keras, pairs of `IN_KERAS`.
"""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import keras  # noqa: E402
from small_runs import config, fitted, lockstep  # noqa: E402

from hvdtrain.backends.torch import placement  # noqa: E402
from hvdtrain.config import DataParallelConfig, Named, PipelineConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

BASE = config(global_batch=8, max_steps=2, lr=0.05, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[])
TOKENS = {"vocab": 96, "context": 64, "width": 16, "depth": 1, "heads": 2}
TWINS = {
    "resnet": ("resnet.build", {"in_shape": (8, 8, 3), "width": 8, "depth": 1}),
    "bottleneck": ("resnet.deep", {"kind": "bottleneck", "depths": (1,), "in_shape": (4, 4, 3), "classes": 10,
                                   "norm": "group", "stem": "small"}),
    "wide_resnet": ("resnet.wide_resnet", {"in_shape": (4, 4, 3), "depth": 10, "widen": 1, "classes": 10,
                                           "norm": "group"}),
    "vit": ("vit.build", {"in_shape": (8, 8, 3), "patch": 4, "width": 16, "depth": 1, "heads": 2}),
    "bert": ("bert.build", TOKENS),
    "gpt": ("gpt.build", TOKENS),
    "bert-tied": ("bert.build", {**TOKENS, "tied": True}),
    "gpt-tied": ("gpt.build", {**TOKENS, "tied": True}),
    "lstm": ("lstm.build", {"features": 8, "width": 12}),
}
"""File and builder, and the arguments of small ones."""
FEATURES = {
    "remat": (1, {"remat": "every:1"}),
    "zero": (2, {"data_parallel": DataParallelConfig("zero", 2), "shares": [3, 1], "remat": "every:1"}),
    "device split": (1, {"model_parallel": 2, "split_micro_batches": 2}),
    "pipeline": (2, {"pipeline": PipelineConfig(2, micro_batches=2)}),
}
"""Ranks, and what is changed."""
CUTS = ("device split", "pipeline")
"""What tied weights refuse."""
IN_KERAS = [(name, "pipeline") for name in TWINS if not name.endswith("-tied")] + [
    (name, "zero") for name in ("resnet", "vit", "bert-tied", "gpt-tied", "lstm")]
"""Tracing graphs takes most of the time. Device splits come before TensorFlow starts (device_split_cases.py), remat
goes with zero, and zero sees a list of variables: tied ones, and one twin of each kind of layer."""


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Return runs make their directories there; this host's CPU stands for each of a PyTorch rank's devices."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(framework, name):
    """Return a twin with the same weights whenever it is made."""
    (file, _, builder), args = TWINS[name][0].partition("."), TWINS[name][1]
    if framework == "torch":
        torch.manual_seed(0)
        return getattr(importlib.import_module(f"torch_models.{file}"), builder)(**args)
    keras.utils.set_random_seed(0)
    return getattr(importlib.import_module(f"tf_models.{file}"), builder)(**args)


def samples(framework, name):
    """Two global batches; in PyTorch the last is short, for which TensorFlow would trace more graphs."""
    builder, args = TWINS[name]
    x, y = importlib.import_module(f"torch_models.{builder.partition('.')[0]}").example(
        14 if framework == "torch" else 16)
    if "in_shape" in args:
        x = x[:, :args["in_shape"][0], :args["in_shape"][1]]
    return (x[:, :4], y) if name == "lstm" else (x, y)  # graphs of each moment take long to trace


def trained(framework, name, size, **changes):
    """{name: array} of all ranks, and the runs."""
    runs = lockstep(size, replace(BASE, **changes), lambda rank: made(framework, name),
                    samples(framework, name), fitted)
    held = {}
    for run in runs:
        for path, array in run.parts.state.state()[0]["model"].items():
            path = re.sub(r"_\d+(?=[/_]|$)", "", path) if framework == "tensorflow" and "block" not in path else path
            assert path not in held or (held[path] == array).all(), path
            held[path] = array
    return held, runs


@functools.lru_cache(maxsize=None)
def alone(framework, name):
    """Return what one process trains, and begins with."""
    return trained(framework, name, 1)[0]


def took_hold(feature, runs):
    """Return whether the runs did what the test is about."""
    parts = [run.parts for run in runs]
    return {"remat": all(p.remat.chosen for p in parts), "device split": "split" in parts[0].describe(),
            "zero": all(p.remat.chosen and run.config.data_parallel.name == "zero" for p, run in zip(parts, runs)),
            "pipeline": all(p.layout is not None for p in parts)}[feature]


ALL = [("torch", name, feature) for name in TWINS for feature in FEATURES
       if not (name.endswith("-tied") and feature in CUTS)] + [("tensorflow", *pair) for pair in IN_KERAS]


@pytest.mark.parametrize(("framework", "name", "feature"), ALL)
def test_a_twin_has_the_training_trajectory_of_one_process(framework, name, feature):
    want, (size, changes) = alone(framework, name), FEATURES[feature]
    got, runs = trained(framework, name, size, **changes)
    assert took_hold(feature, runs)
    assert sorted(got) == sorted(want)
    for path, array in got.items():
        within = 1e-5 * max(0.1, np.abs(want[path]).max())
        np.testing.assert_allclose(array, want[path], rtol=1e-4, atol=within, err_msg=path)


@pytest.mark.parametrize(("framework", "feature"), [("torch", CUTS[0]), ("torch", CUTS[1]), ("tensorflow", CUTS[1])])
@pytest.mark.parametrize("name", ["bert-tied", "gpt-tied"])
def test_tied_weights_that_would_be_cut_apart_are_refused(framework, name, feature):
    size, changes = FEATURES[feature]
    with pytest.raises(UserError, match="blocks embed and head share"):
        trained(framework, name, size, **changes)
