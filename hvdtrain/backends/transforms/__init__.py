"""Order of the transforms, which change how a model computes for the time of a run; each backend has its own.

They are removed in the opposite order; a user's own come last.
"""

from __future__ import annotations

from hvdtrain.config import Config
from hvdtrain.core.protocols import Transform
from hvdtrain.core.resolve import load_callable

ORDER = ("placement", "precision", "sync_batchnorm", "compile", "remat")
"""Names of files in each backend's ``transforms`` folder."""


def in_order(**made: Transform | None) -> list[Transform]:
    """Return the built-in transforms that a model has, by name, in the written order."""
    assert set(made) <= set(ORDER), f"{sorted(set(made) - set(ORDER))} are not in transforms.ORDER"
    return [found for name in ORDER if (found := made.get(name)) is not None]


def own(config: Config) -> list[Transform]:
    """Return the user's transforms: each entry of ``config.transforms`` names a callable that makes one."""
    return [load_callable(text, "transforms")() for text in config.transforms]
