"""Saved models back with a distributed optimizer. Saving needs nothing: a file names the plain optimizer.

Owns also the optimizer's state in HDF5 files, which Keras 3 writes and then loses: it builds the optimizer for no
variables, so that ``fit`` of the loaded model ends with "Unknown variable".
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.keras.optimizer import DistributedOptimizer, renewed
from hvdtrain.tensorflow import Compression


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: Any = Compression.none, legacy_opts: bool = False, **distributed: Any) -> Any:
    """Load a Keras model and make its optimizer distributed, with the state it was saved with.

    ``custom_optimizers``: optimizer classes of one's own. ``custom_objects``: as `keras.models.load_model` takes them.
    ``distributed``: further arguments of `DistributedOptimizer`. A model saved without an optimizer is returned as it
    is. A file knows no local layers: of a `PartialDistributedOptimizer`'s model name their variables again, by
    ``model.optimizer.register_local_var(variable)``, before it trains. ``legacy_opts``: Keras 3 has no legacy
    optimizers; True raises `UserError`.
    """
    if legacy_opts:
        raise UserError("legacy_opts=True", "False: Keras 3 has no legacy optimizers",
                        "leave it out, and save the model with an optimizer of keras.optimizers")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        return model
    if model.optimizer.built and not model.optimizer._trainable_variables and model.trainable_variables:
        model.optimizer = _rebuilt(model, filepath)
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


def _rebuilt(model: Any, filepath: Any) -> Any:
    """The optimizer of a model from an HDF5 file, built for its variables, with the state in the file."""
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group as saved

    if isinstance(filepath, h5py.File):
        values = [np.asarray(value) for value in saved(filepath)]
    else:
        with h5py.File(str(filepath), "r") as file:
            values = [np.asarray(value) for value in saved(file)]
    optimizer = renewed(model.optimizer)
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(model.trainable_variables)
    if [tuple(v.shape) for v in optimizer.variables] == [value.shape for value in values]:
        for variable, value in zip(optimizer.variables, values):
            variable.assign(value)
    else:
        warnings.warn(f"{filepath} holds the state of another optimizer than Keras 3's {type(optimizer).__name__}: it "
                      "starts anew", stacklevel=3)
    return optimizer
