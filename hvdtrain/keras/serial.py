"""Saved models back with a distributed optimizer. Saving needs nothing: a file names the plain optimizer."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import UserError
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.tensorflow import Compression


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: Any = Compression.none, legacy_opts: bool = False, **distributed: Any) -> Any:
    """Load a Keras model and make its optimizer distributed, with the state it was saved with.

    ``custom_optimizers``: optimizer classes of one's own. ``custom_objects``: as `keras.models.load_model` takes them.
    ``distributed``: further arguments of `DistributedOptimizer`. A model saved without an optimizer is returned as it
    is. ``legacy_opts``: Keras 3 has no legacy optimizers; True raises `UserError`.
    """
    if legacy_opts:
        raise UserError("legacy_opts=True", "False: Keras 3 has no legacy optimizers",
                        "leave it out, and save the model with an optimizer of keras.optimizers")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        return model
    optimizer = DistributedOptimizer(model.optimizer, compression=compression, **distributed)
    compiled = getattr(model, "_compile_config", None)
    if compiled is None:
        model.optimizer = optimizer
        return model
    arguments = {**compiled.config, "optimizer": optimizer}
    if arguments.get("jit_compile"):
        arguments["jit_compile"] = "auto"
    model.compile(**arguments)
    return model
