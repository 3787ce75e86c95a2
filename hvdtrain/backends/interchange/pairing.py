"""Pairs of layers of a PyTorch model and its Keras twin, and all their weights carried over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.backends.interchange import layers
from hvdtrain.backends.interchange.layers import Ends, Layer, Model, Move, Shape, Weight
from hvdtrain.core.errors import UserError, nearest

UNSUPPORTED = "unsupported: "
"""Beginning of the kind of a layer that cannot be converted; the reason follows."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of layers in torch's order, and ``how`` they were found."""

    ends: tuple[Ends, ...]
    how: str

    def moves(self) -> Iterator[tuple[Ends, Move, list[Weight]]]:
        """Yield every move with its pair, and the weights that it concerns on both sides."""
        for ends in self.ends:
            for move in layers.moves(ends):
                yield ends, move, [*(ends.torch.weights[r] for r in move.torch),
                                   *(ends.keras.weights[r] for r in move.keras)]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (weight in torch, weight in Keras, what changes) of every move, for a table."""
        return [(f"{ends.torch.name}: " + ", ".join(f"{r} {ends.torch.weights[r].shape}" for r in move.torch),
                 f"{ends.keras.name}: " + ", ".join(f"{r} {ends.keras.weights[r].shape}" for r in move.keras),
                 move.words + (f", flattened as {ends.flat}" if ends.flat and "kernel" in move.keras else ""))
                for ends, move, _ in self.moves()]


def pair(torch: Model, keras: Model, said: Mapping[str, str] | None = None,
         flats: Mapping[str, Shape] | None = None) -> Pairs:
    """Match the layers of two models.

    ``said``: torch layer -> Keras layer, which the user knows. ``flats``: torch Linear -> (C, ...), the shape that
    torch flattens channels first before it where Keras flattens channels last.
    Errors: `UserError` naming the first layers that do not belong together, or a layer that cannot be converted.
    """
    said, flats = dict(said or {}), dict(flats or {})
    for model, names in ((torch, [*said, *flats]), (keras, list(said.values()))):
        known = [layer.name for layer in model.layers]
        for name in names:
            if name not in known:
                raise UserError(f"the {model.framework} model has no layer {name!r} with weights",
                                nearest(name, known), "correct --pair or --flatten")
        for layer in model.layers:
            if layer.kind.startswith(UNSUPPORTED):
                why = layer.kind.removeprefix(UNSUPPORTED)
                raise UserError(f"{layer.said} {layer.name} is not converted: {why}",
                                f"layers of these kinds: {', '.join(sorted(layers.KINDS))}",
                                "convert such a layer by hand, or build both twins without it")
    matched, how = _match(torch, keras, said)
    ends = tuple(Ends(a, b, _flat(a, flats)) for a, b in matched)
    for one in ends:
        layers.moves(one)
    return Pairs(ends, how)


def carry(pairs: Pairs, arrays: Mapping[str, np.ndarray], to: str) -> dict[str, np.ndarray]:
    """Return all weights in framework ``to`` ("torch" or "keras") by name, from those of the other model.

    Errors: `UserError` naming the first pair whose shapes or dtypes do not fit.
    """
    out: dict[str, np.ndarray] = {}
    for ends, move, weights in pairs.moves():
        dtypes = {weight.dtype for weight in weights}
        if len(dtypes) > 1:
            raise UserError(f"{layers.in_words(ends)} are of different types: {', '.join(sorted(dtypes))}",
                            "the same dtype on both sides", "build both twins in the same type")
        out |= layers.apply(move, ends, dict(arrays), to)
    return out


def carry_moments(pairs: Pairs, moments: Mapping[str, np.ndarray], to: str) -> dict[str, np.ndarray]:
    """Do `carry` for what an optimizer keeps entry by entry of the trained weights; the others have none.

    Errors: `UserError` where a weight is trained in one twin only, or where its entries have no counterparts.
    """
    out: dict[str, np.ndarray] = {}
    for ends, move, weights in pairs.moves():
        trained = {weight.trainable for weight in weights}
        if trained == {False}:
            continue
        if trained != {True}:
            raise UserError(f"{layers.in_words(ends)}: only some of its weights are trained",
                            "the same weights trained in both twins", "freeze the same layers in both")
        if not move.exact:
            raise UserError(f"{layers.in_words(ends)}: {move.words}, which an update changes differently",
                            "weights with matching entries, for optimizer state",
                            "convert the weights alone: give a file as TARGET")
        out |= layers.apply(move, ends, dict(moments), to)
    return out


def hints(pairs: Pairs) -> list[str]:
    """Return what may be wrong where the outputs differ although all shapes fit."""
    found = [text for ends in pairs.ends for text in layers.remark(ends)]
    channels = 0
    for ends in pairs.ends:
        weight = ends.torch.weights.get("weight")
        if "conv" in ends.torch.kind and weight is not None:
            channels = weight.shape[1 if ends.torch.kind.startswith("transposed") else 0]
        elif ends.torch.kind == "dense" and channels and weight is not None:
            inputs, rest = weight.shape[1], weight.shape[1] // channels
            side = round(rest ** 0.5)
            if inputs % channels == 0 and rest > 1 and not ends.flat:
                shape = f"{channels},{side},{side}" if side * side == rest else f"{channels},H,W with H x W = {rest}"
                found.append(f"{ends.torch.name} has {inputs} = {channels} x {rest} inputs after convolutions: if the "
                             "PyTorch model flattens channels first (nn.Flatten on N, C, H, W), which its "
                             f"weights do not show, pass --flatten {ends.torch.name}={shape}")
            channels = 0
    if pairs.how != _BY_NAME:
        found.append(f"layers were matched {pairs.how}; --pair TORCH_LAYER=KERAS_LAYER pairs layers")
    return found


_BY_NAME = "by name"


def _match(torch: Model, keras: Model, said: Mapping[str, str]) -> tuple[list[tuple[Layer, Layer]], str]:
    """Return pairs of layers in torch's order, and how they were found."""
    theirs = {b.name: b for b in keras.layers}
    found = {name: theirs[other] for name, other in said.items()}
    left = [a for a in torch.layers if a.name not in said]
    right = [b for b in keras.layers if b.name not in said.values()]
    how = _BY_NAME
    if {a.name for a in left} == {b.name for b in right}:
        found |= {a.name: theirs[a.name] for a in left}
    else:
        how = "by kind and order"
        found |= _in_order(left, right)
    for a in torch.layers:
        if found[a.name].kind != _kind_there(a, [found[a.name]]):
            raise UserError(f"{layers.in_words(Ends(a, found[a.name]))}: {a.kind} and {found[a.name].kind}",
                            "layers of the same kind where names are equal",
                            "build both twins with the same layers, or say which belong together with --pair")
    return [(a, found[a.name]) for a in torch.layers], how + (" and --pair" if said else "")


