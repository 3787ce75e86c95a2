"""A Keras model and its optimizer for `hvdtrain.commands.convert`: layers, arrays, outputs, files, state by slot.

Owns the reading and writing of Keras' own objects. Conversion to PyTorch is decided in numpy, in that package.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.interchange import rule as rules
from hvdtrain.backends.interchange.layers import Layer, Model, Weight
from hvdtrain.backends.interchange.pairing import UNSUPPORTED, unfit
from hvdtrain.backends.interchange.rule import KERAS_SLOTS, Rule, Slots
from hvdtrain.backends.tensorflow import placement, state
from hvdtrain.backends.tensorflow.optim import WarmUp
from hvdtrain.core.errors import UserError

_LAYERS = keras.layers
_KINDS: tuple[tuple[Any, str], ...] = (
    (_LAYERS.DepthwiseConv1D, "depthwise conv 1d"), (_LAYERS.DepthwiseConv2D, "depthwise conv 2d"),
    (_LAYERS.Conv1DTranspose, "transposed conv 1d"), (_LAYERS.Conv2DTranspose, "transposed conv 2d"),
    (_LAYERS.Conv3DTranspose, "transposed conv 3d"),
    ((_LAYERS.SeparableConv1D, _LAYERS.SeparableConv2D), UNSUPPORTED + "it is two layers in PyTorch"),
    (_LAYERS.Conv1D, "conv 1d"), (_LAYERS.Conv2D, "conv 2d"), (_LAYERS.Conv3D, "conv 3d"),
    (_LAYERS.Dense, "dense"), (_LAYERS.Embedding, "embedding"), (_LAYERS.LayerNormalization, "layer norm"),
    (_LAYERS.GroupNormalization, "group norm"), (_LAYERS.RMSNormalization, "rms norm"),
    (_LAYERS.BatchNormalization, "batch norm"), (_LAYERS.MultiHeadAttention, "attention"),
    (_LAYERS.Bidirectional, UNSUPPORTED + "two directions in one layer"),
    (_LAYERS.LSTM, "lstm"), (_LAYERS.GRU, "gru"),
)
_WHOLE = (_LAYERS.MultiHeadAttention, _LAYERS.RNN, _LAYERS.Bidirectional)
"""Layers that are converted with all that is in them."""


def describe(model: keras.Model) -> Model:
    """Return the model's layers that have weights, in the order in which it was built; a shared weight once."""
    names, trained = _names(model), {id(v) for v in model.trainable_variables}
    layers: list[Layer] = []
    seen: set[int] = set()
    taken: set[str] = set()
    for layer in _walk(model):
        deep = isinstance(layer, _WHOLE)
        own = layer.weights if deep else [*layer._trainable_variables, *layer._non_trainable_variables]
        own = [v for v in own if id(v) in names and id(v) not in seen]
        if not own:
            continue
        seen |= {id(v) for v in own}
        weights = {_role(layer, v): Weight(names[id(v)], tuple(v.shape), keras.backend.standardize_dtype(v.dtype),
                                           id(v) in trained) for v in own}
        name, n = _layer_name(model, layer, own[0]), 1
        while name in taken:
            n, name = n + 1, f"{_layer_name(model, layer, own[0])}#{n + 1}"
        taken.add(name)
        layers.append(Layer(name, _kind(layer), type(layer).__name__, weights, _facts(layer)))
    return Model("tensorflow", tuple(layers), bool(state.seed_states(model)))


def _walk(layer: Any) -> Iterator[Any]:
    """Yield a layer and all in it, each before what is in it; layers of `_WHOLE` are not opened."""
    yield layer
    if not isinstance(layer, _WHOLE):
        for inner in layer._layers:
            yield from _walk(inner)


def _names(model: keras.Model) -> dict[int, str]:
    """Return the name of every weight by its identity, as `state.ModelState.export` writes it."""
    return {id(v): name for v, name in zip(model.weights, state.export_names(model.weights))}


def _role(layer: Any, variable: Any) -> str:
    parts = variable.path.split("/")
    return "/".join(parts[-2:]) if isinstance(layer, _LAYERS.MultiHeadAttention) else parts[-1]


def _layer_name(model: keras.Model, layer: Any, variable: Any) -> str:
    parts = variable.path.split("/")[:-2 if isinstance(layer, _WHOLE) else -1]
    return ".".join(parts[1:] if parts and parts[0] == model.name else parts)


def _kind(layer: Any) -> str:
    """Return the layer's kind, one of `hvdtrain.backends.interchange.layers.KINDS`."""
    if isinstance(layer, _LAYERS.EinsumDense):
        given, kernel, out = layer.equation.replace("->", ",").replace(" ", "").split(",")
        plain = len(kernel) == 2 and given.endswith(kernel[0]) and out == given[:-1] + kernel[1]
        return "dense" if plain else UNSUPPORTED + f"equation {layer.equation} has no layer in PyTorch"
    if isinstance(layer, _LAYERS.GRU) and not layer.reset_after:
        return UNSUPPORTED + "reset_after=False has no counterpart in PyTorch"
    return next((kind for cls, kind in _KINDS if isinstance(layer, cls)), "own")


def _facts(layer: Any) -> dict[str, float]:
    """Return settings that the twin has too; BatchNorm's momentum is the share of the old value in Keras."""
    found = {"epsilon": getattr(layer, "epsilon", None)}
    if isinstance(layer, _LAYERS.BatchNormalization):
        found["the momentum of moving statistics"] = layer.momentum
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}


def arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return every weight by name; bfloat16 as its bits."""
    names = _names(model)
    return {names[id(v)]: state.to_numpy(v) for v in model.weights}


def assign(model: keras.Model, given: dict[str, np.ndarray]) -> None:
    """Copy arrays of `arrays`' form into the model."""
    names = _names(model)
    for variable in model.weights:
        if names[id(variable)] in given:
            state.assign(variable, given[names[id(variable)]])


def outputs(model: keras.Model, x: list[np.ndarray]) -> list[np.ndarray]:
    """Return the model's outputs in inference mode, float32, in order."""
    found = model(x[0] if len(x) == 1 else x, training=False)
    return [np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(t, "float32"))) for t in keras.tree.flatten(found)]


def input_shapes(model: keras.Model) -> list[tuple[tuple[int, ...], str]]:
    """Return (shape of one sample, dtype) of each input of a model that knows them; [] if a size is open."""
    try:
        known = [(tuple(t.shape[1:]), keras.backend.standardize_dtype(t.dtype)) for t in model.inputs or ()]
    except (AttributeError, ValueError):
        return []
    return known if all(None not in shape for shape, _ in known) else []


def read_file(model: keras.Model, path: Path) -> None:
    """Load .keras (weights alone, no code), .weights.h5 or .safetensors; `UserError` naming what does not fit."""
    if path.suffix == ".safetensors":
        _read_safetensors(model, path)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_weights(str(path))
    except Exception as error:  # Keras, h5py and zipfile each have their own
        raise unfit(path, error) from None


def _read_safetensors(model: keras.Model, path: Path) -> None:
    """Read the file that a run exports: every weight by its path."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(str(path))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise unfit(path, error) from None
    own = arrays(model)
    missing, extra = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    if missing or extra:
        raise unfit(path, f"it lacks {missing[:3]} and also has {extra[:3]}")
    wrong = next((name for name in own if own[name].shape != found[name].shape), None)
    if wrong:
        raise unfit(path, f"{wrong} has shape {found[wrong].shape} there and {own[wrong].shape} in the model")
    assign(model, found)


def write_file(model: keras.Model, path: Path) -> None:
    """Write .safetensors, .weights.h5 or .keras, by the file's ending."""
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({name: np.array(a, order="C") for name, a in arrays(model).items()}, str(path))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save(path) if path.suffix == ".keras" else model.save_weights(path)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise UserError(f"Keras cannot write {path.name}: {' '.join(str(error).split())[:300]}",
                            "a model whose class has get_config", "give a TARGET that ends in .weights.h5") from None


def own_optimizer(parts: Any) -> Any:
    return parts.optimizer.own


def scheduled(parts: Any) -> str:
    """Return the name of a schedule that the optimizer was compiled with; warm-up is none."""
    held = own_optimizer(parts)._learning_rate
    while isinstance(held, WarmUp):
        held = held.base
    return type(held).__name__ if callable(held) else ""


def compiled_loss(model: keras.Model) -> str:
    """Return the description of the loss that a model was compiled with."""
    loss = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    return "" if loss is None else f"loss {loss if isinstance(loss, str) else getattr(loss, 'name', 'of its own')}"


def optimizer(parts: Any) -> tuple[Rule, Slots]:
    """Return the rule of a run's optimizer, and its state by slot and weight in PyTorch's convention."""
    own, base_lr = own_optimizer(parts), _as_written(parts.state.state()[1]["base_lr"])
    held = own._learning_rate
    lr = base_lr if callable(held) or np.float32(base_lr) == np.float32(float(held)) else _as_written(float(held))
    rate = lr if np.float32(lr) == np.float32(parts.optimizer.learning_rate()) else parts.optimizer.learning_rate()
    rule = rules.from_keras(type(own).__name__, own.get_config(), base_lr, lr, rate, int(own.iterations))
    names = _names(parts.model)
    slots: Slots = {}
    for slot in rule.slots():
        found = {names[id(v)]: state.to_numpy(kept) for v, kept in
                 zip(parts.model.trainable_variables, getattr(own, KERAS_SLOTS[slot]))}
        slots[slot] = rules.buffer(rule, found) if slot == "momentum" else found
    return rule, slots


def _as_written(rate: float) -> float:
    """Return a rate that was stored as float32, such as 0.009999999776, as its owner wrote it: 0.01."""
    return float(str(np.float32(rate))) if float(np.float32(rate)) == rate else rate


def state_of(parts: Any, rule: Rule, slots: Slots) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Return the arguments of ``parts.state.load`` for this rule and its slots."""
    groups, rest = parts.state.state()
    own, names = own_optimizer(parts), _names(parts.model)
    place = {id(v): name for name, v in state.named(own.variables).items()}
    held = dict(groups["optimizer"])
    held[place[id(own.iterations)]] = np.array(rule.updates, np.int64)
    if not callable(own._learning_rate):
        held[place[id(own._learning_rate)]] = np.array(rule.lr, np.float32)
    for slot, of in slots.items():
        given = rules.velocity(rule, of) if slot == "momentum" else of
        for variable, kept in zip(parts.model.trainable_variables, getattr(own, KERAS_SLOTS[slot])):
            held[place[id(kept)]] = given[names[id(variable)]]
    return {**groups, "optimizer": held}, {**rest, "base_lr": rule.base_lr}


def fresh_generators(model: keras.Model, seed: int, rank: int) -> dict[str, np.ndarray]:
    """Return the generators of a rank at the start of a run."""
    placement.seed(seed, rank)
    states = state.seed_states(model)
    before = {name: variable.numpy() for name, variable in states.items()}
    placement.seed_model(states, rank)
    found = state.random_arrays(model)
    for name, variable in states.items():
        variable.assign(before[name])
    return found
