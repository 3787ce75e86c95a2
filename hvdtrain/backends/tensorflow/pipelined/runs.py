"""A rank's chunks of a Keras model: each a run of blocks that are called one after the other."""

from __future__ import annotations

from typing import Any

from hvdtrain.backends.tensorflow.chain import Chain
from hvdtrain.backends.tensorflow.pipelined.cargo import Crossing
from hvdtrain.core.mesh import Layout


class Runs:
    """``chunks``: their block numbers; ``ending``: the number of the one that ends the model, -1 without it."""

    def __init__(self, chain: Chain, layout: Layout) -> None:
        self._chain = chain
        self.whole, self.chunks = chain.model, layout.mine
        self.ending = len(self.chunks) - 1 if self.chunks[-1].stop == len(chain.layers) else -1

    def run(self, chunk: int, came: Crossing, training: bool) -> Crossing:
        """Call the blocks of a chunk; what their layers add to the loss comes behind that of those before."""
        layers = [self._chain.layers[i] for i in self.chunks[chunk]]
        for layer in layers:
            layer._clear_losses()
        x = self._chain.run(came.value, training, self.chunks[chunk])
        return Crossing(x, [*came.losses, *(loss for layer in layers for loss in layer.losses)])

    def last(self, x: Any, came: Crossing, training: bool) -> Crossing:
        """Call the blocks of the chunk that ends the model; ``x``: its input where it is all of the model."""
        whole = self.chunks[self.ending].start == 0
        return self.run(self.ending, self.entered(x) if whole else came, training)

    def entered(self, x: Any) -> Crossing:
        """Return what goes into the first block."""
        return Crossing(self._chain.entry(x), [])
