"""``hvdtrain.keras`` by Horovod's name, ``horovod.tensorflow.keras``, from which Keras' users import."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.keras import __all__


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"hvdtrain.tensorflow.keras.{name}")
    return getattr(importlib.import_module("hvdtrain.keras"), name)


def __dir__() -> list[str]:
    return __all__
