"""Layers of a model without its framework, and the layout of each kind's weights in PyTorch and in Keras.

Every move is a rearrangement of entries, the same to the bit there and back. Source: the documented weight shapes of
torch.nn and keras.layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight: its ``name``, unique in the whole model, its shape and dtype, and whether it is trained."""

    name: str
    shape: Shape
    dtype: str = "float32"
    trainable: bool = True


@dataclass(frozen=True)
class Layer:
    """A layer that has weights of its own.

    ``name``: its path with dots, as torch writes it ("conv_0.conv"). ``kind``: a key of `KINDS`, the same word in both
    frameworks. ``said``: its class there. ``weights``: by the name that the framework gives each within the layer
    ("in_proj_weight", "query/kernel"). ``facts``: settings that both frameworks' layers have, for remarks.
    """

    name: str
    kind: str
    said: str
    weights: dict[str, Weight]
    facts: dict[str, Any] = field(default_factory=dict)

    def own(self) -> str:
        """Return its weights with their shapes, for a message."""
        return ", ".join(f"{role} {weight.shape}" for role, weight in self.weights.items())


@dataclass(frozen=True)
class Model:
    """A model's layers in the order in which it was put together; ``draws``: whether it draws random numbers."""

    framework: str
    layers: tuple[Layer, ...]
    draws: bool = False

    def weights(self) -> dict[str, Weight]:
        return {weight.name: weight for layer in self.layers for weight in layer.weights.values()}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Model:
        """Undo `to_dict`."""
        layers = []
        for layer in plain["layers"]:
            weights = {role: Weight(**{**one, "shape": tuple(one["shape"])}) for role, one in layer["weights"].items()}
            layers.append(Layer(**{**layer, "weights": weights}))
        return cls(plain["framework"], tuple(layers), plain["draws"])


Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Ends:
    """The two layers of a pair, for moves that depend on their shapes; ``flat``: see `dense`."""

    torch: Layer
    keras: Layer
    flat: tuple[int, ...] = ()

    def keras_shape(self, role: str) -> tuple[int, ...]:
        return self.keras.weights[role].shape


Change = Callable[[Arrays, Ends], Arrays]


@dataclass(frozen=True)
class Move:
    """Weights that become one another: their names in either layer, both directions, and a description.

    ``exact``: every entry on one side is one entry of the other, so that optimizer state can follow.
    """

    torch: tuple[str, ...]
    keras: tuple[str, ...]
    forth: Change
    back: Change
    words: str = "as it is"
    exact: bool = True


def _same(torch: str, keras: str) -> Move:
    return Move((torch,), (keras,), lambda a, _: a, lambda a, _: a)


def _axes(torch: str, keras: str, order: tuple[int, ...], words: str) -> Move:
    """Return a transposition; ``order``: torch's axes in the order that Keras has them."""
    inverse = tuple(int(i) for i in np.argsort(order))
    return Move((torch,), (keras,), lambda a, _: [a[0].transpose(order)], lambda a, _: [a[0].transpose(inverse)], words)


def _dense() -> list[Move]:
    """Move (out, in) -> (in, out). Where torch flattened (C, ...) and Keras (..., C), ``ends.flat`` is (C, ...)."""
    def forth(a: Arrays, ends: Ends) -> Arrays:
        kernel = a[0]
        if ends.flat:
            kernel = np.moveaxis(kernel.reshape(len(kernel), *ends.flat), 1, -1).reshape(kernel.shape)
        return [kernel.T]

    def back(a: Arrays, ends: Ends) -> Arrays:
        kernel = a[0].T
        if ends.flat:
            last = kernel.reshape(len(kernel), *ends.flat[1:], ends.flat[0])
            kernel = np.moveaxis(last, -1, 1).reshape(kernel.shape)
        return [kernel]

    return [Move(("weight",), ("kernel",), forth, back, "(out, in) -> (in, out)"), _same("bias", "bias")]


_SPACE = {1: "W", 2: "H, W", 3: "D, H, W"}


def _conv(rank: int, transposed: bool) -> list[Move]:
    """Move (out, in, ...) -> (..., in, out); transposed convolutions have (in, out, ...) in torch."""
    order = (*range(2, rank + 2), 1, 0)
    a, b = ("in", "out") if transposed else ("out", "in")
    words = f"({a}, {b}, {_SPACE[rank]}) -> ({_SPACE[rank]}, {b}, {a})"
    return [_axes("weight", "kernel", order, words), _same("bias", "bias")]


