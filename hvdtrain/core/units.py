"""Quantities as text, in one format each, and the kinds of memory that a rank holds while it trains.

Owns units and digits; bytes are binary (GiB), rates decimal (GB/s) as in nccl-tests. Knows no table and no sentence.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(n_bytes: float) -> str:
    """Return a size with three digits in its binary unit.

    >>> [format_bytes(n) for n in (240.4e6, 1.52e10, 1000, 12, -MIB)]
    ['229 MiB', '14.2 GiB', '0.98 KiB', '12 B', '-1.00 MiB']
    """
    size, unit = abs(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{'-' if n_bytes < 0 else ''}{size:.{digits}f} {unit}"


def format_ms(seconds: float) -> str:
    """Return seconds as milliseconds with four digits.

    >>> format_ms(0.0512345)
    '51.23 ms'
    """
    return f"{1e3 * seconds:.4g} ms"


def format_number(value: Any) -> str:
    """Return a number for a table: about four digits, no exponent from one thousandth on; "-" for None.

    >>> [format_number(x) for x in (None, 1234.5, 12.345, 0.01234, 0.00001234)]
    ['-', '1234', '12.35', '0.0123', '1.2e-05']
    """
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000 or value == 0:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.4f}"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank at the moment of a step when it holds most, by purpose.

    ``parameters``: and buffers of the model, and the moving average of its weights. ``gradients``: until the update
    reads them. ``state``: the optimizer's. ``activations``: what forward leaves for backward, and what backward holds
    at the same time. ``buckets``: of the exchange, without the gradients: the other ranks' rows of shared memory,
    vectors in flight, state of a compressor. ``workspace``: samples fetched ahead, kernels' and the optimizer's
    scratch, a save's copies, what framework and program hold.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    buckets: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(astuple(self))

    @property
    def states(self) -> int:
        """Return what follows from model, optimizer and ranks alone: parameters, gradients, optimizer state."""
        return self.parameters + self.gradients + self.state


KINDS = tuple(field.name for field in fields(Footprint))
