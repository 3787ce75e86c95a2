"""Exact activation checkpointing of a Keras model's named blocks (the key ``remat``).

Owns which blocks are recomputed and the mark on their calls. Graphs are changed by
`hvdtrain.backends.tensorflow.recompute`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import keras

from hvdtrain.backends.tensorflow import recompute
from hvdtrain.core.protocols import Batch, BlockCost

_MARK = "_hvdtrain_remat"
"""Attribute of a wrapped ``call``: the layer's own one, if it was set on the instance before."""

SAMPLES = 2
"""Samples of the forward pass that is looked at for refusals."""


class Measures(Protocol):
    """Measure the model's blocks: `hvdtrain.backends.tensorflow.create.Costs`."""

    def forward(self, batch: Batch) -> recompute.Recording:
        """Return which blocks a training forward pass of ``batch`` calls."""

    def measure(self, batch: Batch) -> dict[str, BlockCost]:
        """Return the cost of each block that a step on ``batch`` calls."""


class Remat:
    """Implements `hvdtrain.core.protocols.Remat` for ``blocks``, named layers in the order of the forward pass."""

    collective = False

    def __init__(self, blocks: Sequence[tuple[str, Any]], sample: Callable[[int], Batch] | None = None) -> None:
        self.names: Sequence[str] = tuple(name for name, _ in blocks)
        self.chosen: tuple[str, ...] = ()
        self.measures: Measures | None = None
        self._layers, self._sample = dict(blocks), sample
        self._installed = False
        self._forward: recompute.Recording | None = None
        self._fused: set[str] = set()

    def refusal(self, name: str) -> str:
        if self._forward is None and self._sample is not None and self.measures is not None:
            with self._all_marked():
                self._forward = self.measures.forward(self._sample(SAMPLES))
                self._fused = self._forward.fused()
        if self._forward is None:
            return ""
        if name in self._forward.inner:
            return "it is called in a loop, a condition or a tf.function of the model"
        if name in self._fused:
            return "it calls a tf.function of the model, inside which TensorFlow may round differently"
        called = {call.name for call in self._forward.calls} | self._forward.within
        return "" if name in called else "the model's forward pass in training does not call it"

    def costs(self, batch: Batch) -> list[BlockCost]:
        assert self.measures is not None
        with self._all_marked():
            found = self.measures.measure(batch)
        return [found[name] for name in self.names if name in found and not self.refusal(name)]

    @contextlib.contextmanager
    def _all_marked(self) -> Iterator[None]:
        self._unmark()
        self._mark(self.names)
        try:
            yield
        finally:
            self._unmark()
            if self._installed:
                self._mark(self.chosen)

    def choose(self, names: Collection[str]) -> None:
        self.chosen = tuple(name for name in self.names if name in names)
        if self._installed:
            self.install(None)

    def install(self, model: Any, blocks: Sequence[Any] = ()) -> None:
        self._installed = True
        self._unmark()
        self._mark(self.chosen)

    def _mark(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._layers:  # of a model that is partitioned over ranks, another one's
                continue
            layer = self._layers[name]
            wrapped = _noted(name, layer.call)
            setattr(wrapped, _MARK, vars(layer).get("call"))
            object.__setattr__(layer, "call", wrapped)

    def _unmark(self) -> None:
        for layer in self._layers.values():
            if hasattr(layer.call, _MARK):
                before = getattr(layer.call, _MARK)
                object.__delattr__(layer, "call") if before is None else object.__setattr__(layer, "call", before)

    def remove(self, model: Any) -> None:
        self._installed = False
        self._unmark()

    def describe(self) -> dict[str, str]:
        return {"recomputed": ", ".join(self.chosen)} if self.chosen else {}

    def caveats(self) -> list[str]:
        """Return nothing: gradients are the ones without it."""
        return []


def named_blocks(spec: Any) -> list[tuple[str, Any]]:
    """Return the model file's blocks, or the layers of a Sequential model; none of another."""
    if spec.blocks is not None:
        return [(str(name), layer) for name, layer in spec.blocks(spec.model)]
    if isinstance(spec.model, keras.Sequential):
        return [(layer.name, layer) for layer in spec.model.layers if not isinstance(layer, keras.layers.InputLayer)]
    return []


def _noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        return recompute.noted(name, lambda: call(*args, **kwargs))

    return noted
