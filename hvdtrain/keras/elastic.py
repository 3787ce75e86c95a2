"""Horovod's elastic API, left out on purpose: every name raises an error with the reason and the replacement."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Raise `hvdtrain.core.errors.UserError` for ``run``, ``KerasState`` and the rest."""
    if name.startswith("__"):
        raise AttributeError(name)
    from hvdtrain.cluster.horovod import no_elastic

    raise no_elastic()
