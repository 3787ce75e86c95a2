"""Write the final files of a Keras model besides model.safetensors: model.keras, or model.weights.h5.

Owns which of the two is written and why. Weights are put in place by the backends.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras

from hvdtrain.checkpoint import files
from hvdtrain.core.terminal import say

WHOLE, ONLY_WEIGHTS = "model.keras", "model.weights.h5"


def write(model: keras.Model, directory: Path) -> list[str]:
    """Write the model as Keras does; return the file's name, none where Keras can write neither of the two. OSError."""
    why = ""
    for name, save in ((WHOLE, model.save), (ONLY_WEIGHTS, model.save_weights)):
        try:
            with _quiet(), files.replacing(directory / name) as place:
                save(place)
            return [name]
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  (what layers of the user's raise; model.safetensors has the weights)
            (directory / name).unlink(missing_ok=True)  # of another run
            why = why or _words(error)
    say(f"note: {WHOLE} and {ONLY_WEIGHTS} are left out: {why}")
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
        return f"{WHOLE} and {ONLY_WEIGHTS} will be left out: {stored}; model.safetensors holds the weights"
    return f"{WHOLE} will be left out, and {ONLY_WEIGHTS} written: {whole}" if whole else ""


def _saves_itself(layer: Any) -> bool:
    kind = type(layer)
    return not kind.__module__.startswith("keras.") and (
        kind.save_own_variables is not keras.layers.Layer.save_own_variables)


def _problem(work: Callable[[], None]) -> str:
    with _quiet():
        try:
            work()
        except Exception as error:  # noqa: BLE001  (whatever layers of the user's raise)
            return _words(error)
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
