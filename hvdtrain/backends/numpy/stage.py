"""Forward and backward of the reference model into flat buckets."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hvdtrain.backends.numpy.model import Model
from hvdtrain.core.protocols import Batch, GradientSink, Pair


class Stage:
    """`hvdtrain.core.protocols.Stage` over a whole `Model`."""

    asynchronous = False
    waited_s = 0.0

    def __init__(self, model: Model) -> None:
        self._model = model
        self.unused: frozenset[int] = frozenset()
        self._grads = {n: np.zeros_like(p) for n, p in model.params.items()}

    def connect(self, sink: GradientSink) -> None:
        """Allocate the buckets."""
        self._flats = [sink.buffer(b) for b in sink.buckets if sink.retains]

    def disconnect(self) -> None:
        """Nothing: the model knows nothing of a run."""

    def begin(self) -> None:
        """Clear the gradients."""
        self.unused = frozenset(range(len(self._grads)))
        for grad in self._grads.values():
            grad[...] = 0

    def rewind(self) -> None:
        """Nothing: the model draws no random numbers."""

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        """Add a micro-batch's gradient; hand all of it over with the ``final`` one."""
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
        """Hand over zeros, or NaN."""
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
        """Nothing: it is where it is computed."""

    def spare(self, batch: Batch) -> None:
        """Nothing: a micro-batch without samples is left out."""

    def trial(self, batch: Batch) -> None:
        """Compute a gradient and forget it."""
        self._model.gradient(batch[0], batch[1])

    def culprit(self, batch: Batch) -> str:
        """The first parameter that this batch gives a gradient which is not finite, or ""."""
        _, grads = self._model.gradient(batch[0], batch[1])
        return next((n for n in self._model.params if not np.isfinite(grads[n]).all()), "")

    def alone(self, batch: Batch) -> list[np.ndarray]:
        """The gradients of this batch, by parameter."""
        _, grads = self._model.gradient(batch[0], batch[1])
        return [grads[n] for n in self._model.params]

    def device_s(self) -> None:
        """The host's clock tells."""

    def describe(self) -> dict[str, str]:
        """The device."""
        return {"device": "cpu"}

    def caveats(self) -> list[str]:
        """None: every sample stands for itself."""
        return []
