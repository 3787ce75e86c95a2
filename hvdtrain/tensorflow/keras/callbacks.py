"""`hvdtrain.keras.callbacks` by Horovod's name."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.keras.callbacks import __all__  # noqa: F401 what `from ... import *` takes


def __getattr__(name: str) -> Any:
    """The name of `hvdtrain.keras.callbacks`."""
    return getattr(importlib.import_module("hvdtrain.keras.callbacks"), name)
