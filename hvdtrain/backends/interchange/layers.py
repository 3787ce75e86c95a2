"""What a model is made of, told without its framework: layers in order, each with the names of its weights.

Owns the description that a backend makes of a model (`hvdtrain.backends.*.convert.describe`) and its JSON form.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One weight: its ``name`` in the whole model, unique there, its shape and dtype, and whether it is trained."""

    name: str
    shape: Shape
    dtype: str = "float32"
    trainable: bool = True


@dataclass(frozen=True)
class Layer:
    """One layer that has weights of its own.

    ``name``: its path with dots, as torch writes it ("conv_0.conv"). ``kind``: a key of
    `hvdtrain.backends.interchange.layouts.KINDS`, the same word in both frameworks. ``said``: its class there.
    ``weights``: by the name that the framework gives each within the layer ("in_proj_weight", "query/kernel").
    ``facts``: settings that both frameworks' layers have, for a remark where they differ.
    """

    name: str
    kind: str
    said: str
    weights: dict[str, Weight]
    facts: dict[str, Any] = field(default_factory=dict)

    def own(self) -> str:
        """Its weights with their shapes, in words."""
        return ", ".join(f"{role} {weight.shape}" for role, weight in self.weights.items())


@dataclass(frozen=True)
class Model:
    """A model's layers in the order in which it was put together; ``draws``: whether it draws random numbers."""

    framework: str
    layers: tuple[Layer, ...]
    draws: bool = False

    def weights(self) -> dict[str, Weight]:
        """Every weight by its name."""
        return {weight.name: weight for layer in self.layers for weight in layer.weights.values()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Model:
        """Undo `to_dict`."""
        layers = []
        for layer in plain["layers"]:
            weights = {role: Weight(**{**one, "shape": tuple(one["shape"])}) for role, one in layer["weights"].items()}
            layers.append(Layer(**{**layer, "weights": weights}))
        return cls(plain["framework"], tuple(layers), plain["draws"])
