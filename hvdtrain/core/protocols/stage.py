"""Protocols of a step: stages compute gradients, sinks take them, and data parallelism updates every replica."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.core.protocols.tensors import Compressor, Ops
from hvdtrain.core.protocols.transport import Collectives
from hvdtrain.core.protocols.types import Array, Batch, Bucket, Pair, ParamSpec, Shortage, StepBatch


class GradientSink(Protocol):
    """Takes the gradients of one step, bucket by bucket, as backward makes them.

    ``buckets``: by index; empty where nothing is sent: then gradients are handed over by parameter, in their own shape.
    ``in_graph``: callable while a graph is traced; `ran` takes the graph's results. ``variant``: graphs that were
    traced under another one are not run (a compressor that warms up sends other amounts). ``retains``: gradients stay
    in their buckets until the update; where False a bucket that was put is the sink's, and its memory is requested
    again in every step. ``waited_s``: seconds for which `put` waited in this step.
    """

    retains: bool
    waited_s: float

    @property
    def buckets(self) -> list[Bucket]: ...

    @property
    def in_graph(self) -> bool:
        """Return whether `put`, `collect` and `look` may be called while a graph is traced."""

    @property
    def overlaps(self) -> bool:
        """Return whether a bucket that is put travels during backward, outside of any graph."""

    @property
    def variant(self) -> int: ...

    def buffer(self, bucket: Bucket) -> Array:
        """Return zeros (n,) to make a bucket's gradient in: where the transport sums it without a copy, if it can."""

    def put(self, index: int, x: Array) -> None:
        """Hand over the whole gradient of a bucket (or parameter), in any order; its sum may begin at once."""

    def owed(self) -> list[int] | None:
        """Return the buckets whose exchange this rank has not begun in the step at hand, to be put from now on.

        What was put for them and has not left yet is forgotten. None where an exchange broke off midway, so that it is
        not known what other ranks still wait for. [] where nothing is sent.
        """

    def collect(self) -> list[Array]:
        """Complete what was put and return it, summed over the replicas; by index."""

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Add to the graph that is traced what else belongs to the step.

        Returns what the graph is to give to `ran`: float64 (k,) numbers, and ``sums``, or none of them where the
        update has read them in the graph already.
        """

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        """Take what a graph with `collect` and `look` in it has returned; `collect` then returns ``sums``."""


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

    def connect(self, sink: GradientSink) -> None:
        """Make ready to hand gradients to ``sink``, before the first step or in place of another sink of the same
        buckets; allocates and hooks. A run's stage is connected from then on until `disconnect`."""

    def disconnect(self) -> None:
        """Remove all hooks: whoever calls the model after a run, on one rank alone say, must not wait for others."""

    def begin(self) -> None:
        """Open a step: forget the gradients of the step before, and keep the buffers for `Buffers.discard`."""

    def rewind(self) -> None:
        """Put every random generator back to where `begin` found it: the step at hand is repeated.

        `Buffers.discard` puts the buffers back. What `run` has left behind is forgotten by the next `begin`.
        """

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        """Add the gradient of ``loss_sum * scale``; return ``(loss_sum, weight)`` of this micro-batch, unscaled.

        ``micro``: numpy arrays of shape (B, ...); B is 0 only with ``sync_batchnorm``. The ``final`` micro-batch of a
        step hands every bucket to ``sink``, as early as its backward allows.
        """

    def nothing(self, sink: GradientSink, poison: bool = False) -> None:
        """Hand over zeros: this rank has no sample of the step. With ``poison`` NaN, so that no rank makes an update.

        It enters every collective that the other ranks enter in their `run`, under the same names, from outside of a
        graph or in one of its own: what a rank does that cannot finish its `run`. With ``poison`` only those that it
        still owes (`GradientSink.owed`), and it makes no memory of the size of a gradient where nothing is sent.
        """

    def ahead(self, batch: Batch) -> None:
        """Start the upload of `run`'s likely next micro-batch; nobody writes to its arrays until then."""

    def spare(self, batch: Batch) -> None:
        """Keep samples to compute on in place of a micro-batch without any (``sync_batchnorm``)."""

    def trial(self, batch: Batch) -> None:
        """Compute a batch's gradient for its time and memory alone; return when the device is done.

        Nothing is exchanged and nothing remains: parameters, buffers, random generators and gradients are as before.
        """

    def culprit(self, batch: Batch) -> str:
        """Compute a micro-batch's gradient again, for itself; return the first parameter where it is not finite.

        "" where all of it is finite. Like `trial` it exchanges nothing and leaves nothing behind.
        """

    def alone(self, batch: Batch) -> list[Array]:
        """Compute a micro-batch's gradient again, for itself; return that of each parameter, in its own shape.

        With training's loss scale and types. Like `trial` it leaves nothing behind; unused parameters have zeros.
        """

    def device_s(self) -> float | None:
        """Return the seconds that the device computed for the latest step it has ended; None: ask the host's clock."""

    def describe(self) -> dict[str, str]:
        """Return loss, devices and split in words, for the summary."""

    def caveats(self) -> list[str]:
        """Return what in this model depends on how a batch is cut (BatchNorm, dropout), in words (law 2)."""


@dataclass(frozen=True)
class StepGradients:
    """Result of a step's gradients on this rank.

    ``grads``: as `GradientSink.collect` returns them. ``totals``: (loss_sum, weight) by micro-batch, perhaps on device.
    ``waited_s``: for other ranks. ``lost``: shortage for which this rank sent poison: no rank makes the update.
    """

    grads: list[Array]
    totals: list[Pair]
    waited_s: float
    lost: Shortage | None = None


