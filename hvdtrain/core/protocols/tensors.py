"""Protocols of a backend's arrays: operations, compressors, trainable tensors and their optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from hvdtrain.core.protocols.transport import Collectives, Exchange, Spread
from hvdtrain.core.protocols.types import Array, Bucket, ParamSpec, Shards


class StateCell(Protocol):
    """Memory for one array that survives a step; read and written at once or as nodes of a graph that is traced."""

    def read(self) -> Array:
        """Return the array, which later writes leave as it is."""

    def write(self, x: Array) -> None:
        """Replace the array by one of the same shape and dtype."""


class Ops(Protocol):
    """The functional array operations that the core and the compressors need, one implementation per backend.

    ``+ - * / abs`` of the arrays themselves are used as they are. Dtypes are given by numpy's names.
    ``writes``: arrays can be written to (`overwrite`).
    """

    name: str
    writes: bool

    def zeros(self, n: int, dtype: str) -> Array:
        """(n,) zeros."""

    def buffer(self, n: int, dtype: str, own: np.ndarray | None = None) -> Array:
        """(n,) zeros for a stage to write gradients into, in memory ``own`` of a transport's if there is such.

        What `to_host` makes of it is that memory, not a copy.
        """

    def cast(self, x: Array, dtype: str) -> Array:
        """Return the same shape in another dtype."""

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Return the same elements, row-major, in another shape."""

    def pack(self, xs: Sequence[Array]) -> Array:
        """Flatten and join: arrays of any shape -> (N,)."""

    def unpack(self, flat_N: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """Undo `pack`."""

    def bits16(self, x: Array) -> Array:
        """Return the bits of float32 ``x`` rounded to bfloat16 (to nearest, ties to even), as int16."""

    def from_bits16(self, bits: Array) -> Array:
        """Undo `bits16`: int16 -> float32."""

    def bitcast(self, x: Array, dtype: str) -> Array:
        """Return the bits of a vector read as another dtype: (n,) -> (n * itemsize / itemsize of ``dtype``,).

        ``x`` fills whole elements of ``dtype``, and where it is a slice it begins at a multiple of that type's bytes:
        pad what precedes it. numpy and PyTorch raise where it does not; TensorFlow may copy such a slice.
        """

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        """Return the k entries of largest magnitude: (values (k,), indices int64 (k,)); ties to the lower index."""

    def take(self, flat_N: Array, index_k: Array) -> Array:
        """Elements at int64 indices: (N,), (k,) -> (k,)."""

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        """Return a zero vector of n elements with ``values_k`` added at ``index_k``; an index may repeat."""

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix product: (n, m), (m, k) -> (n, k)."""

    def transpose(self, a: Array) -> Array:
        """(n, m) -> (m, n)."""

    def orthogonalize(self, m_NR: Array) -> Array:
        """Columns made orthonormal by Gram-Schmidt, as in PowerSGD (Vogels et al., NeurIPS 2019)."""

    def sum_squares(self, x: Array) -> Array:
        """Scalar sum of the squares of all elements, in float32 at least."""

    def total(self, scalars: Sequence[Array]) -> Array | float:
        """Float64 sum of ``scalars``, added one after the other in their order; 0 without any. A float where they are
        in host memory, outside of a graph."""

    def abs_max(self, x: Array) -> Array:
        """Scalar largest magnitude; 0 of nothing."""

    def round(self, x: Array) -> Array:
        """To the nearest integer, ties to even; keeps the dtype."""

    def overwrite(self, x: Array, by: Array) -> Array:
        """Return ``by``, written to the memory of ``x`` where arrays can be written to (``writes``)."""

    def all_finite(self, x: Array) -> Array:
        """Scalar boolean array: no NaN and no infinity in ``x``."""

    def select(self, which: Array, x: Array, y: Array) -> Array:
        """``x`` where the scalar boolean array ``which`` is true, else ``y``."""

    def cell(self, value: Array) -> StateCell:
        """Make a cell that holds ``value``, on this backend's device; outside of any graph that is being traced."""

    def during_backward(self, wire: Collectives) -> Collectives:
        """Return collectives over ``wire`` that a sink may call while backward runs.

        ``wire`` itself, or, where backward is a graph and ``wire`` is not, one that is called as nodes of it.
        """

    def free_bytes(self) -> int | None:
        """Return the bytes that this rank's device has left, 0 where it cannot be told; None: it is host memory."""

    def to_host(self, x: Array) -> np.ndarray:
        """As numpy; may share memory with ``x``."""

    def from_host(self, x: np.ndarray) -> Array:
        """As this backend's array, on its device; may share memory with ``x``."""


class Compressor(Protocol):
    """Sums one flat bucket of gradients over the ranks; written once for all frameworks.

    ``dtypes``: of the buckets it takes; None: whatever the collectives sum. ``reductions``: beside "sum", what it
    asks of the collectives. ``own_mean``: it wants the mean over the rank's own samples, not its part of the global
    mean. ``elementwise``: it has no state and takes each element by itself, so that a bucket may be taken apart.
    ``in_place``: it sends a bucket as it lies, so that a transport may sum it in memory of the transport's own. The
    others: `hvdtrain.comm.compressors.base.Stateless`. State arrays are never written to: an exchange returns new
    ones, so that a step that is left out can be undone. A compressor must not hide what is not finite: NaN in, NaN
    out.
    """

    name: str
    dtypes: frozenset[str] | None
    reductions: frozenset[str]
    own_mean: bool
    elementwise: bool
    numerics: str
    bytes_share: float
    same_bits: bool
    auto_order: int
    not_auto: str
    warmup_steps: int
    own_key: str
    in_place: bool
    approximates: bool
    same_threads: bool
    own_momentum: str
    pairs_ranks: bool

    def describe(self) -> str:
        """Name and settings in short, for the summary; equal texts mean equal compression."""

    def stage(self, step: int) -> int:
        """Return the stage of a warm-up that step ``step`` (from 0) of the run belongs to; 0 where there is none.

        The numbers are few: a framework with graphs makes one for each.
        """

    def init(self, ops: Ops, bucket: Bucket) -> dict[str, Array]:
        """State of one bucket before its first exchange."""

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Yield requests, receive their results, return ``(sum_N, new state)``; same bits on every rank."""

    def scatter(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """As `exchange`, but return ``(this rank's shard of sum_N, new state)``: the same bits, for fewer bytes sent.

        A shard that is not finite need not be so on other ranks: whoever updates asks all of them.
        """

    def spread(self, ops: Ops, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """Gather the sums of 1/P of the bucket that each rank made and encoded: the second shot of an `exchange`.

        ``sum_K``: this rank's, K elements of the encoding for at least N / P of the sum. Returns the sum (N,).
        """

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Bytes one rank sends for a bucket; ``stage`` None is the one after any warm-up."""


class Optimizer(Protocol):
    """Updates trainable tensors from their gradients.

    ``elementwise``: an element's update depends on that element alone, so that flat slices of tensors are updated to
    the same bits as whole ones (SGD, Adam; not Adafactor, LAMB, or a clip of each tensor's own norm). A fused kernel
    may round the last elements of a tensor otherwise.
    ``looks``: on an asynchronous device `step` looks by itself whether gradients are finite, and `skipped` tells.
    ``needs_all``: what of it needs the gradients of all tensors of the model together, in words, or "".
    ``overruled``: keys of the configuration that the schedule, or the model file's optimizer, leaves without effect.
    ``changes``: settings of an optimizer that the model file or `compile` gives, as they differ from the checkpoint's.
    ``traced``: adds the update to the graph that is being traced, from (gradients, summed loss, clip_norm), and returns
    (squares of the gradients, 1 if updated else 0); None where there is no graph, or it may not hold the update.
    """

    elementwise: bool
    looks: bool
    needs_all: str
    overruled: frozenset[str]
    changes: list[str]

    @property
    def traced(self) -> Callable[[Sequence[Array], Array, float], Array] | None: ...

    def step(self, grads: Sequence[Array], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Clip by the global norm (0: no clipping) and update; return (finite, norm).

        ``grads``: a vector (n,) for each of ``buckets``, or where there are no buckets the gradient of each parameter
        in its own shape. The norm is computed where ``clip_norm``, ``look`` or a loss scale asks for it, else NaN; if
        it is not finite there is no update. On an asynchronous device that is not asked for the norm the device
        decides by itself, and `skipped` tells a step later.
        ``norm``: of the whole gradient, of which ``grads`` are a part, where the ranks have told each other: it is
        clipped by, and nothing is looked at here. NaN where no clipping asked for it.
        ``unused``: indices of tensors that have no gradient: they and their state stay as they are.
        """

    def skipped(self) -> bool:
        """Return whether the device left the update before this one out, as not finite; always False on CPUs."""

    def slots(self) -> Iterable[tuple[str, int, Array]]:
        """Yield what the optimizer remembers of each tensor: (slot, index of the tensor, array of its shape)."""

    def plain_sgd(self) -> bool:
        """Return whether the update is rate x gradient: no momentum, no memory of former gradients."""

    def bytes_to_come(self) -> int:
        """Return the bytes of the device that the first update will take; 0 where they are taken."""

    def learning_rate(self) -> float:
        """Return the rate of the next update."""

    def own_schedule(self) -> object | None:
        """Return the schedule that an optimizer of the model file or of `compile` was made with; None: it has none."""

    def end_epoch(self) -> None:
        """Let per-epoch schedules move on."""

    def evaluated(self, value: float) -> None:
        """Let a schedule that follows evaluations move by ``value`` of its metric, which is the same on all ranks."""

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        """Follow the settings of this run after a load, at the updates and ``epochs`` that the checkpoint counts.

        ``rescheduled``: the schedule is another than the checkpoint's, and holds as if from the start of the run.
        """

    def describe(self) -> dict[str, str]:
        """Return optimizer, rate and schedule in words, for the summary."""


class Params(Protocol):
    """The trainable tensors of this rank, singly and as flat buckets, in one deterministic order (``specs``)."""

    specs: list[ParamSpec]

    def made_of(self) -> list[str]:
        """Return a line for each parameter and buffer, such as "parameter fc.weight float32[5, 16]".

        What has to be the same on every rank that holds these parameters (`hvdtrain.engine.compare_ranks`).
        """

    def frozen(self) -> frozenset[int]:
        """Return the indices of those that are frozen for now."""

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> Array:
        """Return a copy of the tensors of ``bucket`` as one vector (n,); of its elements [begin, end), where those are
        asked for, maybe a view, good until they change."""

    def write(self, bucket: Bucket, flat_N: Array, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`; elements [begin, end) of ``known`` are in the tensors already and may be left out."""

    def optimizer(self, vectors: Sequence[Array]) -> Optimizer:
        """Return an optimizer of the run's kind over ``vectors`` in place of the tensors, with state of its own.

        Each vector (n,) is updated in place by `Optimizer.step` from one gradient (n,), without buckets.
        """

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Optimizer:
        """Return the run's optimizer over a slice of each tensor, in place of the one over all of them.

        ``spans``: one for each of ``specs``, its row-major elements [begin, end); (0, 0): none of it. `Optimizer.step`
        takes, without buckets, a gradient (end - begin,) for each, and updates those elements where they lie in the
        tensors. State is made for the slices alone and what the optimizer over whole tensors holds of them is taken
        over; that one gives its memory back. `slots` yields vectors (end - begin,).
        Errors: `UserError` naming an optimizer, or a setting of it, that is not ``elementwise``.
        """
