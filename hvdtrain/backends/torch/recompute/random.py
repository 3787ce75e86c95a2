"""The random generators of this process around a forward pass: which of them it drew from, and where they stood.

Owns no generator that a model holds itself.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

States = dict[str, Any]

_MT19937_BYTES = 4 * 624 + 4
"""Of numpy's struct: 624 words and the position among them."""


class Generators:
    """Python's, numpy's and PyTorch's own generators, on the CPU and on ``devices``.

    States are in the formats of each library: as arrays they would take ten times as long.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = {str(d): d for d in devices if d.type == "cuda"}
        self._numpy = _Numpy()

    def take(self) -> States:
        """Return the state of each by name."""
        found: States = {"python": random.getstate(), "numpy": self._numpy.take(), "torch": torch.get_rng_state()}
        for name, device in self._cuda.items():
            found[name] = torch.cuda.get_rng_state(device)
        return found

    def put(self, states: States) -> None:
        """Give these generators these states."""
        for name, state in states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                self._numpy.put(state)
            elif name == "torch":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self._cuda[name])

    def drawn_from(self, before: States) -> States:
        """Return those of ``before`` that have moved on since."""
        now = self.take()
        return {name: state for name, state in before.items() if not _EQUAL.get(name, torch.equal)(state, now[name])}


class _Numpy:
    """numpy's global generator, whose `numpy.random.get_state` takes 40 us: asked only if its words have changed.

    A normal number that is kept for the next draw is in no word, so a state with one is never taken for the same.
    """

    def __init__(self) -> None:
        self._module: Any = np.random
        self._words, self._state = b"", self._module.get_state()

    def take(self) -> Any:
        """Return what `numpy.random.set_state` takes; the same object where nothing was drawn in between."""
        words = self._read()
        if not words or words != self._words or self._state[3]:
            self._words, self._state = words, self._module.get_state()
        return self._state

    def put(self, state: Any) -> None:
        """Undo `take`."""
        np.random.set_state(state)
        self._words = b""

    def _read(self) -> bytes:
        """The words of the generator in their memory; none where it is of another kind."""
        found = self._module.get_bit_generator()
        if type(found).__name__ != "MT19937":
            return b""
        return ctypes.string_at(found.ctypes.state_address, _MT19937_BYTES)


def _numpy_equal(one: Any, other: Any) -> bool:
    return one is other or one[2:] == other[2:] and np.array_equal(one[1], other[1])


_EQUAL: dict[str, Callable[[Any, Any], bool]] = {"python": lambda a, b: a == b, "numpy": _numpy_equal}
