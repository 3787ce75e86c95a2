"""The random generators that a PyTorch model may draw from: of this process and of each of its devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hvdtrain.backends.torch import placement, state


class Generators:
    """All of them, for a model on ``devices``."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of each by name."""
        return {**state.random_arrays(), **placement.further_random(self._devices)}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Undo `state`, for the devices that are here again."""
        state.load_random(arrays)
        placement.load_further_random(arrays, self._devices)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """After it, each is as it was before it."""
        before = self.state()
        try:
            yield
        finally:
            self.load(before)
