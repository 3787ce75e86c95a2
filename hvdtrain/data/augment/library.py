"""Apply a transform of torchvision v2 or a layer of Keras to single pictures, seeded by the sample.

Owns how a user's ``module:callable`` becomes such a transform, and its random numbers. Imports a library only where the
user's transform has done so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.augment.draw import Uniform
from hvdtrain.data.workers.worker import generators_kept, reseed

Function = Callable[[np.ndarray, Any, Uniform], np.ndarray]


class TorchTransform:
    """A transform of torchvision v2, or another callable of PyTorch: from a tensor (C, H, W) to the same."""

    draws = True
    """Whether random numbers come from generators of the process."""

    def __init__(self, transform: Callable[[Any], Any], name: str) -> None:
        self._transform, self._name = transform, name

    def __call__(self, x: np.ndarray, value: Any, uniform: Uniform) -> np.ndarray:
        torch = importlib.import_module("torch")
        changed = []
        with generators_kept(), torch.no_grad():
            for picture, seed in zip(x, seeds(uniform)):
                reseed(seed, 0, 0)
                found = self._transform(torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))))
                if not isinstance(found, torch.Tensor) or found.ndim != 3:
                    kind = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                    raise UserError(f"data.augment: {self._name} gave {kind}", "a tensor (C, H, W)",
                                    "correct that transform")
                changed.append(found.numpy().transpose(1, 2, 0))
        return _stacked(changed, self._name)


class KerasTransform:
    """A layer of Keras, called with ``training=True`` on one picture (1, H, W, C) at a time.

    ``draws``: whether numbers come from Python's own generator, too (AugMix); others from generators of the layer.
    """

    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._name = layer, name
        modules = [sys.modules[type(inner).__module__] for inner in layer._flatten_layers()]
        self.draws = any(value is random for module in modules for value in vars(module).values())

    def __call__(self, x: np.ndarray, value: Any, uniform: Uniform) -> np.ndarray:
        keras = importlib.import_module("keras")
        changed = []
        kept = generators_kept if self.draws else contextlib.nullcontext
        if x.dtype == np.uint8 and any(getattr(inner, "value_range", (0, 255))[1] <= 1
                                       for inner in self._layer._flatten_layers()):
            raise UserError(f"data.augment: {self._name} has value_range [0, 1] and the images are uint8",
                            "value_range [0, 255], or floats", "correct value_range")
        for picture, seed in zip(x, seeds(uniform)):
            with kept():
                self._seed(keras, seed)
                found = keras.ops.convert_to_numpy(self._layer(picture[None], training=True))[0]
            if x.dtype.kind in "iu" and found.dtype.kind == "f":  # layers compute in floats
                limits = np.iinfo(x.dtype)
                found = np.clip(np.rint(found), limits.min, limits.max)
            changed.append(found.astype(x.dtype))
        return _stacked(changed, self._name)

    def _seed(self, keras: Any, seed: int) -> None:
        """Put all generators of the layer, and of those within it, to the start of their sequences under ``seed``."""
        if self.draws:
            reseed(seed, 0, 0)
        for number, generator in enumerate(_generators(keras, self._layer)):
            words = np.random.SeedSequence([seed, number]).generate_state(2)
            generator.state.assign(words.astype(generator.state.dtype))


def transform_of(found: Callable[..., Any], value: Any, name: str) -> TorchTransform | KerasTransform | None:
    """Return what ``name`` stands for as a transform; None for a function (x, value, uniform).

    ``found`` is a transform, or a class, or a function that needs no arguments, which makes one of the entries of
    ``value``. Errors: `UserError` for arguments that it does not take, and for what is no transform.
    """
    made: Any = found
    if inspect.isclass(found) or inspect.isfunction(found) and not _needs_arguments(found):
        args = dict(value) if isinstance(value, Mapping) else {}
        if not isinstance(value, Mapping) and value is not True:
            raise UserError(f"data.augment: {name} is {value!r}", "true, or the transform's arguments by name",
                            f"set data.augment: {{\"{name}\": true}}")
        try:
            inspect.signature(found).bind(**args)
            made = found(**args)
        except (TypeError, ValueError) as error:
            raise UserError(f"data.augment: {name} does not take {args}: {error}", "arguments that it takes",
                            "correct data.augment") from error
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(made).__mro__}
    if {("keras", "MixUp"), ("keras", "CutMix")} & kinds:
        raise UserError(f"data.augment: {name} mixes the pictures of a batch", "a transform of single pictures",
                        "set data.augment.mixup, whose partners do not depend on the ranks")
    if ("keras", "Layer") in kinds or ("keras", "Operation") in kinds:
        return KerasTransform(made, name)
    if ("torch", "Module") in kinds or any(module == "torchvision" for module, _ in kinds):
        return TorchTransform(made, name)
    if made is not found:
        raise UserError(f"data.augment: {name} made a {type(made).__name__}", "a transform of torchvision v2, or a "
                        "layer of Keras", "return one, or take (x, value, uniform)")
    return None


def seeds(uniform: Uniform) -> list[int]:
    """Return a seed below 2^53 for each sample."""
    return [int(seed) for seed in (uniform(1)[:, 0] * 2.0**53).tolist()]


def _needs_arguments(function: Callable[..., Any]) -> bool:
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in inspect.signature(function).parameters.values())


def _generators(keras: Any, layer: Any) -> list[Any]:
    kind = keras.random.SeedGenerator
    own = [each for inner in layer._flatten_layers() for each in vars(inner).values() if isinstance(each, kind)]
    return list({id(each): each for each in own}.values())


def _stacked(changed: list[np.ndarray], name: str) -> np.ndarray:
    if len({(each.shape, each.dtype) for each in changed}) > 1:
        raise UserError(f"data.augment: {name} gave images of several sizes", "the size of its input", "correct it")
    return np.stack(changed)
