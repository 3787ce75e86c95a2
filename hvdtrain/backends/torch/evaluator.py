"""Loss and metrics of a PyTorch model over evaluation data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.pairs import means
from hvdtrain.backends.torch.modes import set_modes
from hvdtrain.backends.torch.transforms.placement import Placement
from hvdtrain.backends.torch.transforms.precision import MixedPrecision
from hvdtrain.core.protocols import Batch


class TorchEvaluator:
    """Implements `hvdtrain.core.protocols.Evaluator`; ``metrics``: a `hvdtrain.backends.torch.task.Metrics`."""

    def __init__(self, model: torch.nn.Module, metrics: Any, placement: Placement, precision: MixedPrecision) -> None:
        self._model, self._metrics, self._placement, self._precision = model, metrics, placement, precision

    def add(self, batch: Batch) -> None:
        """Add one batch to the metrics' totals; every module is in the mode it was in afterwards."""
        with self.evaluating():
            self.measure(self._placement.tensors(batch))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model computes as an evaluation does."""
        modes = {m: m.training for m in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad(), self._precision.computing():
                yield
        finally:
            set_modes(self._model, modes)

    def measure(self, batch: tuple[torch.Tensor, ...]) -> None:
        """Add one batch of tensors in the modes of an evaluation."""
        self._metrics.add(self._model, batch)

    def totals(self) -> dict[str, np.ndarray]:
        """Return float64[2] (sum, weight) of each metric this rank saw; they start anew."""
        return dict(self._metrics.take())

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return weighted means."""
        return means(totals)
