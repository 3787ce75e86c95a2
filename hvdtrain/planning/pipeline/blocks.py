"""What a device of a split model holds while training: counted before anything is allocated on it.

Owns the arithmetic; pure. With GPipe every part of a micro-batch is in flight until backward begins, so that a device
keeps the activations of all of them (Huang et al. 2019, arXiv 1811.06965)::

    bytes = parameters x (1 + gradients + slots) + activations of one part x parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from hvdtrain.core.units import format_bytes


@dataclass(frozen=True)
class Block:
    """One named block of a model, measured.

    ``cost_s``: seconds of forward and backward of one split micro-batch; ``forward_s``: of its forward alone, 0 where
    not told apart. ``param_bytes``: of all its variables. ``activation_bytes``: what its backward keeps of one split
    micro-batch. ``cargo_bytes``: of its output, which travels where the model is cut behind it.
    """

    name: str
    cost_s: float
    param_bytes: int
    activation_bytes: int
    forward_s: float = 0.0
    cargo_bytes: int = 0

    def over(self, factor: float, memory_factor: float | None = None) -> Block:
        """Return what the block costs for ``factor`` times the samples; ``memory_factor``: of what backward keeps."""
        kept = factor if memory_factor is None else memory_factor
        return replace(self, cost_s=self.cost_s * factor, forward_s=self.forward_s * factor,
                       cargo_bytes=ceil(self.cargo_bytes * factor),
                       activation_bytes=round(self.activation_bytes * kept))


@dataclass(frozen=True)
class Holds:
    """Bytes on one device, by what they are for."""

    parameters: float
    gradients: float
    slots: float
    activations: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.slots + self.activations

    def words(self) -> str:
        """For an error or a table."""
        return (f"parameters {format_bytes(self.parameters)}, gradients {format_bytes(self.gradients)}, optimizer "
                f"{format_bytes(self.slots)}, activations {format_bytes(self.activations)}")


@dataclass(frozen=True)
class Needs:
    """What training holds beside parameters: bytes of gradients and of optimizer slots for each byte of parameters.

    ``gradients``: 1 for the gradients themselves, 1 more for the flat buckets of an exchange, 1 more for sums over
    micro-batches. ``slots``: 0 for SGD, 1 with momentum, 2 for Adam. ``micros``: split micro-batches in flight.
    """

    gradients: float = 1.0
    slots: float = 2.0
    micros: int = 1

    def total(self, param_bytes: float, activation_bytes: float) -> float:
        """Bytes of a device with these parameters and activations of one split micro-batch."""
        return param_bytes * (1 + self.gradients + self.slots) + activation_bytes * self.micros

    def of(self, blocks: Sequence[Block]) -> Holds:
        """What a device with these blocks holds."""
        parameters = sum(b.param_bytes for b in blocks)
        return Holds(parameters, parameters * self.gradients, parameters * self.slots,
                     sum(b.activation_bytes for b in blocks) * self.micros)