def _depthwise(rank: int) -> list[Move]:
    """Move (in x m, 1, ...) -> (..., in, m): output i * m + j of torch is the j-th of input i."""
    def forth(a: Arrays, ends: Ends) -> Arrays:
        shape = ends.keras_shape("kernel")
        return [np.moveaxis(a[0].reshape(*shape[-2:], *a[0].shape[2:]), (0, 1), (-2, -1))]

    def back(a: Arrays, ends: Ends) -> Arrays:
        first = np.moveaxis(a[0], (-2, -1), (0, 1))
        return [first.reshape(-1, 1, *first.shape[2:])]

    words = f"(in x m, 1, {_SPACE[rank]}) -> ({_SPACE[rank]}, in, m)"
    return [Move(("weight",), ("kernel",), forth, back, words), _same("bias", "bias")]


def _attention() -> list[Move]:
    """Move one matrix for query, key and value with the heads in its rows -> three kernels (in, heads, size)."""
    parts = ("query", "key", "value")

    def forth(a: Arrays, ends: Ends) -> Arrays:
        thirds = np.split(a[0], 3) if len(a) == 1 else a
        return [w.T.reshape(ends.keras_shape(f"{p}/kernel")) for w, p in zip(thirds, parts)]

    def back(a: Arrays, ends: Ends) -> Arrays:
        rows = [w.reshape(w.shape[0], -1).T for w in a]
        return [np.concatenate(rows)] if "in_proj_weight" in ends.torch.weights else rows

    def forth_bias(a: Arrays, ends: Ends) -> Arrays:
        return [w.reshape(ends.keras_shape(f"{p}/bias")) for w, p in zip(np.split(a[0], 3), parts)]

    kernels, biases = tuple(f"{p}/kernel" for p in parts), tuple(f"{p}/bias" for p in parts)
    words = "(3 x heads x size, in) -> 3 of (in, heads, size)"
    return [
        Move(("in_proj_weight",), kernels, forth, back, words),
        Move(("q_proj_weight", "k_proj_weight", "v_proj_weight"), kernels, forth, back,
             "(heads x size, in) -> (in, heads, size)"),
        Move(("in_proj_bias",), biases, forth_bias, lambda a, _: [np.concatenate([w.reshape(-1) for w in a])],
             "(3 x heads x size,) -> 3 of (heads, size)"),
        Move(("out_proj.weight",), ("attention_output/kernel",),
             lambda a, ends: [a[0].T.reshape(ends.keras_shape("attention_output/kernel"))],
             lambda a, _: [a[0].reshape(-1, a[0].shape[-1]).T], "(out, heads x size) -> (heads, size, out)"),
        _same("out_proj.bias", "attention_output/bias"),
    ]


def _lstm() -> list[Move]:
    """Move gates i, f, g, o in both; torch has two biases that are added, Keras has one."""
    transpose: Change = lambda a, _: [a[0].T]  # noqa: E731
    return [
        Move(("weight_ih_l0",), ("kernel",), transpose, transpose, "(4 x out, in) -> (in, 4 x out)"),
        Move(("weight_hh_l0",), ("recurrent_kernel",), transpose, transpose, "(4 x out, out) -> (out, 4 x out)"),
        Move(("bias_ih_l0", "bias_hh_l0"), ("bias",), lambda a, _: [a[0] + a[1]],
             lambda a, _: [a[0], np.zeros_like(a[0])], "two biases -> their sum", exact=False),
    ]


def _gru() -> list[Move]:
    """Move gates r, z, n in torch to z, r, n in Keras, which has both biases too (reset_after)."""
    def swap(w: np.ndarray) -> np.ndarray:
        r, z, n = np.split(w, 3)
        return np.concatenate([z, r, n])

    def move(torch: str, keras: str) -> Move:
        return Move((torch,), (keras,), lambda a, _: [swap(a[0]).T], lambda a, _: [swap(a[0].T)],
                    "gates r, z, n -> z, r, n; transposed")

    return [
        move("weight_ih_l0", "kernel"), move("weight_hh_l0", "recurrent_kernel"),
        Move(("bias_ih_l0", "bias_hh_l0"), ("bias",), lambda a, _: [np.stack([swap(a[0]), swap(a[1])])],
             lambda a, _: [swap(a[0][0]), swap(a[0][1])], "gates r, z, n -> z, r, n; stacked"),
    ]


