"""`hvdtrain.keras.callbacks` by Horovod's name."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.keras.callbacks import __all__


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("hvdtrain.keras.callbacks"), name)


def __dir__() -> list[str]:
    return __all__
