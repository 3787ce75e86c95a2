"""Framework of a Keras model: made-up modules replace Keras, no framework is imported."""

import sys
import types

import pytest

from hvdtrain import backends
from hvdtrain.core.errors import UserError

Module = type("Module", (), {"__module__": "torch.nn.modules.module"})
Model = type("Model", (Module,), {"__module__": "keras.src.models.model"})  # as Keras builds it on PyTorch


@pytest.fixture
def keras_on(monkeypatch):
    def install(backend):
        keras = types.ModuleType("keras")
        keras.config = types.SimpleNamespace(backend=lambda: backend)
        monkeypatch.setitem(sys.modules, "keras", keras)
    return install


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_keras_model_belongs_to_what_keras_computes_with(backend, keras_on):
    keras_on(backend)
    own = type("Own", (Model,), {})()
    assert backends.framework_of(own) == backends.framework_of(Model()) == backend
    assert backends.framework_of(Module()) == "torch", "a plain module of PyTorch beside it"


@pytest.mark.parametrize("backend", ["jax", "numpy", "openvino"])
def test_other_backends_are_refused_in_words(backend, keras_on):
    keras_on(backend)
    with pytest.raises(UserError, match=f"Keras runs on its {backend} backend; expected tensorflow or torch"):
        backends.framework_of(Model())


def test_nothing_is_imported_to_find_out(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert backends.keras_backend() is None and backends.framework_of(Model()) == "tensorflow"
    assert "keras" not in sys.modules


@pytest.mark.parametrize("backend, names", [(None, ["torch", "tensorflow"]), ("tensorflow", ["torch", "tensorflow"]),
                                            ("torch", ["torch"])])
def test_tensorflow_that_only_reads_data_is_not_prepared(backend, names, keras_on, monkeypatch):
    """It would refuse: Keras does not compute with it."""
    for name in ("torch", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    if backend:
        keras_on(backend)
    assert backends.imported() == names
