"""Choose a run's blocks to recompute, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.config.remat import WORDS, wanted
from hvdtrain.core.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run


def settle(run: Run, backend: Any) -> None:
    """Have the model of this rank recompute the blocks that the configuration asks for. Not collective.

    Errors: `UserError` for names that the model does not have, and for a block that cannot be recomputed exactly.
    """
    text, remat = run.config.remat, run.parts.remat
    of_keras = any(cls.__module__.startswith("keras.") for cls in type(run.spec.model).__mro__)
    if of_keras and run.spec.framework == "torch":
        _refuse_keras(text)
    names = wanted(text, [] if remat is None else remat.names)
    if remat is None or not names:
        return
    for name in names:
        why = remat.refusal(name)
        if why:
            raise UserError(f"remat: block {name} cannot be recomputed exactly: {why}", "blocks without that",
                            "leave it out of remat, or set remat: auto, which does")
    remat.choose(names)


def _refuse_keras(text: str | list[str]) -> None:
    """Raise `UserError` for blocks of a Keras model that PyTorch computes: its seed generators are Keras' own."""
    if text not in WORDS:
        raise UserError(f"remat is {text!r} with a Keras model on PyTorch",
                        "a model of PyTorch's own, or Keras on TensorFlow",
                        "set remat: off, or KERAS_BACKEND=tensorflow")
