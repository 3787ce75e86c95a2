"""The seam of a model and of its training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdtrain.protocols.arrays import Batch, Pair

if TYPE_CHECKING:
    from hvdtrain.precision.policy import Precision
    from hvdtrain.precision.scaler import LossScale


@dataclass(frozen=True)
class ParamSpec:
    """One trainable tensor as the exchange sees it: deterministic name, shape, numpy dtype name.

    ``place``: which of the rank's devices it lives on, 0 but for models that are split over several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int = 0

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
    it is ``on``. ``table``: how the model is split over devices, for people; "" where it is whole.
    """

    asynchronous: bool
    table: str
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

    def made_of(self) -> list[str]:
        """One line for each parameter and buffer, such as "parameter fc.weight float32[5, 16]"; optimizer and schedule.

        What has to be the same on every rank that holds these parameters (`hvdtrain.alike`).
        """
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

    def squares(self) -> float:
        """Return the sum of squares over this rank's part of the summed gradients, after `exchange`.

        Over all ranks they add up to the square of the global norm; NaN or infinite where a gradient is not finite, or
        so large that its square overflows float32 (1.8e19). 0 where the gradients are still on an asynchronous device:
        there `apply` looks.
        """
        ...

    def skipped(self) -> bool:
        """Return whether the device left the update before this step out, as not finite; always False on CPUs."""
        ...

    def culprit(self, batch: Batch) -> str:
        """Compute a micro-batch's gradient once more, for itself; return the first parameter where it is not finite.

        "" where all of it is finite. Like `trial` it exchanges nothing and leaves nothing behind.
        """
        ...

    def apply(self, clip_norm: float, check: bool) -> tuple[bool, float]:
        """Clip by the global norm (0: no clipping) and update.

        Returns (finite, norm). The norm is computed where ``clip_norm``, ``check`` or a loss scale asks for it, else
        NaN; if it is not finite there is no update. Reduced gradients are the same bits on every rank, so every rank
        takes the same decision without a further vote. On an asynchronous device that is not asked for the norm the
        device decides by itself, and `skipped` tells a step later.
        """
        ...

    def discard(self) -> None:
        """Undo what the step did to buffers and compressor state: there will be no update.

        Compressor state is taken back with ``nan_guard: skip`` and with a loss scale.
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
