"""Keras' own file, SavedModels and ONNX files of a Keras model, loaded back and compared.

Keras writes them all. ONNX files and programs of Keras models on PyTorch are `hvdtrain.backends.torch.export`'s.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from hvdtrain.backends.exporting import Exportable, Outputs, refused, verdict, verified, wide
from hvdtrain.backends.keras import saving
from hvdtrain.backends.keras.metrics import inputs_of
from hvdtrain.backends.misfit import fixed_batch, reason
from hvdtrain.core.errors import UserError
from hvdtrain.data.layout import named_outputs


def keras_file(subject: Exportable, path: Path) -> str:
    """Write the .keras file; return what was verified. Errors: `UserError`. OSError."""
    model = subject.spec.model
    try:
        with saving.quiet():
            model.save(path)
    except OSError:
        raise
    except Exception as error:  # what layers of the user's raise
        raise UserError(f"Keras cannot describe the model in a file: {reason(error)}", "layers with get_config()",
                        "give the model's classes get_config(), or choose --format saved_model") from error
    try:
        with saving.quiet():
            loaded = keras.models.load_model(path, compile=False)
    except Exception as error:  # classes that Keras does not find by name
        said = reason(error).partition(". ")[0]
        return f"not verified: keras.models.load_model needs classes of the model file: {said}"
    own = sorted({f"{type(one).__module__}.{type(one).__name__}" for one in (model, *model._flatten_layers())
                  if not type(one).__module__.startswith("keras.")})
    more = f"; to load it import {', '.join(own)}" if own else ""
    return compared(subject, lambda x: loaded(x, training=False), "keras.models.load_model") + more


def saved_model(subject: Exportable, path: Path) -> str:
    """Write a SavedModel with the endpoint ``serve``; return what was verified. Errors: `UserError`. OSError."""
    import tensorflow as tf

    with saving.quiet():
        _export(subject, path, "tf_saved_model")
        loaded = tf.saved_model.load(str(path))
    takes = [spec.dtype for spec in tf.nest.flatten(loaded.serve.input_signature)]

    def run(x: Any) -> Any:
        casts = [tf.cast(tensor, dtype) for tensor, dtype in zip(tf.nest.flatten(x), takes)]
        return loaded.serve(tf.nest.pack_sequence_as(x, casts))

    return compared(subject, run, "tf.saved_model.load")


def onnx(subject: Exportable, path: Path) -> str:
    """Write an ONNX file where tf2onnx is installed; return what was verified. Errors: `UserError`. OSError."""
    if importlib.util.find_spec("tf2onnx") is None:
        raise UserError("--format onnx of a Keras model on TensorFlow needs tf2onnx, which is not installed",
                        "tf2onnx installed for this Python", "run `pip install tf2onnx`, or choose --format "
                        "saved_model")
    with saving.quiet():
        _export(subject, path, "onnx", **({"opset_version": subject.opset} if subject.opset else {}))
    return "not verified: compare the outputs in ONNX Runtime with those of python -m hvdtrain predict"


def _export(subject: Exportable, path: Path, kind: str, **more: Any) -> None:
    model = subject.spec.model
    if getattr(model, "inputs", None) is None:  # a subclass, which does not know the types of its inputs
        more["input_signature"] = [keras.tree.map_structure(_spec, inputs_of(model, subject.batch))]
    try:
        model.export(path, format=kind, verbose=False, **more)
    except OSError:
        raise
    except Exception as error:  # of any kind: the model's own code runs in it
        raise refused(error, f"Keras' export to {kind}") from error


def _spec(array: Any) -> keras.InputSpec:
    return keras.InputSpec(shape=(None, *array.shape[1:]), dtype=str(array.dtype))


def compared(subject: Exportable, run: Callable[[Any], Any], reader: str) -> str:
    """Compare what ``run(x)`` gives with the model's outputs, for two numbers of samples; return what was verified."""
    model = subject.spec.model
    x, numbers, worst = inputs_of(model, subject.batch), [len(subject.batch[0])], 0.0
    if not fixed_batch(model):
        numbers.append(1)
    for n in numbers:
        first = keras.tree.map_structure(lambda array: keras.ops.convert_to_tensor(array[:n]), x)
        worst = max(worst, verified(_arrays(run(first)), _arrays(model(first, training=False)), reader))
    return verdict(reader, numbers, worst)


def _arrays(found: Any) -> Outputs:
    return named_outputs(found, lambda tensor: wide(keras.ops.convert_to_numpy(tensor)))
