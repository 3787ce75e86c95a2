"""Law 3: one process, one framework; Horovod and mpi4py are imported in the named places only.

import-linter (setup.cfg, make lint) reads import statements; here are names that strings import. Then a run of each
framework in a fresh interpreter shows what it did import.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(hvdtrain.__file__).parent
KERAS = {"hvdtrain.keras", "hvdtrain.backends.keras", "hvdtrain.engine.keras_bridge",
         "hvdtrain.engine.keras_callback_state", "hvdtrain.data.layout",
         "hvdtrain.engine.keras_measured_weights", "hvdtrain.engine.keras_training_metrics"}
TRANSFORMS = {"hvdtrain.data.augment.library"}
"""Calls a transform that the user named, with the library that this transform is of."""
ALLOWED = {
    "horovod": {"hvdtrain.backends.torch.collectives", "hvdtrain.backends.tensorflow.collectives",
                "hvdtrain.cluster.horovod"},
    "mpi4py": {"hvdtrain.cluster", "hvdtrain.comm.collectives.mpi"},
    "torch": {"hvdtrain.backends.torch", "hvdtrain.torch", "hvdtrain.core.torchvision_parts", *TRANSFORMS},
    "tensorflow": {"hvdtrain.backends.tensorflow", "hvdtrain.tensorflow", *KERAS},
    "keras": {"hvdtrain.backends.tensorflow", "hvdtrain.backends.torch.keras", "hvdtrain.tensorflow",
              *KERAS, *TRANSFORMS},
}
"""Modules that may import a package, with all below them. keras and tensorflow: Horovod's APIs for users of these
frameworks; no run of PyTorch imports what imports TensorFlow there."""
IMPORTERS = ("import_module", "__import__")
"""Functions that import what a string names."""


def imports(source: str) -> set[str]:
    """Names that a source imports by ``import_module("name")`` or ``import_module(f"name.{x}")``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
                found |= {text for text in strings(node.args[0]) if text}
    return found


def strings(node: ast.expr) -> list[str]:
    """Return the constant beginning of a string expression."""
    if isinstance(node, ast.JoinedStr):
        return strings(node.values[0]) if node.values else []
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def allowed(module: str, package: str) -> bool:
    """Return whether ``module`` may import ``package``."""
    return any(module == place or module.startswith(f"{place}.") for place in ALLOWED[package])


def test_only_the_named_files_import_them_by_name():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 50
    wrong = [f"{where} imports {name}" for path in files for where in [module_of(path)]
             for name in imports(path.read_text(encoding="utf-8"))
             for package in [name.partition(".")[0]] if package in ALLOWED and not allowed(where, package)]
    assert not wrong


@pytest.mark.parametrize("source", [
    "import importlib\nimportlib.import_module('horovod.torch')",
    "from importlib import import_module\nimport_module(f'horovod.{name}')", "__import__('horovod')"])
def test_the_check_sees_every_way_to_import_by_name(source):
    assert {name.partition(".")[0] for name in imports(source)} >= {"horovod"}
    assert not allowed("hvdtrain.engine.loop", "horovod") and allowed("hvdtrain.cluster.horovod", "horovod")
    assert not allowed("hvdtrain.cluster.boot", "torch") and allowed("hvdtrain.cluster.control", "mpi4py")


SCRIPT = """
import gc, json, sys
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.config import CheckpointConfig
{model}
assert gc.isenabled()
x = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
y = np.arange(16) % 3
config = Config(global_batch=8, max_steps=2, progress="off", out={out!r}, checkpoint=CheckpointConfig(at_end=False))
result = Trainer(config).fit(model, ((x, y), (x, y)))
print(json.dumps({{"steps": result.steps, "tops": sorted({{name.partition(".")[0] for name in sys.modules}})}}))
{after}
"""
AFTER = {"torch": "", "tensorflow": """
import inspect
inspect.getmodule(type("Local", (), {}))  # looks at every module
assert "keras.wrappers" in sys.modules and "sklearn" not in sys.modules
assert "SKLearnClassifier" in dir(keras.wrappers) and not hasattr(keras.wrappers, "SKLearn")
from keras.wrappers import SKLearnRegressor
assert SKLearnRegressor.__module__ == "keras.src.wrappers.sklearn_wrapper"
"""}
"""Keras' wrappers import scikit-learn, and are there as soon as one is used."""
MODELS = {
    "torch": "import torch\nmodel = torch.nn.Linear(4, 3)",
    "tensorflow": "from hvdtrain.cluster import quiet\nquiet.watch_import()\nimport keras\n"
                  "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework, others", [("torch", {"tensorflow", "keras"}),
                                               ("tensorflow", {"torch", "sklearn"})])
def test_a_run_imports_its_own_framework_only(framework, others, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
           "PYTHONPATH": os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])}
    script = SCRIPT.format(model=MODELS[framework], after=AFTER[framework], out=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=env,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 2 and framework in told["tops"]
    assert not others.intersection(told["tops"])
    assert not {"horovod", "mpi4py"}.intersection(told["tops"]), "one process alone needs neither"
