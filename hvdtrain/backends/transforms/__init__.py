"""What changes how a model computes, in place and for the time of a run; the built-in ones are the backends'.

`ORDER` is the order in which they are installed; they are removed in the opposite one. A user's own come last. Each is
told what the one before it has left: a model is placed before its layers get compute types, and those before BatchNorm
takes its moments over ranks, in the type that a layer computes in. What is compiled is all of that, and what is
recomputed in backward is a block as it computes in the end, compiled or not.
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
