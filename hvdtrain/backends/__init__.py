"""Decide which framework a model belongs to; one folder per framework, with the same file names in each.

Imports no framework. A backend's package offers ``make_parts``, ``Ops``, ``collectives``, ``stage``,
``in_host_memory``, ``device_facts``, ``adapt_data``, ``try_samples`` and ``loss_evaluator``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Transform

_KERAS = ("keras.src.models.model", "Model")
_ROOTS = {("torch.nn.modules.module", "Module"): "torch", ("hvdtrain.backends.numpy.model", "Model"): "numpy"}
BUILT_IN = {"torch": "torch_models.cnn:build", "tensorflow": "tf_models.cnn:build"}

TRANSFORMS = ("placement", "precision", "sync_batchnorm", "compile", "remat")
"""Files of each backend's ``transforms`` folder in the order of installation; a user's own come last."""


def framework_of(model: Any) -> str:
    """Return "torch", "tensorflow" or "numpy" from the classes of a model object; `UserError` for anything else.

    A `keras.Model` belongs to the framework that Keras computes with in this process.
    """
    for cls in type(model).__mro__:  # Keras first: on PyTorch its models are modules of PyTorch too
        name = (cls.__module__, cls.__name__)
        if name == _KERAS:
            return _of_keras()
        if name in _ROOTS:
            return _ROOTS[name]
    raise UserError(f"the model is a {type(model).__module__}.{type(model).__qualname__}",
                    "a torch.nn.Module or a keras.Model", "return one from the model's callable")


def keras_backend() -> str | None:
    """Return the backend of Keras, or None where Keras has not been imported; imports nothing."""
    config = getattr(sys.modules.get("keras"), "config", None)
    return None if config is None else str(config.backend())


def _of_keras() -> str:
    name = keras_backend() or "tensorflow"
    if name not in ("torch", "tensorflow"):
        raise UserError(f"Keras runs on its {name} backend", "tensorflow or torch",
                        "set KERAS_BACKEND to one of them before keras is imported (also in keras.json)")
    return name


def installed() -> list[str]:
    """Return the frameworks that could be imported, PyTorch first; imports none."""
    return [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name) is not None]


def built_in_model() -> str:
    """Return the built-in recipe's model for the first installed framework."""
    names = installed()
    if not names:
        raise UserError("neither torch nor tensorflow is installed", "one of them",
                        'run pip install "hvdtrain[torch]" or "hvdtrain[tensorflow]"; in a checkout, make setup')
    return BUILT_IN[names[0]]


def gradients_recorded() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which PyTorch, where it is imported, records gradients, also within `torch.no_grad`.

    Errors: `UserError` within `torch.inference_mode`, whose tensors take no part in a later backward.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "enable_grad"):
        return contextlib.nullcontext()
    if torch.is_inference_mode_enabled():
        raise UserError("fit inside torch.inference_mode(), where tensors have no gradient",
                        "a fit outside of it", "build the model and call fit outside of `with torch.inference_mode():`")
    return torch.enable_grad()


def load(framework: str) -> Any:
    """Import and return a backend's package."""
    return importlib.import_module(f"{__name__}.{framework}")


def in_order(**made: Transform | None) -> list[Transform]:
    """Return the built-in transforms that a model has, by name, in the order of `TRANSFORMS`."""
    assert set(made) <= set(TRANSFORMS), f"{sorted(set(made) - set(TRANSFORMS))} are not in TRANSFORMS"
    return [transform for name in TRANSFORMS if (transform := made.get(name)) is not None]


def imported() -> list[str]:
    """Return the frameworks that this process has imported already.

    Not TensorFlow where Keras computes with another: it serves then for reading data, and no model is built with it.
    """
    names = [name for name in ("torch", "tensorflow") if name in sys.modules]
    other = keras_backend() not in (None, "tensorflow")
    return [name for name in names if not (other and name == "tensorflow")]