_NORM = [_same("weight", "gamma"), _same("bias", "beta")]
KINDS: dict[str, list[Move]] = {
    "dense": _dense(),
    "embedding": [_same("weight", "embeddings")],
    "layer norm": _NORM,
    "group norm": _NORM,
    "rms norm": [_same("weight", "scale")],
    "batch norm": [*_NORM, _same("running_mean", "moving_mean"), _same("running_var", "moving_variance")],
    "attention": _attention(),
    "lstm": _lstm(),
    "gru": _gru(),
    **{f"conv {n}d": _conv(n, False) for n in (1, 2, 3)},
    **{f"transposed conv {n}d": _conv(n, True) for n in (1, 2, 3)},
    **{f"depthwise conv {n}d": _depthwise(n) for n in (1, 2)},
}
"""The moves of each kind of layer. A layer of kind "own" keeps its weights as they are, by equal names."""


def moves(ends: Ends) -> list[Move]:
    """Return the moves of a pair; `UserError` where one side has a weight that the other lacks."""
    torch, keras = set(ends.torch.weights), set(ends.keras.weights)
    own = ends.keras.kind == "own"
    table = [_same(role, role) for role in sorted(torch | keras)] if own else KINDS[ends.keras.kind]
    chosen = [m for m in table if set(m.torch) <= torch and set(m.keras) <= keras]
    left = (torch - {r for m in chosen for r in m.torch}) | (keras - {r for m in chosen for r in m.keras})
    if left:
        raise UserError(f"{in_words(ends)}: {', '.join(sorted(left))} has no counterpart",
                        "the same weights on both sides",
                        "build both twins in the same way (bias, affine, scale and center are settings of layers)")
    return chosen


def in_words(ends: Ends) -> str:
    """Return names, classes and shapes of a pair, for a message."""
    return (f"{ends.torch.said} {ends.torch.name} ({ends.torch.own()}) and "
            f"{ends.keras.said} {ends.keras.name} ({ends.keras.own()})")


def apply(move: Move, ends: Ends, arrays: dict[str, np.ndarray], to: str) -> dict[str, np.ndarray]:
    """Return the weights of one move in framework ``to`` ("torch" or "keras"), by name in the model.

    ``arrays``: by name in the other model. Errors: `UserError` naming the pair where a shape does not come out.
    """
    torch, keras = [ends.torch.weights[r] for r in move.torch], [ends.keras.weights[r] for r in move.keras]
    given, wanted, change = (torch, keras, move.forth) if to == "keras" else (keras, torch, move.back)
    try:
        found = change([arrays[weight.name] for weight in given], ends)
        fits = [a.shape == weight.shape for a, weight in zip(found, wanted)]
    except (ValueError, IndexError):
        found, fits = [], [False]
    if len(found) != len(wanted) or not all(fits):
        got = ", ".join(str(a.shape) for a in found) or ", ".join(str(weight.shape) for weight in given)
        raise UserError(f"{in_words(ends)} do not match: {', '.join(move.torch)} {move.words} gives {got}",
                        ", ".join(str(weight.shape) for weight in wanted),
                        "build both twins with the same sizes (--model_args, --twin_args), or pair "
                        "layers with --pair")
    return {weight.name: np.ascontiguousarray(a).reshape(weight.shape) for a, weight in zip(found, wanted)}


def remark(ends: Ends) -> list[str]:
    """Return the settings of a pair that differ, or that mean something else in training."""
    ours: dict[str, Any] = ends.torch.facts
    theirs: dict[str, Any] = ends.keras.facts
    found = []
    for key in sorted(set(ours) & set(theirs)):
        if abs(float(ours[key]) - float(theirs[key])) > 1e-6 * abs(float(ours[key])):
            found.append(f"{key} of {ends.torch.name} is {ours[key]:g} in PyTorch and {theirs[key]:g} in Keras")
    return found
