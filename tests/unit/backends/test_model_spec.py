"""A model with what its file says about it, without any framework: the numpy reference's model stands for all."""

import sys
import types

import pytest

from hvdtrain import backends
from hvdtrain.backends.model_spec import build_spec, spec_of
from hvdtrain.backends.numpy.model import Model
from hvdtrain.core.errors import UserError

SOURCE = """
from hvdtrain.backends.numpy.model import Model
def build(width=4): return Model((3, width, 2))
def failing(width): raise ValueError(f"width {width} is odd")
def deep(): return _deeper()
def _deeper(): return len(None)
def number(): return 3
def task(model, batch): return 0.0, 1
def blocks(model): return []
weight = 3
"""


@pytest.fixture
def file(tmp_path):
    """Path of a model file, forgotten afterwards."""
    path = tmp_path / "net.py"
    path.write_text(SOURCE)
    before, paths = set(sys.modules), list(sys.path)
    yield str(path)
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if name.startswith("hvdtrain_user_"):
            del sys.modules[name]


def nothing():
    pass


def test_a_file_brings_its_functions(file):
    spec = build_spec(f"{file}:build", {"width": 5}, nothing)
    assert spec.framework == "numpy" and spec.name == f"{file}:build" and spec.model.params["w0"].shape == (3, 5)
    assert spec.task(None, None) == (0.0, 1) and spec.blocks(None) == []
    assert spec.weight is None and spec.metrics is None and spec.example is None  # weight is no function there


def test_prepare_runs_before_the_model_is_built(file):
    order = []
    build_spec(f"{file}:build", {}, lambda: order.append("prepare"))
    assert order == ["prepare"]


def test_a_builder_that_imports_its_framework_is_called_again(file, monkeypatch):
    """Its first weights came before the seed was set."""
    calls = []
    module = types.ModuleType("late_model")

    def build():
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        calls.append("build")
        return Model((2, 2))

    build.__module__ = "late_model"
    module.build = build
    monkeypatch.setitem(sys.modules, "late_model", module)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    build_spec("late_model:build", {}, lambda: calls.append("prepare"))
    assert calls == ["prepare", "build", "prepare", "build"]


@pytest.mark.parametrize("name, args, said", [
    ("build", {"wide": 1}, "does not take model_args {'wide': 1}"), ("failing", {"width": 3}, "width 3 is odd"),
    ("number", {}, "the model is a builtins.int"), ("biuld", {}, "did you mean 'build'")])
def test_what_a_user_can_mend(file, name, args, said):
    with pytest.raises(UserError, match=r".") as caught:
        build_spec(f"{file}:{name}", args, nothing)
    assert said in str(caught.value)


def test_a_bug_in_the_builder_keeps_its_traceback(file):
    with pytest.raises(TypeError, match="NoneType"):
        build_spec(f"{file}:deep", {}, nothing)


def test_a_model_object_brings_what_stands_beside_its_class(monkeypatch):
    module = types.ModuleType("users_script")
    own = type("Own", (Model,), {"__module__": "users_script"})
    module.Own, module.task = own, lambda model, batch: (1.0, 2)
    monkeypatch.setitem(sys.modules, "users_script", module)
    spec = spec_of(own((2, 2)))
    assert spec.name == "Own" and spec.framework == "numpy" and spec.task is module.task and spec.weight is None


@pytest.mark.parametrize("thing", [None, 3, "torch_models.cnn:build", object, Model])
def test_other_objects_are_refused(thing):
    with pytest.raises(UserError, match="a torch.nn.Module or a keras.Model"):
        backends.framework_of(thing)


def test_without_a_framework_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert backends.installed() == []
    with pytest.raises(UserError, match="neither torch nor tensorflow is installed"):
        backends.built_in_model()


def test_the_built_in_model_is_of_an_installed_framework(monkeypatch):
    for there in (["torch", "tensorflow"], ["tensorflow"]):
        monkeypatch.setattr(backends, "installed", lambda: there)
        assert (
            backends.built_in_model()
            == {"torch": "torch_models.cnn:build", "tensorflow": "tf_models.cnn:build"}[there[0]]
        )
