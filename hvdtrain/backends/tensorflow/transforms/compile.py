"""A Keras model computed through XLA: forward and backward of a micro-batch as one piece of compiled code.

Owns which sizes are compiled, and where XLA cannot be used. The function that is compiled is
`hvdtrain.backends.tensorflow.gradients`'; sums over ranks stay outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

XLA = "xla"


class XlaCompile:
    """Implements `hvdtrain.core.protocols.Compile`. ``why``: nothing compiles, or ""; ``remat``: of the run."""

    collective = False
    options: Sequence[str] = (XLA,)

    def __init__(self, why: str = "", remat: Any = None) -> None:
        self._why, self._remat = why, remat
        self.chosen: tuple[str, ...] = ()
        self._sizes: set[int] = set()
        self._preparing = False

    def install(self, model: Any, blocks: Sequence[Any] = ()) -> None:
        """Do nothing: graphs are traced again for what `use` says."""

    def remove(self, model: Any) -> None:
        pass

    def refusal(self, option: str) -> str:
        if self._why:
            return self._why
        if self._remat is not None and self._remat.chosen:
            return "XLA decides itself what is recomputed, which excludes remat"
        return ""

    def use(self, options: Collection[str]) -> None:
        self.chosen = tuple(option for option in self.options if option in options)

    def prepare(self, work: Callable[[], None], until: float) -> str:
        """Compile by ``work``, which nothing can interrupt. Errors: TensorFlow's, if XLA cannot compile the model."""
        self._preparing = bool(self.chosen)
        try:
            work()
        finally:
            self._preparing = False
        return ""

    def compiles(self, samples: int) -> bool:
        """Return whether XLA computes so many samples: prepared sizes only, so that no step waits for the compiler."""
        if self._preparing:
            self._sizes.add(samples)
        return bool(self.chosen) and samples in self._sizes

    def describe(self) -> dict[str, str]:
        return {"compile": " and ".join(self.chosen) or "nothing"}

    def caveats(self) -> list[str]:
        """Return nothing: results are rounded as on another device."""
        return []
