"""The kinds of memory that a rank holds while it trains, in bytes."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

GB = 1e9


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank at the moment of a step when it holds most, by what they are for.

    ``parameters``: and buffers of the model, and the moving average of its weights. ``gradients``: until the update
    reads them. ``state``: the optimizer's. ``activations``: what forward leaves for backward, with what backward
    holds at a time beside it. ``buckets``: of the exchange beside the gradients themselves: the other ranks' rows of
    shared memory, vectors in flight, what a compressor remembers. ``workspace``: samples fetched ahead, kernels' and
    the optimizer's scratch, a save's copies, what framework and program hold.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    buckets: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))

    @property
    def states(self) -> int:
        """Return what follows from model, optimizer and ranks alone: parameters, gradients, optimizer state."""
        return self.parameters + self.gradients + self.state


KINDS = tuple(field.name for field in fields(Footprint))


def shown(n_bytes: float) -> str:
    """Bytes as people read them: "240 MB", "15.2 GB".

    >>> shown(240.4e6), shown(1.52e10), shown(9600), shown(0)
    ('240 MB', '15.2 GB', '0.01 MB', '0 MB')
    """
    if n_bytes >= GB:
        return f"{n_bytes / GB:.3g} GB" if n_bytes < 1000 * GB else f"{n_bytes / GB:.0f} GB"
    if n_bytes >= 1e6 or n_bytes == 0:
        return f"{n_bytes / 1e6:.0f} MB"
    return f"{max(n_bytes, 1e4) / 1e6:.2f} MB"
