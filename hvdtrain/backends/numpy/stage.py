"""Forward and backward of the reference model into flat buckets, whole or partitioned over ranks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hvdtrain.backends.numpy.model import Evaluator, Model
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, GradientSink, Pair
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs


class Stage:
    """`hvdtrain.core.protocols.Stage` over a whole `Model`."""

    asynchronous = False
    waited_s = 0.0

    def __init__(self, model: Model) -> None:
        self._model = model
        self.unused: frozenset[int] = frozenset()
        self._grads = {n: np.zeros_like(p) for n, p in model.params.items()}

    def connect(self, sink: GradientSink) -> None:
        self._flats = [sink.buffer(b) for b in sink.buckets if sink.retains]

    def disconnect(self) -> None:
        """Do nothing: the model has no hooks."""

    def begin(self) -> None:
        self.unused = frozenset(range(len(self._grads)))
        for grad in self._grads.values():
            grad[...] = 0

    def rewind(self) -> None:
        """Do nothing: the model draws no random numbers."""

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        loss_sum = 0.0
        if len(micro[0]):
            self.unused = frozenset()
            loss_sum, grads = self._model.gradient(micro[0], micro[1])
            for name, grad in grads.items():
                self._grads[name] += grad * scale
        if final:
            self._hand_over(sink)
        return loss_sum, len(micro[0])

    def nothing(self, sink: GradientSink, poison: bool = False) -> None:
        for grad in self._grads.values():
            grad[...] = np.nan if poison else 0
        self._hand_over(sink, sink.owed() or () if poison else None)

    def _hand_over(self, sink: GradientSink, owed: Collection[int] | None = None) -> None:
        grads = list(self._grads.values())
        if not sink.buckets:
            for i, grad in enumerate(grads if owed is None else ()):
                sink.put(i, grad)
        for bucket in sink.buckets if owed is None else [sink.buckets[i] for i in owed]:
            flat_N = self._flats[bucket.index] if sink.retains else sink.buffer(bucket)
            flat_N[:] = np.concatenate([grads[i].reshape(-1) for i in bucket.params])
            sink.put(bucket.index, flat_N)

    def ahead(self, batch: Batch) -> None:
        """Do nothing: batches are in host memory."""

    def spare(self, batch: Batch) -> None:
        """Do nothing: a micro-batch without samples is left out."""

    def trial(self, batch: Batch) -> None:
        self._model.gradient(batch[0], batch[1])

    def culprit(self, batch: Batch) -> str:
        _, grads = self._model.gradient(batch[0], batch[1])
        return next((n for n in self._model.params if not np.isfinite(grads[n]).all()), "")

    def alone(self, batch: Batch) -> list[np.ndarray]:
        _, grads = self._model.gradient(batch[0], batch[1])
        return [grads[n] for n in self._model.params]

    def device_s(self) -> None:
        """Return None: the host's clock is used."""

    def describe(self) -> dict[str, str]:
        return {"device": "cpu"}

    def caveats(self) -> list[str]:
        return []


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
        super().begin()
        self.drop()

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        return Cargo((self._through(chunk, micro, came, batch)[-1],), (self._model.dtype,))

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        logits = self._through(chunk, micro, came, batch)[-1]
        loss_sum, grad = self._model.loss(logits, batch[1])
        self._lost[micro] = grad * scale
        return loss_sum, len(logits)

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
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
        self._hand_over(sink)

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        y = self._layer_by_layer(chunk, came, batch)[-1]
        if self._layers[chunk].stop <= self._last:
            return Cargo((y,), (self._model.dtype,))
        self._evaluator.add_outputs(y, batch)
        return None

    def culprit(self, batch: Batch) -> str:
        """Return the first parameter whose gradient of the step is not finite; a batch cannot be computed alone."""
        return next((name for name, grad in self._grads.items() if not np.isfinite(grad).all()), "")

    def drop(self) -> None:
        self._kept, self._lost, self.held = {}, {}, 0

    def _through(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> list[np.ndarray]:
        acts = self._kept[chunk, micro] = self._layer_by_layer(chunk, came, batch)
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return acts

    def _layer_by_layer(self, chunk: int, came: Cargo | None, batch: Batch) -> list[np.ndarray]:
        """Return the chunk's input, then each layer's output."""
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


def estimated(model: Model, samples: int, slots: int) -> DeviceProfile:
    """Return the costs of the layers over ``samples``, estimated from their products in place of a measurement."""
    blocks, width = [], np.dtype(model.dtype).itemsize
    for i in range(model.layers):
        n_in, n_out = model.params[f"w{i}"].shape
        forward_s = 2 * samples * n_in * n_out / FLOPS
        size = model.params[f"w{i}"].nbytes + model.params[f"b{i}"].nbytes
        blocks.append(Block(f"layer{i}", 3 * forward_s, size, samples * (n_in + n_out) * width, forward_s,
                            samples * n_out * width))
    return DeviceProfile(tuple(blocks), samples, 0, Needs(1.0, float(slots)), "numpy")
