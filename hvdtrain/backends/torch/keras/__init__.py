"""Keras 3 on its PyTorch backend: a `keras.Model` as a model of this project's PyTorch backend.

Owns what Keras does otherwise than PyTorch. Importing this package imports nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def is_keras(model: Any) -> bool:
    """Return whether ``model`` is a `keras.Model`; imports nothing."""
    return any((c.__module__, c.__name__) == ("keras.src.models.model", "Model") for c in type(model).__mro__)


def maker(spec: Any, *args: Any, sample: Any = None, data: Any = None) -> Any:
    """Return a `hvdtrain.backends.torch.keras.create.KerasMaker` of these arguments, which are `Maker`'s.

    ``data``: the run's, with the structure of nested inputs; ``sample``: see `hvdtrain.backends.keras.compiled.build`.
    """
    from hvdtrain.backends.keras.compiled import begin
    from hvdtrain.backends.torch.keras.create import KerasMaker

    begin(spec.model, data)
    return KerasMaker(spec, *args, sample=sample)  # type: ignore[misc]


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Hide TensorFlow from Keras within the body, unless this process has imported TensorFlow already (law 3).

    Keras asks whether a model, a loss or a copy of one is TensorFlow's, and imports TensorFlow for the question.
    """
    from keras.src.utils import module_utils

    lazy = module_utils.tensorflow
    available = lazy._available
    if "tensorflow" not in sys.modules:
        lazy._available = False
    try:
        yield
    finally:
        lazy._available = available
