"""The seam of data parallelism: how the copies of a model stay one model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdtrain.core.protocols.stage import GradientSink
from hvdtrain.core.protocols.types import Array

if TYPE_CHECKING:
    from hvdtrain.core.protocols.ops import Compressor, Ops
    from hvdtrain.core.protocols.types import ParamSpec, StepBatch
    from hvdtrain.core.protocols.wire import Collectives


class DataParallel(GradientSink, Protocol):
    """Keeps the ranks' copies of a model one model: takes their gradients, decides what is summed when, and updates.

    ``caveats``: the laws it bends, in words that are printed at start. ``divides_state``: each rank updates a shard of
    the parameters, and keeps the optimizer's state of that shard alone. ``copies_equal``: several ranks hold the same
    parameters after every update, as far as their sums have the same bits.
    """

    caveats: tuple[str, ...]
    divides_state: bool
    copies_equal: bool

    @property
    def can_change_transport(self) -> bool:
        """Whether it is a `ChangesTransport`, in this run."""
        ...

    @property
    def compression(self) -> str:
        """The name of the compressor in use, "none" without one."""
        ...

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        ...

    def describe(self) -> str:
        """Return how gradients travel in short, such as "none" or "topk 1 %", for the summary."""
        ...

    def begin(self, step: int) -> None:
        """Open step ``step``; `discard` goes back to here."""
        ...

    def discard(self) -> None:
        """Undo what the step did to the exchange's state: there will be no update."""
        ...

    def scale(self, batch: StepBatch) -> float:
        """Return what this rank's summed loss is multiplied by: 1 / W with W the global weight (law 1)."""
        ...

    def meets(self, step: int) -> bool:
        """Return whether the copies exchange anything in step ``step``, so that the ranks vote on it; alike on all."""
        ...

    def squares(self, grads: Sequence[Array]) -> float:
        """Return the sum of squares over this rank's part of ``grads``, as `collect` returned them.

        Over all ranks they add up to the square of the global norm; NaN or infinite where a gradient is not finite, or
        so large that its square overflows float32 (1.8e19). 0 where the gradients are still on an asynchronous device:
        there `update` looks.
        """
        ...

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update the parameters; return (finite, norm) as `Optimizer.step` does, the same on every rank.

        ``unused``: indices of the parameters that no rank used in this step, which `Optimizer.step` leaves as they are.
        """
        ...

    def extend(self, specs: Sequence[ParamSpec], first: int) -> Sequence[tuple[int, int]] | None:
        """Take in the parameters from index ``first`` of ``specs`` on, which have been added to the model's.

        The stage is to be connected again. Returns the elements [begin, end) of each that this rank updates; None: all.
        """
        ...

    def remembered_bytes(self) -> int:
        """Return the bytes that a compressor keeps from step to step on this rank, with those that undo a step."""
        ...

    def saved(self) -> dict[str, np.ndarray]:
        """Return this rank's own state (a compressor's residual, say) by name; {} without any."""
        ...

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; return in words what of it did not fit and starts anew, or ""."""
        ...

    def restart(self) -> None:
        """Forget all state."""
        ...


class DividesState(DataParallel, Protocol):
    """A strategy with ``divides_state``; the memory plan and the summary read what follows.

    ``stage``: of ZeRO, 1: gradients stay whole, 2: they are divided too. ``sizes_BP``: elements of each bucket that
    each rank updates. ``gathers``: updates after which parameters were gathered, in ``gathered_s`` seconds.
    """

    stage: int
    sizes_BP: Sequence[Sequence[int]]
    gathers: int
    gathered_s: float


class ChangesTransport(DataParallel, Protocol):
    """A way whose exchange may be changed between two steps, by all ranks at once; the stage is connected again."""

    @property
    def ops(self) -> Ops:
        """The operations on the arrays that it exchanges."""
        ...

    def use(self, compressor: Compressor) -> None:
        """Exchange by another compressor, with fresh state, from the next step on."""
        ...

    def use_wire(self, wire: Collectives) -> str:
        """Exchange over another transport from the next step on; return what of the state starts anew, or ""."""
        ...