class Schedule(Protocol):
    """The order of a step's forwards and backwards; ``origin`` of a partitioned model finds what is not finite."""

    @property
    def origin(self) -> Callable[[StepBatch, float, GradientSink], Any] | None: ...

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        """Compute and sum the gradients of ``loss_sum * scale`` over this rank's micro-batches of ``batch``."""


class ModelSpec(Protocol):
    """Options of a model file besides its ``build``; everything but ``model`` may be None and is then adapted."""

    name: str
    model: Any
    task: Any
    weight: Any
    blocks: Any
    example: Any
    metrics: Any
    predict: Any
    parameter_groups: Any
    optimizer: Any
    buffer_reduction: Any


class Cargo(NamedTuple):
    """The tensors of one micro-batch at a cut: outputs of a block going forward, their gradients going back.

    ``arrays``: contiguous host memory, in the order of the framework's flattening; gradients in the same order, of
    floats only. bfloat16 as its bits in uint16. ``dtypes``: the tensors' own types by name, and behind a colon what
    else a framework has to say of one. ``form``: how the tree is put together, as text; "" for one tensor.
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

    With one rank in the replica `Stage.run` computes the whole model; else a step order calls `forward`, `loss` and
    `backward` for a micro-batch by its number ``micro``. `held` counts what is kept for `backward`. The tensors that
    come in are the stage's own to keep.
    """

    chunks: int
    held: int
    most_held: int

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        """Compute chunk ``chunk`` and return what the next one gets.

        ``came``: what the chunk before gave; None for the model's first, whose input is of ``batch``: numpy (B, ...).
        """

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        """Compute the model's last chunk and the task's ``(loss_sum, weight)``, unscaled; what `backward` begins with
        is the gradient of ``loss_sum * scale``, times the factor of the loss scale where one is in use."""

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        """Add the chunk's gradients to those of this rank; return those of what came into it.

        ``came``: what the chunk behind gave back; None for the model's last. None is returned for the model's first.
        """

    def culprit(self, batch: Batch) -> str:
        """Return the first parameter whose gradient of the step at hand is not finite on this rank; "" if none is.

        Asked before `hand_over`, so that what other copies bring in counts not. Of a copy of one rank it may compute
        ``batch`` again instead, as `Stage.culprit`.
        """

    def hand_over(self, sink: GradientSink) -> None:
        """Hand every bucket of this rank to ``sink``, as the final `Stage.run` of a step does: the last `backward` is
        over, and what it gives back is on its way, so that nobody waits for a sum who could compute."""

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        """Compute a chunk in evaluation and keep nothing; the last chunk adds to the metrics and returns None."""

    def drop(self) -> None:
        """Forget what is kept for backward: the step at hand has broken off."""


class DataParallel(GradientSink, Protocol):
    """Keeps the ranks' copies of a model one model: takes their gradients, decides what is summed when, and updates.

    ``caveats``: the laws it bends, printed at start. ``divides_state``: each rank updates a shard and keeps its
    optimizer state only. ``copies_equal``: all ranks hold the same parameters after every update.
    """

    caveats: tuple[str, ...]
    divides_state: bool
    copies_equal: bool

    @property
    def can_change_transport(self) -> bool:
        """Return whether it is a `ChangesTransport`, in this run."""

    @property
    def compression(self) -> str:
        """The name of the compressor in use, "none" without one."""

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""

    def describe(self) -> str:
        """Return how gradients travel in short, such as "none" or "topk 1 %", for the summary."""

    def begin(self, step: int) -> None:
        """Open step ``step``; `discard` goes back to here."""

    def discard(self) -> None:
        """Undo what the step did to the exchange's state: there will be no update."""

    def scale(self, batch: StepBatch) -> float:
        """Return what this rank's summed loss is multiplied by: 1 / W with W the global weight (law 1)."""

    def meets(self, step: int) -> bool:
        """Return whether the copies exchange anything in step ``step``, so that the ranks vote on it; alike on all."""

    def squares(self, grads: Sequence[Array]) -> float:
        """Return the sum of squares over this rank's part of ``grads``, as `collect` returned them.

        Over all ranks they add up to the square of the global norm; NaN or infinite where a gradient is not finite, or
        so large that its square overflows float32 (1.8e19). 0 where the gradients are still on an asynchronous device:
        there `update` looks.
        """

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update the parameters; return (finite, norm) as `Optimizer.step` does, the same on every rank.

        ``unused``: indices of the parameters that no rank used in this step, which `Optimizer.step` leaves as they are.
        """

    def extend(self, specs: Sequence[ParamSpec], first: int) -> Sequence[tuple[int, int]] | None:
        """Take in the parameters from index ``first`` of ``specs`` on, which have been added to the model's.

        The stage is to be connected again. Returns the elements [begin, end) of each that this rank updates; None: all.
        """

    def remembered_bytes(self) -> int:
        """Return the bytes that a compressor keeps from step to step on this rank, with those that undo a step."""

    def saved(self) -> dict[str, np.ndarray]:
        """Return this rank's own state (a compressor's residual, say) by name; {} without any."""

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; return in words what of it did not fit and starts again, or ""."""

    def restart(self) -> None:
        """Forget all state."""


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

    def use(self, compressor: Compressor) -> None:
        """Exchange by another compressor, with fresh state, from the next step on."""

    def use_wire(self, wire: Collectives) -> str:
        """Exchange over another transport from the next step on; return what of the state starts again, or ""."""
