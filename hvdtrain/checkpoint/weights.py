"""Write a checkpoint's model as one file of weights, under the names of the framework's own final model.

A PyTorch model's names are its state_dict's, a Keras model's its variables' paths. Imports no framework.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.adapters import key
from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.checkpoint.tensors import Content, FileLayout, Spec, layout
from hvdtrain.core.comparison import finite, has_nan, plain_name
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Shard

FILE = "model.safetensors"
_BFLOAT16 = "#bfloat16"
AVERAGES = "ema"  # the group of `hvdtrain.engine.average`, which holds tensors under the names of parameters
Named = tuple[dict[str, str], dict[str, str]]
"""Names in a checkpoint by those in the model; for arrays that hold the bits of another type, its safetensors name."""


def named(model: Mapping[str, Spec], framework: str) -> Named:
    """Return the names of a checkpoint's group "model" in ``framework``'s own model. Pure."""
    return _keras(model) if framework == "tensorflow" else _torch(model)


def write(content: Content, target: Path, average: bool = False) -> int:
    """Write a checkpoint's weights as the file ``target``, atomically; return the number of tensors. OSError.

    ``average``: the moving average in place of each weight that has one, in float32 for a 16-bit weight.
    CheckpointError where ``target`` exists, or there is no average.
    """
    specs = dict(content.specs().get("model", {}))
    places, codes = named(specs, str(content.meta.get("framework", "")))
    groups = dict.fromkeys(specs, "model")
    if average:
        for name, kept in _averages(content, places).items():
            places[name], specs[kept], groups[kept] = kept, content.specs()[AVERAGES][kept], AVERAGES
            codes.pop(name, None)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already", "a new name, so that nothing is overwritten",
                              "choose another name")
    plan = layout({name: specs[place] for name, place in places.items()}, "model", codes)
    wanted = [places[name] for name in plan.names]
    put(plan, (block for place in wanted for block in content.blocks(groups[place], [place])), target)
    return len(places)


def has_average(content: Content) -> bool:
    """Return whether a checkpoint holds a moving average of the weights."""
    return bool(content.specs().get(AVERAGES))


def _averages(content: Content, places: Mapping[str, str]) -> dict[str, str]:
    """Return the arrays of averages by the names in the model, also for each name of tied weights."""
    if not has_average(content):
        raise CheckpointError("the checkpoint holds no moving average of the weights", "one of a run with ema",
                              "leave out --average")
    kept = {key(name): name for name in content.specs()[AVERAGES]}
    found = {name: kept[key(place.removesuffix(_BFLOAT16))] for name, place in places.items()
             if key(place.removesuffix(_BFLOAT16)) in kept}
    specs = content.specs()["model"]
    for name in places.keys() - found.keys():  # tied weights lie there under each of their names
        alike = (one for one in found if specs[places[one]] == specs[places[name]]
                 and _bytes(content, places[one]) == _bytes(content, places[name]))
        if one := next(alike, ""):
            found[name] = found[one]
    return found


def _bytes(content: Content, place: str) -> bytes:
    return b"".join(content.blocks("model", [place]))


def put(plan: FileLayout, blocks: Iterable[memoryview], target: Path) -> None:
    """Write weights as the file ``target`` atomically. OSError."""
    with files.replacing(target) as place:
        files.write_durably(place, plan.pieces(blocks))


def _torch(model: Mapping[str, Spec]) -> Named:
    places = {name.removesuffix(_BFLOAT16): name for name in model}
    bare = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in places}
    if len(set(bare.values())) == len(bare):  # a checkpoint of before 2026-11 has torch.compile's names
        places = {bare[name]: place for name, place in places.items()}
    return places, {name: "BF16" for name, place in places.items() if place.endswith(_BFLOAT16)}


def _keras(model: Mapping[str, Spec]) -> Named:
    """Map 00003/cnn/conv/kernel to cnn/conv/kernel; of repeated paths the later ones get #1, #2."""
    places: dict[str, str] = {}
    for place in sorted(model):
        path = place.partition("/")[2]
        name, n = path, 1
        while name in places:
            name, n = f"{path}#{n}", n + 1
        places[name] = place
    # No variable of Keras is of whole numbers of 16 bits without a sign: they are bfloat16's bits.
    return places, {name: "BF16" for name, place in places.items() if model[place].dtype == np.uint16}


def check_shards(shards: Sequence[Shard], trainable: Collection[str]) -> None:
    """Apply `check_finite` to the model's shards among ``shards``."""
    for shard in shards:
        if shard.group == "model":
            check_finite({shard.name: shard.values}, trainable)


def check_finite(model: Mapping[str, np.ndarray], names: Collection[str]) -> None:
    """Raise `UserError` for an array that is not finite (NaN, if not in ``names`` of trainable parameters)."""
    for name, array in model.items():
        if not finite(name, array) and (plain_name(name) in names or has_nan(name, array)):
            raise UserError(f"parameter {name} is not finite", "finite weights",
                            "go back to the newest checkpoint; lower lr, set clip_norm or nan_guard: skip")
