"""The names of ``horovod.tensorflow.functions``, for scripts that import them from there."""

from __future__ import annotations

from typing import Any

__all__ = "allgather_object broadcast_object broadcast_object_fn broadcast_variables".split()


def __getattr__(name: str) -> Any:
    """The name of `hvdtrain.tensorflow`, also where Horovod's module only uses it."""
    import hvdtrain.tensorflow

    if name not in hvdtrain.tensorflow.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(hvdtrain.tensorflow, name)


def __dir__() -> list[str]:
    return __all__
