"""Names of a Keras model's variables that are the same in every process, and its final files.

Owns which of model.keras and model.weights.h5 is written besides model.safetensors. Backends put weights in place.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras

from hvdtrain.checkpoint import files
from hvdtrain.core.terminal import say

WHOLE, ONLY_WEIGHTS = "model.keras", "model.weights.h5"


def write(model: keras.Model, directory: Path) -> list[str]:
    """Write the model as Keras does; return the file's name, none if Keras can write neither of the two. OSError."""
    why = ""
    for name, save in ((WHOLE, model.save), (ONLY_WEIGHTS, model.save_weights)):
        try:
            with quiet(), files.replacing(directory / name) as place:
                save(place)
            return [name]
        except OSError:
            raise
        except Exception as error:  # what layers of the user's raise; model.safetensors has the weights
            (directory / name).unlink(missing_ok=True)  # of another run
            why = why or _words(error)
    say(f"note: {WHOLE} and {ONLY_WEIGHTS} are not written: {why}")
    return []


def left_out(model: keras.Model) -> str:
    """Return which file `write` will leave out and why, or ""; writes nothing and reads no weights but own ones."""
    def described() -> None:
        json.dumps(keras.saving.serialize_keras_object(model))

    whole = _problem(described)
    layers = [layer for layer in model._flatten_layers() if _saves_itself(layer)]
    tried = (_problem(partial(layer.save_own_variables, {})) for layer in layers)
    stored = next(filter(None, tried), "")
    if stored:
        return f"{WHOLE} and {ONLY_WEIGHTS} will not be written: {stored}; model.safetensors holds the weights"
    return f"{WHOLE} will not be written, only {ONLY_WEIGHTS}: {whole}" if whole else ""


def _saves_itself(layer: Any) -> bool:
    kind = type(layer)
    return not kind.__module__.startswith("keras.") and (
        kind.save_own_variables is not keras.layers.Layer.save_own_variables)


def _problem(work: Callable[[], None]) -> str:
    with quiet():
        try:
            work()
        except Exception as error:  # whatever layers of the user's raise
            return _words(error)
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of Keras and of layers from the output."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_COUNTED = re.compile(r"^(.*?)(?:_(\d+))?$")
"""A layer's name and the counter that Keras has put behind it; the first of a kind has none."""


def stable_names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable: its path, with Keras' counters begun at their least; all different, without
    dots.

    Keras numbers the layers of a process, not of a model: ``dense_7`` and ``dense_8`` are the first two of a model that
    is built late. Of layers of one parent whose names differ in such a number alone, the least loses it and the others
    count from there; where there is none or 0 already (conv_0), names stay. PyTorch reads dots as submodules.
    """
    least: dict[tuple[str, str], int] = {}
    paths = [variable.path.split("/") for variable in variables]
    for parts in paths:
        for depth, part in enumerate(parts):
            stem, number = _split(part)
            key = (_parent(parts, depth), stem)
            least[key] = min(number, least.get(key, number))
    names: list[str] = []
    for parts in paths:
        found = [_renumbered(p, least[_parent(parts, d), _split(p)[0]]) for d, p in enumerate(parts)]
        name, n = "/".join(found).replace(".", "_"), 1
        while name in names:
            n, name = n + 1, f"{name.partition('#')[0]}#{n + 1}"
        names.append(name)
    return names


def _parent(parts: list[str], depth: int) -> str:
    return "/".join(parts[:depth])


def _split(part: str) -> tuple[str, int]:
    """Return ("dense", 7) of dense_7, ("dense", 0) of dense."""
    found = _COUNTED.match(part)
    assert found is not None
    return found[1], int(found[2] or 0)


def _renumbered(part: str, least: int) -> str:
    stem, number = _split(part)
    if least == 0:
        return part
    return stem if number == least else f"{stem}_{number - least}"
