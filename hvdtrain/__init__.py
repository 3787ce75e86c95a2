"""hvdtrain: one trainer for PyTorch and TensorFlow/Keras under Horovod allreduce over MPI.

Importing this package does no work; the public names are loaded on first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hvdtrain.core import __version__
from hvdtrain.core.aliases import OldNames

if TYPE_CHECKING:
    from hvdtrain.cluster.run_function import run as run
    from hvdtrain.config import Config as Config
    from hvdtrain.config import Named as Named
    from hvdtrain.config import ScheduleConfig as Schedule
    from hvdtrain.core.errors import UserError as UserError
    from hvdtrain.engine.callbacks.base import Callback as Callback
    from hvdtrain.trainer import Trainer as Trainer

sys.meta_path.insert(0, OldNames())

__all__ = ["Callback", "Config", "Named", "Schedule", "Trainer", "UserError", "__version__", "run"]

_HOME = {
    "Callback": "hvdtrain.engine.callbacks.base",
    "Config": "hvdtrain.config",
    "Named": "hvdtrain.config",
    "Schedule": "hvdtrain.config",
    "Trainer": "hvdtrain.trainer",
    "UserError": "hvdtrain.core.errors",
    "run": "hvdtrain.cluster.run_function",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562), so that ``import hvdtrain`` stays free."""
    if name not in _HOME:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}; it has {sorted(_HOME)}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
