"""Write a checkpoint's model as one file of weights, under the names of the framework's own final model.

A PyTorch model's names are its state_dict's, a Keras model's its variables' paths. Imports no framework.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.adapters import key
from hvdtrain.checkpoint.frozen import group_of
from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.checkpoint.snapshot import OpenCheckpoint
from hvdtrain.checkpoint.tensors import Content, FileLayout, Spec, layout, read_header
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
        raise CheckpointError(f"{target} exists already", "a new name, so that nothing is overwritten",
                              "choose another name")
    plan = layout({name: specs[place] for name, place in places.items()}, "model", codes)
    wanted = [places[name] for name in plan.names]
    put(plan, (block for place in wanted for block in content.blocks(groups[place], [place])), target)
    return len(places)


def has_average(content: Content) -> bool:
    """Return whether a checkpoint holds a moving average of the weights."""
    return bool(content.specs().get(AVERAGES))


def arrays(content: OpenCheckpoint) -> dict[str, np.ndarray]:
    """Return a checkpoint's weights by its own names, their moving average in place of each that has one."""
    model = content.tensors["model"]
    found = {name: model[name] for name in model}
    if has_average(content):
        places, _ = named(content.specs()["model"], str(content.meta.get("framework", "")))
        for name, kept in _averages(content, places).items():
            place = places[name]
            found[place] = _narrowed(content.tensors[AVERAGES][kept], found[place].dtype)
    return found


def _narrowed(average: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an average in its weight's type, where uint16 stands for the bits of bfloat16, rounded to nearest even."""
    if dtype != np.uint16:
        return average.astype(dtype, copy=False)
    bits = np.ascontiguousarray(average, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def read(path: Path, own: Mapping[str, Spec], framework: str) -> dict[str, np.ndarray]:
    """Return the arrays of a final model's file `FILE` by a checkpoint's names; ``own``: those of the same model.

    Errors: `UserError` for a file that is none of that model. OSError.
    """
    from safetensors import safe_open

    header = read_header(path)
    with safe_open(str(path), "numpy") as file:
        shared: Mapping[str, str] = file.metadata() or {}  # names of tied weights -> the name in the file
    places, _ = named(own, framework)
    wanted = {place: shared.get(name, name) for name, place in places.items()}
    missing, more = sorted(set(wanted.values()) - set(header)), sorted(set(header) - set(wanted.values()))
    if missing or more:
        raise UserError(f"{path} lacks {missing[:3]} and also has {more[:3]}",
                        f"the {len(wanted)} tensors of the model", "correct --model and --model_args; for layers that "
                        "Keras has only numbered otherwise, give --checkpoint with a step, or name them")
    found: dict[str, np.ndarray] = {}
    for place, name in wanted.items():
        spec, begin = header[name]
        found[place] = np.fromfile(path, spec.dtype, math.prod(spec.shape), offset=begin).reshape(spec.shape)
    return found


def _averages(content: Content, places: Mapping[str, str]) -> dict[str, str]:
    """Return the arrays of averages by the names in the model, also for each name of tied weights."""
    if not has_average(content):
        raise CheckpointError("the checkpoint holds no moving average of the weights", "a checkpoint of a run with ema",
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
        if group_of(shard.group) == "model":
            check_finite({shard.name: shard.values}, trainable)


def check_finite(model: Mapping[str, np.ndarray], names: Collection[str]) -> None:
    """Raise `UserError` for an array that is not finite (NaN, if not in ``names`` of trainable parameters)."""
    for name, array in model.items():
        if not finite(name, array) and (plain_name(name) in names or has_nan(name, array)):
            raise UserError(f"parameter {name} is not finite", "finite weights",
                            "resume from the newest checkpoint; lower lr, set clip_norm or nan_guard: skip")