def _in_order(left: list[Layer], right: list[Layer]) -> dict[str, Layer]:
    """Pair the k-th layers of each kind; `UserError` naming the first that has no counterpart."""
    rest = list(right)
    found: dict[str, Layer] = {}
    for a in left:
        match = next((b for b in rest if b.kind == _kind_there(a, right)), None)
        if match is None:
            raise _alone(a, "Keras", rest)
        rest.remove(match)
        found[a.name] = match
    if rest:
        raise _alone(rest[0], "torch", [])
    return found


def _kind_there(layer: Layer, keras: list[Layer]) -> str:
    """Return a torch layer's kind in Keras, which may have a depthwise convolution as one with groups."""
    known = {b.kind for b in keras}
    return layer.kind if layer.kind in known else layer.kind.removeprefix("depthwise ")


def _alone(layer: Layer, model: str, rest: list[Layer]) -> UserError:
    left = ", ".join(f"{b.said} {b.name}" for b in rest[:3])
    return UserError(f"{layer.said} {layer.name} ({layer.own()}) has no counterpart in the {model} model",
                     f"a layer of the kind {layer.kind} there" + (f", where {left} are left" if left else ""),
                     "build both twins with the same layers, or say which belong together with --pair")


def _flat(layer: Layer, flats: Mapping[str, Shape]) -> Shape:
    """Return the checked shape that ``--flatten`` gives a layer."""
    if layer.name not in flats:
        return ()
    shape, inputs = tuple(flats[layer.name]), layer.weights["weight"].shape[-1] if layer.kind == "dense" else 0
    if len(shape) < 2 or int(np.prod(shape)) != inputs:
        raise UserError(f"--flatten {layer.name}={','.join(map(str, shape))} for {layer.said} ({layer.own()})",
                        f"channels and sizes that multiply to its {inputs} inputs" if inputs else "a Linear layer",
                        "correct --flatten")
    return shape


def unfit(path: Path, why: object) -> UserError:
    """Return the error of a file of weights that does not match the model."""
    return UserError(f"{path} does not match the model: {' '.join(str(why).split())[:300]}",
                     "all weights of that model", "correct --model and --model_args")
