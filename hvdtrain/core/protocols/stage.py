"""The seams of forward and backward: what computes gradients, and what takes them."""

from __future__ import annotations

import numpy as np
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hvdtrain.core.protocols.types import Array, Batch, Pair

if TYPE_CHECKING:
    from hvdtrain.core.protocols.shortage import Shortage
    from hvdtrain.core.protocols.types import Bucket, StepBatch


class GradientSink(Protocol):
    """Takes the gradients of one step, bucket by bucket, as backward makes them.

    ``buckets``: what it takes them in, by index; none at all where nothing is sent: then each parameter's gradient is
    handed over in its own shape, by the parameter's index. ``in_graph``: it may be called while a graph is traced;
    the graph's results are then handed over by `ran`. ``variant``: graphs that were traced under another one are not
    to be run (a compressor that warms up sends other amounts). ``retains``: gradients stay in the memory of their
    buckets until the update, which reads them there; where False a bucket that was put is the sink's, its memory is
    asked for anew in every step, and whoever made the gradients in it forgets them. ``waited_s``: seconds that the
    calls of `put` in the step at hand have waited for other ranks, which are none of the stage's computing.
    """

    retains: bool
    waited_s: float

    @property
    def buckets(self) -> list[Bucket]:
        """What gradients are handed over in."""
        ...

    @property
    def in_graph(self) -> bool:
        """Whether `put`, `collect` and `look` may be called while a graph is traced."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a bucket that is put travels while backward goes on, outside of any graph."""
        ...

    @property
    def variant(self) -> int:
        """What a traced graph depends on."""
        ...

    def buffer(self, bucket: Bucket) -> Array:
        """Return zeros (n,) to make a bucket's gradient in: where the wire sums it without a copy, if it can."""
        ...

    def put(self, index: int, x: Array) -> None:
        """Hand over the whole gradient of a bucket (or parameter), in any order; its sum may begin at once."""
        ...

    def owed(self) -> list[int] | None:
        """Return the buckets whose exchange this rank has not begun in the step at hand, to be put from now on.

        What was put for them and has not left yet is forgotten. None where an exchange broke off midway, so that it is
        not known what other ranks still wait for. [] where nothing is sent.
        """
        ...

    def collect(self) -> list[Array]:
        """Complete what was put and return it, summed over the copies of the model; by index."""
        ...

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Add to the graph that is traced what else belongs to the step.

        Returns what the graph is to give to `ran`: float64 (k,) numbers, and ``sums``, or none of them where the
        update has read them in the graph already.
        """
        ...

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        """Take what a graph with `collect` and `look` in it has returned; `collect` then returns ``sums``."""
        ...


class Stage(Protocol):
    """Consecutive blocks of a model on this rank's devices (a whole model is one stage): forward and backward.

    Scalars it returns may still be on the device: with ``asynchronous`` set, reading one waits for the device.
    ``waited_s``: seconds that the last `run` or `nothing` waited for other ranks.
    """

    asynchronous: bool
    waited_s: float

    @property
    def unused(self) -> frozenset[int]:
        """Indices of the parameters to which this rank's samples of the step gave no gradient; zeros are exchanged.

        Known once the gradients are handed over. All parameters, on a rank without a sample.
        """
        ...

    def connect(self, sink: GradientSink) -> None:
        """Make ready to hand gradients to ``sink``, before the first step or in place of another sink of the same
        buckets; allocates and hooks. A run's stage is connected from then on until `disconnect`."""
        ...

    def disconnect(self) -> None:
        """Remove all hooks: whoever calls the model after a run, on one rank alone say, must not wait for others."""
        ...

    def begin(self) -> None:
        """Open a step: forget the gradients of the step before, and keep the buffers for `Buffers.discard`."""
        ...

    def rewind(self) -> None:
        """Put every random generator back to where `begin` found it: the step at hand is repeated.

        `Buffers.discard` puts the buffers back. What `run` has left behind is forgotten by the next `begin`.
        """
        ...

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        """Add the gradient of ``loss_sum * scale``; return ``(loss_sum, weight)`` of this micro-batch, unscaled.

        ``micro``: numpy arrays of shape (B, ...); B is 0 only with ``sync_batchnorm``. The ``final`` micro-batch of a
        step hands every bucket to ``sink``, as early as its backward allows.
        """
        ...

    def nothing(self, sink: GradientSink, poison: bool = False) -> None:
        """Hand over zeros: this rank has no sample of the step. With ``poison`` NaN, so that no rank makes an update.

        It enters every collective that the other ranks enter in their `run`, under the same names, from outside of a
        graph or in one of its own: what a rank does that cannot finish its `run`. With ``poison`` only those that it
        still owes (`GradientSink.owed`), and it makes no memory of the size of a gradient where nothing is sent.
        """
        ...

    def ahead(self, batch: Batch) -> None:
        """Begin to bring the micro-batch that `run` is likely to get next to where it is computed; it may be another.

        Nobody writes to its arrays until then.
        """
        ...

    def spare(self, batch: Batch) -> None:
        """Keep samples to compute on in place of a micro-batch without any (``sync_batchnorm``)."""
        ...

    def trial(self, batch: Batch) -> None:
        """Compute a batch's gradient for its time and memory alone; return when the device is done.

        Nothing is exchanged and nothing remains: parameters, buffers, random generators and gradients are as before.
        """
        ...

    def culprit(self, batch: Batch) -> str:
        """Compute a micro-batch's gradient once more, for itself; return the first parameter where it is not finite.

        "" where all of it is finite. Like `trial` it exchanges nothing and leaves nothing behind.
        """
        ...

    def alone(self, batch: Batch) -> list[Array]:
        """Compute a micro-batch's gradient once more, for itself; return that of each parameter, in its own shape.

        With the factor of the loss and in the types that training has. Like `trial` it exchanges nothing and leaves
        nothing behind but the result; parameters that the loss does not depend on have zeros.
        """
        ...

    def device_s(self) -> float | None:
        """Return the seconds that the device computed for the latest step it has ended; None: ask the host's clock."""
        ...

    def describe(self) -> dict[str, str]:
        """Return loss, devices and split in words, for the summary."""
        ...

    def caveats(self) -> list[str]:
        """Return what in this model depends on how a batch is cut (BatchNorm, dropout), in words (law 2)."""
        ...


@dataclass(frozen=True)
class Done:
    """What a step's gradients ended with on this rank.

    ``grads``: as `GradientSink.collect` returns them. ``totals``: (loss_sum, weight) of each micro-batch, maybe still
    on the device. ``waited_s``: seconds waited for other ranks. ``lost``: None, or the lack of memory for which this
    rank has handed over poison in place of its gradients: no rank makes the update.
    """

    grads: list[Array]
    totals: list[Pair]
    waited_s: float
    lost: Shortage | None = None


class Schedule(Protocol):
    """The order of a step's forwards and backwards."""

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> Done:
        """Compute and sum the gradients of ``loss_sum * scale`` over this rank's micro-batches of ``batch``."""
        ...


class ModelSpec(Protocol):
    """What a model file offers beside its ``build``; everything but ``model`` may be None and is then adapted."""

    name: str
    model: Any
    task: Any
    weight: Any
    blocks: Any
    example: Any
    metrics: Any
    parameter_groups: Any
    optimizer: Any
    buffer_reduction: Any


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
