"""Every seam of the house as a `typing.Protocol`.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from hvdtrain.events import Event
    from hvdtrain.exchange.buckets import Bucket
    from hvdtrain.precision.policy import Precision
    from hvdtrain.precision.scaler import LossScale

Array = Any
Batch = tuple[Any, ...]
Pair = tuple[Any, Any]


# --- control plane -------------------------------------------------------------------------------------------------

class Control(Protocol):
    """Moves small Python objects and decisions between the ranks of a job.

    Every method but `abort` is collective: all ranks call it in the same order. Each wait is bounded by the
    control's ``timeout_s``; when it runs out `WaitTimeout` names the wait. Objects are pickled, inside the job only.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str

    def bcast(self, obj: Any) -> Any:
        """Return rank 0's ``obj`` on every rank."""
        ...

    def gather(self, obj: Any) -> list[Any]:
        """Return the list of every rank's ``obj``, by rank, on every rank."""
        ...

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the float64[k] sum over ranks, the same bits on every rank."""
        ...

    def agree(self, flag: bool) -> bool:
        """Return True on every rank if any rank's ``flag`` is true (law 6)."""
        ...

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        """Return once every rank is here; ``tag`` names the place in the error of a wait that ran out."""
        ...

    def abort(self, code: int) -> None:
        """End every rank at once with exit status ``code``; does not return in a job of several ranks."""
        ...


# --- data plane ----------------------------------------------------------------------------------------------------

class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Array:
        """Return the result; waits for it outside a graph, returns the symbolic tensor inside one."""
        ...


class Collectives(Protocol):
    """Moves gradients: each call takes a deterministic ``name`` and returns a `Handle` (law 5).

    ``dtypes``: names of the dtypes `allreduce` sums. ``overlaps``: work goes on while a handle is open.
    ``in_graph``: may be called while TensorFlow traces. ``host``: takes and gives numpy arrays; a backend converts.
    ``reductions``: what `allreduce` can do beside "sum". An `allreduce` may reuse the memory of its argument.
    """

    name: str
    rank: int
    size: int
    dtypes: frozenset[str]
    reductions: frozenset[str]
    overlaps: bool
    in_graph: bool
    host: bool

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        """(n,) zeros that `allreduce` sums without a copy, or None where it has no such memory.

        Collective: every rank asks for the same buffers in the same order, before its first exchange.
        """
        ...

    def allreduce(self, flat_N: Array, name: str, op: str = "sum") -> Handle:
        """Combine over ranks, by sum or by another of ``reductions``: (N,) -> (N,)."""
        ...

    def allgather(self, x_K: Array, name: str) -> Handle:
        """Every rank's vector, by rank: (K,) -> (P, K)."""
        ...

    def alltoall(self, x_PK: Array, name: str) -> Handle:
        """Row p goes to rank p; row q of the result came from rank q: (P, K) -> (P, K)."""
        ...

    def reducescatter(self, flat_N: Array, name: str) -> Handle:
        """This rank's 1/P of the sum over ranks: (N,) -> (N/P,); N is a multiple of P."""
        ...

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> Handle:
        """``root``'s vector on every rank: (N,) -> (N,)."""
        ...


