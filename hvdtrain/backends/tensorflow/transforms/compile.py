"""Computing a Keras model through XLA: forward and backward of a micro-batch as one piece of compiled code.

Owns whether that is in use, for which sizes, and where it cannot be. What is compiled is one function in the step's
graphs (`hvdtrain.backends.tensorflow.gradients`); the sums over ranks stay outside of it, in the graph or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

XLA = "xla"


class XlaCompile:
    """Implements `hvdtrain.core.protocols.Compile`. ``why``: why this run compiles nothing, in words, or "".

    ``remat``: tells what is recomputed, if anything can be.
    """

    collective = False
    options: Sequence[str] = (XLA,)

    def __init__(self, why: str = "", remat: Any = None) -> None:
        self._why, self._remat = why, remat
        self.chosen: tuple[str, ...] = ()
        self._sizes: set[int] = set()
        self._preparing = False

    def install(self, model: Any, blocks: Sequence[Any] = ()) -> None:
        """Nothing: graphs are traced anew for what `use` says."""

    def remove(self, model: Any) -> None:
        """Nothing is changed in the model."""

    def refusal(self, option: str) -> str:
        """Return why XLA is not tried."""
        if self._why:
            return self._why
        if self._remat is not None and self._remat.chosen:
            return "XLA decides by itself what is recomputed: it does not go together with remat"
        return ""

    def use(self, options: Collection[str]) -> None:
        """Compute so from now on."""
        self.chosen = tuple(option for option in self.options if option in options)

    def prepare(self, work: Callable[[], None], until: float) -> str:
        """Compile by ``work``, which nothing can interrupt. Errors: TensorFlow's, where XLA cannot compile the model.
        """
        self._preparing = bool(self.chosen)
        try:
            work()
        finally:
            self._preparing = False
        return ""

    def compiles(self, samples: int) -> bool:
        """Return whether a micro-batch of so many samples is computed by XLA: only sizes that were prepared are, so
        that no step waits for the compiler."""
        if self._preparing:
            self._sizes.add(samples)
        return bool(self.chosen) and samples in self._sizes

    def describe(self) -> dict[str, str]:
        """Return what is in use in words, for the summary."""
        return {"compile": " and ".join(self.chosen) or "nothing"}

    def caveats(self) -> list[str]:
        """Return nothing: what is computed is rounded otherwise, as on another device."""
        return []
