"""Keras 3 on its PyTorch backend: a `keras.Model` as a model of this project's PyTorch backend.

Owns what Keras does otherwise than PyTorch: where variables are kept, how layers learn whether they train, the loss
and metrics of ``model.compile``, its optimizer, its files. Everything else is `hvdtrain.backends.torch`. Importing
this package imports nothing; `maker` imports keras, which the model has imported.
"""

from __future__ import annotations

from typing import Any


def is_keras(model: Any) -> bool:
    """Whether ``model`` is a `keras.Model`; imports nothing, as there is none where Keras was not imported."""
    return any((c.__module__, c.__name__) == ("keras.src.models.model", "Model") for c in type(model).__mro__)


def maker(spec: Any, *args: Any, sample: Any = None, data: Any = None) -> Any:
    """A `hvdtrain.backends.torch.keras.create.KerasMaker` of these arguments, which are `Maker`'s.

    ``data``: the run's, which knows how nested inputs lie; ``sample``: see `hvdtrain.backends.keras.compiled.build`.
    """
    from hvdtrain.backends.keras.compiled import begin
    from hvdtrain.backends.torch.keras.create import KerasMaker

    begin(spec.model, data)
    return KerasMaker(spec, *args, sample=sample)  # type: ignore[misc]