class Ops(Protocol):
    """The functional array operations that the core and the compressors need, one implementation per backend.

    ``+ - * / abs`` of the arrays themselves are used as they are. Dtypes are given by numpy's names.
    """

    name: str

    def zeros(self, n: int, dtype: str) -> Array:
        """(n,) zeros."""
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """The same shape in another dtype."""
        ...

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """The same elements, row-major, in another shape."""
        ...

    def pack(self, xs: Sequence[Array]) -> Array:
        """Flatten and join: arrays of any shape -> (N,)."""
        ...

    def unpack(self, flat_N: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """Undo `pack`."""
        ...

    def bits16(self, x: Array) -> Array:
        """The bits of float32 ``x`` rounded to bfloat16 (to nearest, ties to even), as int16."""
        ...

    def from_bits16(self, bits: Array) -> Array:
        """Undo `bits16`: int16 -> float32."""
        ...

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The bits of a vector read as another dtype: (n,) -> (n * itemsize / itemsize of ``dtype``,)."""
        ...

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        """The k entries of largest magnitude: (values (k,), indices int64 (k,)); ties to the lower index."""
        ...

    def take(self, flat_N: Array, index_k: Array) -> Array:
        """Elements at int64 indices: (N,), (k,) -> (k,)."""
        ...

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        """A zero vector of n elements with ``values_k`` added at ``index_k``; an index may repeat."""
        ...

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix product: (n, m), (m, k) -> (n, k)."""
        ...

    def transpose(self, a: Array) -> Array:
        """(n, m) -> (m, n)."""
        ...

    def orthogonalize(self, m_NR: Array) -> Array:
        """Columns made orthonormal by Gram-Schmidt, as in PowerSGD (Vogels et al., NeurIPS 2019)."""
        ...

    def sum_squares(self, x: Array) -> Array:
        """Scalar sum of the squares of all elements, in float32 at least."""
        ...

    def abs_max(self, x: Array) -> Array:
        """Scalar largest magnitude; 0 of nothing."""
        ...

    def round(self, x: Array) -> Array:
        """To the nearest integer, ties to even; keeps the dtype."""
        ...

    def all_finite(self, x: Array) -> Array:
        """Scalar boolean array: no NaN and no infinity in ``x``."""
        ...

    def to_host(self, x: Array) -> np.ndarray:
        """As numpy; may share memory with ``x``."""
        ...

    def from_host(self, x: np.ndarray) -> Array:
        """As this backend's array, on its device; may share memory with ``x``."""
        ...


# --- compression ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class AllReduce:
    """Ask the driver of a compressor's generator for a sum over ranks of ``flat_N``, or another reduction ``op``."""

    flat_N: Array
    op: str = "sum"


@dataclass(frozen=True)
class AllGather:
    """Ask for every rank's ``x_K``: the answer has shape (P, K)."""

    x_K: Array


@dataclass(frozen=True)
class AllToAll:
    """Ask for the exchange of rows of ``x_PK``: the answer has shape (P, K)."""

    x_PK: Array


Request = AllReduce | AllGather | AllToAll
Exchange = Generator[Request, Array, tuple[Array, dict[str, Array]]]


class Compressor(Protocol):
    """How one flat bucket of gradients is summed over the ranks; written once for all frameworks.

    ``dtypes``: of the buckets it takes; None: whatever the collectives sum. ``reductions``: beside "sum", what it
    asks of the collectives. ``own_mean``: it wants the mean over the rank's own samples, not its part of the global
    mean. State arrays are never written to: an exchange returns new ones, so that a step that is
    left out can be undone. A compressor must not hide what is not finite: NaN in, NaN out.
    """

    name: str
    dtypes: frozenset[str] | None
    reductions: frozenset[str]
    own_mean: bool

    def describe(self) -> str:
        """Name and settings in short, for the summary; equal texts mean equal compression."""
        ...

    def stage(self, step: int) -> int:
        """Which stage of a warm-up step ``step`` (from 0) of the run belongs to; 0 where there is none.

        The numbers are few: a framework with graphs makes one for each.
        """
        ...

    def init(self, ops: Ops, bucket: Bucket) -> dict[str, Array]:
        """State of one bucket before its first exchange."""
        ...

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Yield requests, receive their results, return ``(sum_N, new state)``; same bits on every rank."""
        ...

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Bytes one rank sends for a bucket; ``stage`` None is the one after any warm-up."""
        ...


# --- model, step, callbacks ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ParamSpec:
    """One trainable tensor as the exchange sees it: deterministic name, shape, numpy dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class ModelSpec(Protocol):
    """What a model file offers beside its ``build``; everything but ``model`` may be None and is then adapted."""

    name: str
    model: Any
    task: Any
    weight: Any
    blocks: Any
    example: Any
    metrics: Any


class Step(Protocol):
    """One framework's way to compute, exchange and apply gradients.

    Scalars it returns may still be on the device: with ``asynchronous`` set, reading one waits for the device.
    ``waited_s``: seconds that the last `forward_backward` waited for other ranks, 0 where that is never in it.
    ``precision``: what every rank computes in; ``scale``: the loss scale, with which gradients are always checked where
    it is ``on``.
    """

    asynchronous: bool
    waited_s: float
    precision: Precision
    scale: LossScale

    def attach(self, reducer: Any) -> None:
        """Take the reducer over ``params()``, before the first step or, in place of another, between two steps.

        A reducer that comes later has the same buckets.
        """
        ...

    def share_initial(self) -> None:
        """Give every rank rank 0's variables; collective."""
        ...

    def describe(self) -> dict[str, str]:
        """Optimizer, rate, schedule and what is done to them, in words, for the summary."""
        ...

    def caveats(self) -> list[str]:
        """What in this model depends on how a batch is cut (unsynchronised BatchNorm, dropout), in words (law 2)."""
        ...

    def plain_sgd(self) -> bool:
        """Whether the update is rate x gradient, with no memory of former gradients: no momentum, no Adam."""
        ...

    def params(self) -> list[ParamSpec]:
        """The trainable tensors, in a deterministic order."""
        ...

    def zero(self) -> None:
        """Forget the gradients of the step before."""
        ...

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Pair:
        """Add the gradient of ``loss_sum * scale``; return ``(loss_sum, weight)`` of this micro-batch, unscaled.

        ``batch``: numpy arrays of shape (B, ...); B is 0 only with ``sync_batchnorm``.
        On the ``last`` micro-batch of a step the exchange begins.
        """
        ...

    def join(self) -> None:
        """Take the model for training or evaluation: a run has it from `attach` on, and again after `leave`."""
        ...

    def leave(self) -> None:
        """Give the model back as its user made it: no hooks, no joint statistics, its own compute types.

        Whoever calls the model after a run, on one rank alone say, must not wait for other ranks.
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

    def bytes_to_come(self) -> int:
        """Bytes of the device that the optimizer will take with its first update; 0 where it has them."""
        ...

    def device_s(self) -> float | None:
        """Seconds that the device computed for the latest step it has ended, or None where the host's clock tells."""
        ...

    def exchange(self) -> float:
        """Complete the sum over ranks (start it if there was no micro-batch); return the seconds waited."""
        ...

    def apply(self, clip_norm: float, check: bool) -> tuple[bool, float]:
        """Clip by the global norm (0: no clipping) and update.

        Returns (finite, norm). The norm is computed where ``clip_norm``, ``check`` or a loss scale asks for it, else
        NaN; if it is not finite there is no update. Reduced gradients are the same bits on every rank, so every rank
        takes the same decision without a further vote.
        """
        ...

    def discard(self) -> None:
        """Undo what the step did to buffers and compressor state: there will be no update.

        With ``nan_guard: skip``, and after an overflow in fp16.
        """
        ...

    def evaluate(self, batch: Batch) -> None:
        """Add one batch to the running totals of the metrics."""
        ...

    def eval_totals(self) -> dict[str, np.ndarray]:
        """Additive float64[k] state of each metric this rank saw (maybe none) since the last call; resets them."""
        ...

    def eval_results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Metrics by name, from totals that were summed over ranks."""
        ...

    def learning_rate(self) -> float:
        """The rate that the next update will use."""
        ...

    def end_epoch(self) -> None:
        """Let per-epoch schedules move on."""
        ...

    def sync_buffers(self) -> None:
        """Average the non-trainable state that ranks update on their own (BatchNorm statistics); collective."""
        ...

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """(groups of named arrays: "model", "optimizer"; JSON-able rest), the same on every rank."""
        ...

    def rank_state(self) -> dict[str, np.ndarray]:
        """This rank's own state: random generators, compressor state."""
        ...

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`."""
        ...

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; return in words what of it did not fit and starts anew, or ""."""
        ...

    def export(self, directory: Any) -> list[str]:
        """Write the final model in safetensors and the framework's native format; return the file names."""
        ...


class Callback(Protocol):
    """Observes a run: a method per `Event` it cares for, called with the run.

    ``where``: "root" (rank 0 only; gets no group, so it cannot enter a collective) or "all".
    ``every``: "N step", "N epoch" or "N s" thins out STEP_END (root only for seconds); "" is every time.
    """

    where: str
    every: str

    def on(self, event: Event, run: Any) -> None:
        """See one moment."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        ...

    def restored(self, run: Any) -> None:
        """See the run between `load_state_dict` and the return of what each rank owns, such as compressor state."""
        ...


class Launcher(Protocol):
    """Turns a launch into a command line without running it."""

    def command(self, spec: Any) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment); pure."""
        ...
