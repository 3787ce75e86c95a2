"""The reference of a model that is cut over ranks: dense layers of a `Model`, forward and backward by hand."""

from __future__ import annotations

import numpy as np

from hvdtrain.backends.numpy.model import Model
from hvdtrain.backends.numpy.stage import Stage
from hvdtrain.backends.numpy.state import Evaluator
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, GradientSink, Pair
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs


FLOPS = 2e10
"""Operations a second that the reference is taken to make, so that its plans are the same each time."""


class Chunks(Stage):
    """`hvdtrain.core.protocols.PipelineStage` over the layers of ``layout``; a block is a layer."""

    def __init__(self, model: Model, layout: Layout, evaluator: Evaluator) -> None:
        super().__init__(model)
        self._layers, self.chunks = layout.mine, len(layout.mine)
        self._last = len(layout.names) - 1
        self._evaluator = evaluator
        self._kept: dict[tuple[int, int], list[np.ndarray]] = {}
        self._lost: dict[int, np.ndarray] = {}
        self.held = self.most_held = 0

    def begin(self) -> None:
        """Clear the gradients, and what a step that broke off has kept."""
        super().begin()
        self.drop()

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        """Keep the inputs of the chunk's layers and the output."""
        return Cargo((self._through(chunk, micro, came, batch)[-1],), (self._model.dtype,))

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        """Keep the gradient of the logits too."""
        logits = self._through(chunk, micro, came, batch)[-1]
        loss_sum, grad = self._model.loss(logits, batch[1])
        self._lost[micro] = grad * scale
        return loss_sum, len(logits)

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        """Add the gradients of the chunk's layers."""
        acts = self._kept.pop((chunk, micro))
        self.held, self.unused = self.held - 1, frozenset()
        delta = self._lost.pop(micro) if came is None else came.arrays[0]
        for i, (x, y) in reversed(list(zip(self._layers[chunk], zip(acts, acts[1:])))):
            if i < self._last:
                delta = delta * (y > 0)
            self._grads[f"w{i}"] += x.T @ delta
            self._grads[f"b{i}"] += delta.sum(axis=0)
            delta = delta @ self._model.params[f"w{i}"].T
        return Cargo((delta,), (self._model.dtype,)) if self._layers[chunk].start else None

    def hand_over(self, sink: GradientSink) -> None:
        """All buckets."""
        self._hand_over(sink)

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        """Forward, keeping nothing."""
        y = self._layer_by_layer(chunk, came, batch)[-1]
        if self._layers[chunk].stop <= self._last:
            return Cargo((y,), (self._model.dtype,))
        self._evaluator.add_outputs(y, batch)
        return None

    def culprit(self, batch: Batch) -> str:
        """The first parameter whose gradient of the step is not finite: it cannot be computed again alone."""
        return next((name for name, grad in self._grads.items() if not np.isfinite(grad).all()), "")

    def drop(self) -> None:
        """Forget what is kept."""
        self._kept, self._lost, self.held = {}, {}, 0

    def _through(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> list[np.ndarray]:
        acts = self._kept[chunk, micro] = self._layer_by_layer(chunk, came, batch)
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return acts

    def _layer_by_layer(self, chunk: int, came: Cargo | None, batch: Batch) -> list[np.ndarray]:
        """The chunk's input, then what each layer gives."""
        x = batch[0].reshape(len(batch[0]), -1) if came is None else came.arrays[0]
        acts = [x.astype(self._model.dtype, copy=False)]
        for i in self._layers[chunk]:
            z = acts[-1] @ self._model.params[f"w{i}"] + self._model.params[f"b{i}"]
            acts.append(np.maximum(z, 0) if i < self._last else z)
        return acts


def keep_own(model: Model, layout: Layout) -> None:
    """Drop the parameters of all blocks but this rank's."""
    own = {f"{kind}{i}" for i in layout.blocks for kind in "wb"}
    model.params = {name: p for name, p in model.params.items() if name in own}


def reckoned(model: Model, samples: int, slots: int) -> DeviceProfile:
    """What a rank would measure of the layers over ``samples``, reckoned from their products."""
    blocks, width = [], np.dtype(model.dtype).itemsize
    for i in range(model.layers):
        n_in, n_out = model.params[f"w{i}"].shape
        forward_s = 2 * samples * n_in * n_out / FLOPS
        size = model.params[f"w{i}"].nbytes + model.params[f"b{i}"].nbytes
        blocks.append(Block(f"layer{i}", 3 * forward_s, size, samples * (n_in + n_out) * width, forward_s,
                            samples * n_out * width))
    return DeviceProfile(tuple(blocks), samples, 0, Needs(1.0, float(slots)), "numpy")
