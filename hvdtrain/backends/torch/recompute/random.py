"""The random generators of this process around a forward pass: which of them it drew from, and where they stood.

Owns no generator that a model holds itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

States = dict[str, Any]


class Generators:
    """Python's, numpy's and PyTorch's own generators, on the CPU and on ``devices``.

    In the formats of each library: to take and to compare them costs some 20 us, as arrays it would be ten times that.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = {str(d): d for d in devices if d.type == "cuda"}

    def take(self) -> States:
        """Return the state of each by name."""
        found: States = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        for name, device in self._cuda.items():
            found[name] = torch.cuda.get_rng_state(device)
        return found

    def put(self, states: States) -> None:
        """Give these generators these states."""
        for name, state in states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(state)
            elif name == "torch":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self._cuda[name])

    def drawn_from(self, before: States) -> States:
        """Return those of ``before`` that have moved on since."""
        now = self.take()
        return {name: state for name, state in before.items() if not _EQUAL.get(name, torch.equal)(state, now[name])}


def _numpy_equal(one: Any, other: Any) -> bool:
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])


_EQUAL: dict[str, Callable[[Any, Any], bool]] = {"python": lambda a, b: a == b, "numpy": _numpy_equal}
