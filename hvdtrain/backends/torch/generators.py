"""Random generators that a PyTorch model may draw from: of this process and of each of its devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from hvdtrain.backends.torch import placement
from hvdtrain.core import rng


def random_arrays() -> dict[str, np.ndarray]:
    """Return the state of every random generator of this process."""
    out = {**rng.capture(), "torch.cpu": torch.get_rng_state().numpy().copy()}
    if torch.cuda.is_available():
        out["torch.cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return out


def load_random(arrays: dict[str, np.ndarray]) -> None:
    """Undo `random_arrays`."""
    rng.restore(arrays)
    torch.set_rng_state(torch.from_numpy(np.array(arrays["torch.cpu"])))
    if "torch.cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["torch.cuda"])))


class Generators:
    """All random generators, for a model on ``devices``."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of each by name."""
        return {**random_arrays(), **placement.further_random(self._devices)}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Undo `state`, for the devices that are here again."""
        load_random(arrays)
        placement.load_further_random(arrays, self._devices)

    def mark(self) -> Callable[[], None]:
        """Note all states; the function returned restores them. Cheaper than `state`, for every step."""
        back, cpu = rng.mark(), torch.get_rng_state()
        gpus = [d for d in dict.fromkeys(self._devices) if d.type == "cuda"]
        states = [torch.cuda.get_rng_state(d) for d in gpus]

        def put_back() -> None:
            back()
            torch.set_rng_state(cpu)
            for gpu, found in zip(gpus, states):
                torch.cuda.set_rng_state(found, gpu)
        return put_back

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all states after the body."""
        before = self.state()
        try:
            yield
        finally:
            self.load(before)
