"""The seam of compiled models: ways to compute it that a run times, and keeps where they are faster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from hvdtrain.core.protocols.model_state import Transform


class Compile(Transform, Protocol):
    """Computes a model in other ways than its user wrote: through a compiler, in another memory layout.

    ``options``: what may be tried, in this order; each is tried on top of those that were kept. ``chosen``: those in
    use, () for the model as its user made it. From `install` on nothing but `use` changes what is computed, so that a
    transform installed later (remat) may wrap the model's blocks as they are then.
    """

    options: Sequence[str]
    chosen: tuple[str, ...]

    def refusal(self, option: str) -> str:
        """Return why ``option`` is not even tried with this model on this machine, in words; "" where it is."""
        ...

    def use(self, options: Collection[str]) -> None:
        """Compute in these ways from now on; called between steps. Compiles nothing by itself."""
        ...

    def prepare(self, work: Callable[[], None], until: float) -> str:
        """Compile what `use` has named while ``work`` computes a micro-batch (`Stage.trial`), which it calls once.

        ``until``: `time.monotonic` after which no more is compiled. Returns what is left as it was and why, in words;
        "" where nothing is. Exchanges nothing. Errors: those of ``work``, or of a compiler where nothing of the option
        is of use then.
        """
        ...
