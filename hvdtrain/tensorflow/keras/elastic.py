"""`hvdtrain.keras.elastic` by Horovod's name."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The name of `hvdtrain.keras.elastic`."""
    return getattr(importlib.import_module("hvdtrain.keras.elastic"), name)
