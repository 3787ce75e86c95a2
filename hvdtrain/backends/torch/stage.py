"""Forward and backward of a PyTorch model, whole or split over a rank's devices; `gradients` sends them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from hvdtrain.backends.misfit import one_sample
from hvdtrain.backends.torch import placement as devices_of
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.gradients import Gradients
from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.backends.torch.placement import Generators
from hvdtrain.backends.torch.transforms.placement import Placement
from hvdtrain.backends.torch.transforms.precision import MixedPrecision
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm
from hvdtrain.backends.torch.trial import first_not_finite, restoring
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, GradientSink, Pair
from hvdtrain.core.timeline import span
from hvdtrain.data.weighting import PlaceholderSample


class TorchStage:
    """Implements `hvdtrain.core.protocols.Stage`.

    ``task``: ``task(model, tensors) -> (loss_sum, weight)``. ``sync``: the transform of that name, where there is one.
    ``unrounded``: returns the task's pair in the model's own types. ``caveats``: returns what in the model depends on
    how a batch is divided.
    """

    def __init__(self, model: torch.nn.Module, task: Callable[..., Pair], params: TorchParams, buffers: Buffers,
                 placement: Placement, precision: MixedPrecision, sync: SyncBatchNorm | None, generators: Generators,
                 rank: int, caveats: Callable[[], list[str]]) -> None:
        self._model, self._task, self._params, self._buffers = model, task, params, buffers
        self._placement, self._precision, self._sync, self.generators = placement, precision, sync, generators
        self._rank, self._caveats = rank, caveats
        self.unrounded: Callable[[Batch], Pair] = lambda batch: task(model, placement.tensors(batch))
        self._back: Callable[[], None] = lambda: None
        # Synchronised layers wait for other ranks in backward: what else does so there could come in another order.
        self._gradients = Gradients(params, placement.on_its_device, early=sync is None)
        self._stand_in = PlaceholderSample()
        self.asynchronous = placement.on_gpu
        self.waited_s = self._waited_in_step_s = 0.0
        self._clock = devices_of.DeviceClock() if self.asynchronous else None

    @property
    def devices(self) -> list[torch.device]:
        return self._placement.devices

    @property
    def unused(self) -> frozenset[int]:
        return self._gradients.unused

    def connect(self, sink: GradientSink) -> None:
        self._gradients.connect(sink)

    def disconnect(self) -> None:
        self._gradients.disconnect()

    def begin(self) -> None:
        self._back = self.generators.mark()
        self._buffers.keep()
        self._waited_in_step_s = 0.0
        if self._clock:
            self._clock.start()
        self._gradients.forget()

    def rewind(self) -> None:
        self._back()

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        samples = len(micro[0])
        self._buffers.saw(samples)
        factor, undo = self._precision.factor, None
        if self._sync:
            self._sync.begin(factor, samples > 0)
            if samples:
                self._stand_in.saw(micro)
            else:
                micro, scale, undo = self._stand_in.instead(micro), 0.0, self._buffers.undone()
        with span("forward", samples=samples):
            loss_sum, weight = self.loss_of(micro)
        with span("backward"):
            self._gradients.backward(loss_sum * (scale * factor), factor, final, empty=not samples)
        if undo is not None:
            undo()
        if self._sync:
            self.waited_s = self._sync.waited_s
            self._waited_in_step_s += self.waited_s
        if final and self._clock:
            self._clock.stop()
        return (loss_sum.detach(), weight) if samples else (0.0, 0.0)

    def loss_of(self, batch: Batch) -> Pair:
        """Return the task's (loss_sum, weight); `UserError` for what is no loss, or too few samples for BatchNorm."""
        tensors = self._placement.tensors(batch)
        with few_samples(self._rank), self._precision.computing():
            loss_sum, weight = self._task(self._model, tensors)
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() != 0:
            shape = tuple(getattr(loss_sum, "shape", ()))
            raise UserError(f"task returned a loss of type {type(loss_sum).__name__} and shape {shape}",
                            "(loss_sum, weight) with a scalar loss_sum", "sum the loss in the model file's task")
        return loss_sum, weight

    def nothing(self, sink: GradientSink, poison: bool = False) -> None:
        self.waited_s = 0.0
        if poison:
            self._gradients.poison()
        else:
            self._gradients.nothing()
        if self._clock:
            self._clock.stop()

    def ahead(self, batch: Batch) -> None:
        self._placement.uploads.ahead(batch)

    def spare(self, batch: Batch) -> None:
        self._stand_in.saw(batch)

    def trial(self, batch: Batch) -> None:
        with self.once(batch):
            pass

    def culprit(self, batch: Batch) -> str:
        with self._once_after_step(batch):
            found = first_not_finite(self._params.tensors)
        return "" if found is None else self._params.names[found]

    def alone(self, batch: Batch) -> list[torch.Tensor]:
        factor = self._precision.factor
        with self._once_after_step(batch, factor):
            return [torch.zeros_like(p) if p.grad is None else p.grad.div_(factor) for p in self._params.tensors]

    def _once_after_step(self, batch: Batch, factor: float = 1.0) -> contextlib.AbstractContextManager[None]:
        """Drop the gradients of a step, to which backward would add, and return `once`."""
        for param in self._params.tensors:
            param.grad = None
        return self.once(batch, factor)

    @contextlib.contextmanager
    def once(self, batch: Batch, factor: float = 1.0) -> Iterator[None]:
        """Compute the gradients of a batch, available within the body; everything is restored afterwards."""
        if self._sync and len(batch[0]) == 1:  # one rank's own statistics need more than one value
            batch = tuple(np.repeat(array, 2, axis=0) for array in batch)
        alone = self._sync.local_statistics() if self._sync else contextlib.nullcontext()
        with restoring(self._model, self._params.tensors, self.generators), alone:
            loss_sum, _ = self.loss_of(batch)
            if loss_sum.requires_grad:
                (loss_sum * (factor / max(1, len(batch[0])))).backward()
            devices_of.synchronize(self.devices)
            yield

    def device_s(self) -> float | None:
        found_s = self._clock.seconds() if self._clock else None
        return found_s if found_s is None else max(0.0, found_s - self._waited_in_step_s)

    def describe(self) -> dict[str, str]:
        """Return {}: transforms describe devices, split and types."""
        return {}

    def caveats(self) -> list[str]:
        return self._caveats()


@contextlib.contextmanager
def few_samples(rank: int) -> Iterator[None]:
    """Turn BatchNorm's complaint about a micro-batch of one sample into a `UserError`."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel when training" not in str(error):
            raise
        raise one_sample(rank) from error
