"""The cell of backends whose arrays are computed at once."""

from __future__ import annotations

from hvdtrain.core.protocols import Array


class Held:
    """Implements `hvdtrain.core.protocols.Cell` by holding the array itself, which its users never write to."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def read(self) -> Array:
        """Return what was written last."""
        return self._value

    def write(self, x: Array) -> None:
        """Hold ``x`` instead."""
        self._value = x
