"""The seams of a model's trainable tensors and of their update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from hvdtrain.core.protocols.types import Array, Bucket, ParamSpec


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
    def traced(self) -> Callable[[Sequence[Array], Array, float], Array] | None:
        """See above."""
        ...

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
        ...

    def skipped(self) -> bool:
        """Return whether the device left the update before this one out, as not finite; always False on CPUs."""
        ...

    def slots(self) -> Iterable[tuple[str, int, Array]]:
        """Yield what the optimizer remembers of each tensor: (slot, index of the tensor, array of its shape)."""
        ...

    def plain_sgd(self) -> bool:
        """Return whether the update is rate x gradient: no momentum, no memory of former gradients."""
        ...

    def bytes_to_come(self) -> int:
        """Return the bytes of the device that the first update will take; 0 where they are taken."""
        ...

    def learning_rate(self) -> float:
        """Return the rate of the next update."""
        ...

    def own_schedule(self) -> object | None:
        """Return the schedule that an optimizer of the model file or of `compile` was made with; None: it has none."""
        ...

    def end_epoch(self) -> None:
        """Let per-epoch schedules move on."""
        ...

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        """Follow the settings of this run after a load, at the updates and ``epochs`` that the checkpoint counts.

        ``rescheduled``: the schedule is another than the checkpoint's, and holds as if from the start of the run.
        """
        ...

    def describe(self) -> dict[str, str]:
        """Return optimizer, rate and schedule in words, for the summary."""
        ...


class Params(Protocol):
    """The trainable tensors of this rank, singly and as flat buckets, in one deterministic order (``specs``)."""

    specs: list[ParamSpec]

    def made_of(self) -> list[str]:
        """Return a line for each parameter and buffer, such as "parameter fc.weight float32[5, 16]".

        What has to be the same on every rank that holds these parameters (`hvdtrain.engine.compare_ranks`).
        """
        ...

    def frozen(self) -> frozenset[int]:
        """Return the indices of those that are frozen for now."""
        ...

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> Array:
        """Return a copy of the tensors of ``bucket`` as one vector (n,); of its elements [begin, end), where those are
        asked for, maybe a view, good until they change."""
        ...

    def write(self, bucket: Bucket, flat_N: Array, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`; elements [begin, end) of ``known`` are in the tensors already and may be left out."""
        ...

    def optimizer(self, vectors: Sequence[Array]) -> Optimizer:
        """Return an optimizer of the run's kind over ``vectors`` in place of the tensors, with state of its own.

        Each vector (n,) is updated in place by `Optimizer.step` from one gradient (n,), without buckets.
        """
        ...

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Optimizer:
        """Return the run's optimizer over a slice of each tensor, in place of the one over all of them.

        ``spans``: one for each of ``specs``, its row-major elements [begin, end); (0, 0): none of it. `Optimizer.step`
        takes, without buckets, a gradient (end - begin,) for each, and updates those elements where they lie in the
        tensors. State is made for the slices alone and what the optimizer over whole tensors holds of them is taken
        over; that one gives its memory back. `slots` yields vectors (end - begin,).
        Errors: `UserError` naming an optimizer, or a setting of it, that is not ``elementwise``.
        """
        ...
