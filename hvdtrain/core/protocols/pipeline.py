"""The seam of a model that is cut over ranks: what a rank computes of it, and what travels between them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from hvdtrain.core.protocols.arrays import Batch, Pair
from hvdtrain.core.protocols.stage import GradientSink, Stage


class Cargo(NamedTuple):
    """The tensors of one micro-batch at a cut: outputs of a block going forward, their gradients going back.

    ``arrays``: contiguous host memory, the tensors of the tree that the block returns, in the order of the framework's
    own flattening; gradients in the same order, of its tensors of floats only. bfloat16 as its bits in uint16.
    ``dtypes``: the tensors' own types by name, and behind a colon what else a framework has to say of one. ``form``:
    how the tree is put together, as text; "" for one tensor.
    """

    arrays: tuple[np.ndarray, ...]
    dtypes: tuple[str, ...]
    form: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class PipelineStage(Stage, Protocol):
    """A rank's part of a model that is cut over ranks: ``chunks`` runs of consecutive blocks, in the model's order.

    With one rank in the copy it is the whole model and `Stage.run` computes it; else an order of a pipeline calls
    `forward`, `loss` and `backward`. A micro-batch is known by its number ``micro`` in the step. Of each chunk what its
    backward needs is kept from `forward` (or `loss`) until `backward`; `held` counts it. The tensors that come in are
    the stage's own to keep.
    """

    chunks: int
    held: int
    most_held: int

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        """Compute chunk ``chunk`` and return what the next one gets.

        ``came``: what the chunk before gave; None for the model's first, whose input is of ``batch``: numpy (B, ...).
        """
        ...

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        """Compute the model's last chunk and the task's ``(loss_sum, weight)``, unscaled; what `backward` begins with
        is the gradient of ``loss_sum * scale``, times the factor of the loss scale where one is in use."""
        ...

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        """Add the chunk's gradients to those of this rank; return those of what came into it.

        ``came``: what the chunk behind gave back; None for the model's last. None is returned for the model's first.
        """
        ...

    def culprit(self, batch: Batch) -> str:
        """Return the first parameter whose gradient of the step at hand is not finite on this rank; "" if none is.

        Asked before `hand_over`, so that what other copies bring in counts not. Of a copy of one rank it may compute
        ``batch`` once more instead, as `Stage.culprit`.
        """
        ...

    def hand_over(self, sink: GradientSink) -> None:
        """Hand every bucket of this rank to ``sink``, as the final `Stage.run` of a step does: the last `backward` is
        over, and what it gives back is on its way, so that nobody waits for a sum who could compute."""
        ...

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        """Compute a chunk in evaluation and keep nothing; the last chunk adds to the metrics and returns None."""
        ...

    def drop(self) -> None:
        """Forget what is kept for backward: the step at hand has broken off."""
        ...
