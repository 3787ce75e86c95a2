"""Horovod's ``elastic``, which is left out: every name of it answers with the reason and with what replaces it."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Raise `hvdtrain.errors.UserError` for ``run``, ``TensorFlowKerasState`` and the rest."""
    if name.startswith("__"):
        raise AttributeError(name)
    from hvdtrain.tensorflow.left_out import no_elastic

    raise no_elastic()
