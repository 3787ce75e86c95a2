"""A checkpoint's model as one file of weights, under the names that the end of a training gives them.

Owns those names, which are the frameworks' own: of a PyTorch model its state_dict's, of a Keras model its variables'
paths. Imports no framework, so that weights can be had where none is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.tensors import layout

FILE = "model.safetensors"
_BFLOAT16 = "#bfloat16"

Named = tuple[dict[str, np.ndarray], dict[str, str]]
"""Arrays by name; for those that hold the bits of another type, its name in safetensors."""


def named(model: Mapping[str, np.ndarray], framework: str) -> Named:
    """Return the arrays of a checkpoint's group "model" under their names in ``framework``'s own model. Pure."""
    return _keras(model) if framework == "tensorflow" else _torch(model)


def write(snapshot: Snapshot, target: Path) -> int:
    """Write a snapshot's weights as the file ``target``, whole or not at all; return how many tensors. OSError.

    CheckpointError where ``target`` is there already.
    """
    arrays, codes = named(snapshot.tensors.get("model", {}), str(snapshot.meta.get("framework", "")))
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already", "a new name, so that nothing is overwritten",
                              "choose another name")
    files.make_directories(target.parent)
    temp = files.make_temp(target.parent)
    try:
        files.write_durably(temp / FILE, layout(arrays, "model", codes).pieces())
        os.chmod(temp / FILE, 0o644)
        os.rename(temp / FILE, target)
        files.fsync_directory(target.parent)
    finally:
        files.remove_quietly(temp)
    return len(arrays)


def _torch(model: Mapping[str, np.ndarray]) -> Named:
    arrays = {name.removesuffix(_BFLOAT16): array for name, array in model.items()}
    return arrays, {name.removesuffix(_BFLOAT16): "BF16" for name in model if name.endswith(_BFLOAT16)}


def _keras(model: Mapping[str, np.ndarray]) -> Named:
    """00003/cnn/conv/kernel as cnn/conv/kernel; of paths that come several times the later ones with #1, #2."""
    arrays: dict[str, np.ndarray] = {}
    for placed in sorted(model):
        path = placed.partition("/")[2]
        name, n = path, 1
        while name in arrays:
            name, n = f"{path}#{n}", n + 1
        arrays[name] = model[placed]
    # No variable of Keras is of whole numbers of 16 bits without a sign: they are bfloat16's bits.
    return arrays, {name: "BF16" for name, array in arrays.items() if array.dtype == np.uint16}
