"""A checkpoint's model as one file of weights, under the names that the end of a training gives them.

Owns those names, which are the frameworks' own: of a PyTorch model its state_dict's, of a Keras model its variables'
paths. Imports no framework, so that weights can be had where none is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.checkpoint.tensors import Content, Layout, Spec, layout

FILE = "model.safetensors"
_BFLOAT16 = "#bfloat16"

Named = tuple[dict[str, str], dict[str, str]]
"""Names in a checkpoint by those in the model; for arrays that hold the bits of another type, its safetensors name."""


def named(model: Mapping[str, Spec], framework: str) -> Named:
    """Return what the arrays of a checkpoint's group "model" are called in ``framework``'s own model. Pure."""
    return _keras(model) if framework == "tensorflow" else _torch(model)


def write(content: Content, target: Path) -> int:
    """Write a checkpoint's weights, piece by piece, as the file ``target``, whole or not at all.

    Returns how many tensors they are. OSError.

    CheckpointError where ``target`` is there already.
    """
    specs = content.specs().get("model", {})
    places, codes = named(specs, str(content.meta.get("framework", "")))
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already", "a new name, so that nothing is overwritten",
                              "choose another name")
    plan = layout({name: specs[place] for name, place in places.items()}, "model", codes)
    put(plan, content.blocks("model", [places[name] for name in plan.names]), target)
    return len(places)


def put(plan: Layout, blocks: Iterable[memoryview], target: Path) -> None:
    """Write weights as the file ``target``, which appears, or is replaced, whole or not at all. OSError."""
    files.make_directories(target.parent)
    temp = files.make_temp(target.parent)
    try:
        files.write_durably(temp / FILE, plan.pieces(blocks))
        os.chmod(temp / FILE, 0o644)
        os.rename(temp / FILE, target)
        files.fsync_directory(target.parent)
    finally:
        files.remove_quietly(temp)


def _torch(model: Mapping[str, Spec]) -> Named:
    places = {name.removesuffix(_BFLOAT16): name for name in model}
    return places, {name: "BF16" for name, place in places.items() if place.endswith(_BFLOAT16)}


def _keras(model: Mapping[str, Spec]) -> Named:
    """00003/cnn/conv/kernel as cnn/conv/kernel; of paths that come several times the later ones with #1, #2."""
    places: dict[str, str] = {}
    for place in sorted(model):
        path = place.partition("/")[2]
        name, n = path, 1
        while name in places:
            name, n = f"{path}#{n}", n + 1
        places[name] = place
    # No variable of Keras is of whole numbers of 16 bits without a sign: they are bfloat16's bits.
    return places, {name: "BF16" for name, place in places.items() if model[place].dtype == np.uint16}
