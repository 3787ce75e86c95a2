"""How a flat bucket is summed over ranks; one file per way. `create` makes one from the configuration."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.config import Config

COMPRESSORS = {
    "none": ("none", "NoCompression"),
    "fp16": ("twoshot", "Fp16"),
    "bf16": ("twoshot", "Bf16"),
    "int8": ("twoshot", "Int8"),
    "topk": ("topk", "TopK"),
    "powersgd": ("powersgd", "PowerSGD"),
    "adasum": ("adasum", "Adasum"),
}
"""Name in the configuration -> (file of this folder, class). Each class has ``of(exchange)``, or takes nothing."""


def create(name: str, config: Config) -> Any:
    """The compressor ``name`` with the settings of ``config.exchange``."""
    file, kind = COMPRESSORS[name]
    cls: Any = getattr(importlib.import_module(f"hvdtrain.exchange.compressors.{file}"), kind)
    return cls.of(config.exchange) if hasattr(cls, "of") else cls()
