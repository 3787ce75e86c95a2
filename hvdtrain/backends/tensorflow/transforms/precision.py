"""Computing in 16 bits with Keras: the dtype policies of a model's layers, float32 for the loss.

Owns the layers' policies while a run uses the model. Variables and gradients stay float32: only a layer's
``compute_dtype`` changes, which Keras reads at each call. Keras' global policy stays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvdtrain.core.errors import UserError
from hvdtrain.parallel.precision import LONG, LossScale, Precision

_given: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The policies that layers had before a run changed them."""


class MixedPrecision:
    """Implements `hvdtrain.core.protocols.Transform`: the layers compute in this rank's own type.

    A model built under a policy of the user's keeps it with ``precision`` fp32. ``scale``: of float16 losses.
    """

    collective = False

    def __init__(self, precision: Precision, scale: LossScale) -> None:
        self._precision, self._scale = precision, scale
        self._words: dict[str, str] = {}
        self._vanishing = False

    def install(self, model: keras.Model, blocks: Sequence[Any] = ()) -> None:
        """Change the layers' policies; `UserError` for variables that are not float32."""
        compute_in(model, self._precision.own)
        self._words = remarks(model)
        narrow = any(layer.compute_dtype == "float16" for layer in model._flatten_layers())
        self._vanishing = narrow and self._precision.own != "fp16"

    def remove(self, model: keras.Model) -> None:
        give_back(model)

    def as_built(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return `own_types` of ``model``, for what writes it down during a run."""
        return own_types(model)

    def describe(self) -> dict[str, str]:
        return {**self._precision.describe(), **self._words, **self._scale.describe()}

    def caveats(self) -> list[str]:
        found = ["layers compute in float16 without loss scaling: small gradients may vanish"]
        return found * self._vanishing + self._precision.caveats()


def compute_in(model: keras.Model, own: str) -> None:
    """Let built ``model`` compute in ``own`` ("fp32": its own types); `UserError` for variables not float32."""
    _swap(model)
    if own == "fp32":
        return
    other = {str(keras.backend.standardize_dtype(v.dtype)) for v in model.trainable_variables} - {"float32"}
    if other:
        raise UserError(f"precision {own} with variables of {min(other)}", "float32 variables, which "
                        "keep their type", "build the model in float32, or set precision: fp32 for the model's own "
                                           "types")
    policy = keras.DTypePolicy(f"mixed_{LONG[own]}")
    for layer in _followers(model):
        _given[layer] = layer.dtype_policy
        layer.dtype_policy = policy


def give_back(model: keras.Model) -> None:
    """Undo `compute_in`, and forget the graphs that Keras traced meanwhile (a callback's ``model.predict``)."""
    if _swap(model):
        model.train_function = model.test_function = model.predict_function = None


def remarks(model: keras.Model) -> dict[str, str]:
    """Return, for the summary, layers with weights that stay in float32 in a model whose others compute in 16 bits."""
    given = [layer for layer in model._flatten_layers() if layer in _given]
    stay = [layer.path or layer.name for layer in model._flatten_layers()
            if layer not in _given and layer._trainable_variables and layer.compute_dtype == "float32"]
    return {"float32 layers": ", ".join(stay)} if given and stay else {}


@contextlib.contextmanager
def own_types(model: keras.Model) -> Iterator[None]:
    """Restore the policies for the body, which writes the model down: it shall read back as it was built."""
    changed = _swap(model)
    try:
        yield
    finally:
        for layer, policy in changed.items():
            _given[layer] = layer.dtype_policy
            layer.dtype_policy = policy


def _swap(model: keras.Model) -> dict[Any, Any]:
    """Give layers back the policies they had before a run; return the run's, by layer."""
    changed = {}
    for layer in model._flatten_layers():
        if layer in _given:
            changed[layer] = layer.dtype_policy
            layer.dtype_policy = _given.pop(layer)
    return changed


def _followers(model: keras.Model) -> list[Any]:
    """Return the layers that compute in the run's type.

    If some are of mixed precision by the user's doing: those. Else the layers that were built without a dtype of their
    own, which hold the policy object that the model holds; a softmax with ``dtype="float32"`` stays so. In a model that
    was loaded from a file no layer with weights holds that object: there all follow.
    """
    plain = [layer for layer in model._flatten_layers() if type(layer.dtype_policy) is keras.DTypePolicy
             and layer.variable_dtype == "float32"]
    mixed = [layer for layer in plain if layer.compute_dtype != layer.variable_dtype]
    alike = [layer for layer in plain if layer.dtype_policy is model.dtype_policy]
    return mixed or (alike if any(layer._trainable_variables for layer in alike) else plain)
