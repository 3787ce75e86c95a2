"""Loss and metrics of a PyTorch model as sums, by torch's own names, in training and evaluation.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` replaces the loss by name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.backends.pairs import Pair, Totals, checked_pair, means, of_model_file
from hvdtrain.backends.torch.losses import Loss, refuse_other_inputs, squeezed
from hvdtrain.backends.torch.modules import set_modes
from hvdtrain.backends.torch.transforms import precision
from hvdtrain.backends.torch.transforms.placement import Placement
from hvdtrain.backends.torch.transforms.precision import MixedPrecision
from hvdtrain.config import Config, Named
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols import Batch
from hvdtrain.core.resolve import load_callable

Tensors = tuple[torch.Tensor, ...]


def make_task(spec: Any, config: Config) -> Callable[[torch.nn.Module, Tensors], Pair]:
    """Return ``task(model, batch) -> (loss_sum, weight)``; `UserError` for an unknown loss."""
    return ByName(config) if spec.task is None else _users(spec.task)


class ByName:
    """Compute (loss_sum, weight) of the configured loss.

    The loss of each element is averaged over a sample's trailing dimensions, weighted by the batch's third array if
    there is one, and summed; the weight is the number of samples. A loss of labels (cross_entropy, nll_loss) weighs
    less where labels are ignored, and by ``loss.args.weight``. ``batch_weight``: weighs a numpy batch alike; None where
    that is the number of samples. ``ignored``: see `Loss`.
    """

    def __init__(self, config: Config) -> None:
        self._named, self._loss = config.loss, Loss(config.loss, config.mixes_classes)
        self.batch_weight, self.ignored = self._loss.batch_weight, self._loss.ignored

    def __call__(self, model: torch.nn.Module, batch: Tensors) -> Pair:
        """Run the model on a batch."""
        x, targets, extra = _parts(batch)
        return self.pair(precision.widened(model(x)), targets, extra)

    def pair(self, outputs: torch.Tensor, targets: torch.Tensor, extra: Tensors) -> Pair:
        """Return (loss_sum, weight) of what the model gave."""
        return loss_sum(self._loss, outputs, targets, extra, self._named), self._loss.weight(targets)


def _users(task: Callable[..., Any]) -> Callable[..., Pair]:
    """Return a model file's task with its result checked."""
    def checked(model: torch.nn.Module, batch: Tensors) -> Pair:
        return checked_pair(task(model, batch))
    return checked


def _parts(batch: Tensors) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Return (x, targets, sample weights or nothing) of a batch of two or three arrays."""
    if len(batch) not in (2, 3):
        raise UserError(f"a sample has {len(batch)} arrays", "(x, y) or (x, y, sample_weight)",
                        "define task(model, batch) and weight(batch) in the model file for others")
    return batch[0], batch[1], tuple(batch[2:])


def loss_sum(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], outputs: torch.Tensor, targets: torch.Tensor,
             extra: Tensors, named: Named) -> torch.Tensor:
    """Sum over samples of the per-sample mean of an unreduced loss, times sample weights (B elements) if given.

    Of a loss with reduction ``batchmean`` the per-sample sum.

    Errors: `UserError`, with the loss as ``named``, where it cannot be evaluated, has not one row per sample, or has
    broadcast outputs and targets of different shapes, and for weights that are not one per sample.
    """
    if not isinstance(outputs, torch.Tensor):
        raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, where the loss is by name",
                        "give the model file a task(model, batch) -> (loss_sum, weight)")
    try:
        with precision.full(outputs):
            per_sample = loss(outputs, targets)
    except (IndexError, ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in ("CUDA error", "memory")):
            raise  # of the machine, not of the data
        raise _refused(error, outputs, targets, named) from error
    n = targets.shape[0]
    if per_sample.dim() == 0 or per_sample.shape[0] != n or _broadcast(per_sample, outputs, targets):
        raise UserError(f"the model's output has shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}, "
                        f"which gives a loss of shape {tuple(per_sample.shape)}",
                        f"one loss for each of the {n} samples", "reshape the targets, or the output in the model")
    if per_sample.dim() > 1:
        per_sample = per_sample.flatten(1)
        per_sample = per_sample.sum(1) if named.args.get("reduction") == "batchmean" else per_sample.mean(1)
    if not extra:
        return per_sample.sum()
    if extra[0].numel() != n:
        raise UserError(f"the batch's third array has shape {tuple(extra[0].shape)}",
                        f"one weight for each of the {n} samples",
                        "give sample weights of shape (B,), or a task in the model file")
    return (per_sample * extra[0].reshape(n)).sum()


def _refused(error: Exception, outputs: torch.Tensor, targets: torch.Tensor, named: Named) -> UserError:
    """Return the error of a loss that torch could not evaluate: of class numbers out of range first."""
    got = f"the model's output is {_kind(outputs)} and the targets are {_kind(targets)}"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not targets.is_floating_point() and targets.numel():
        real = targets[targets != named.args.get("ignore_index", -100)]
        low, high = (int(real.min()), int(real.max())) if real.numel() else (0, 0)
        classes = outputs.shape[1] if outputs.dim() > 1 else 1
        if classes > 1 and (low < 0 or high >= classes):
            return UserError(f"loss {named.name}: {got}; targets run from {low} to {high} (torch: {said})",
                             f"0..{classes - 1} for a model with {classes} outputs",
                             "number the classes from 0, or give the model more outputs")
        got += f" from {low} to {high}"
    return UserError(f"loss {named.name} refused its inputs: {got} (torch: {said})",
                     "shapes and types that the loss takes",
                     "correct loss, the targets, or the model's output")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast(per_sample: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return whether a loss of single elements broadcast shapes that differ, such as (B, 1) and (B,) to (B, B)."""
    if outputs.shape == targets.shape:
        return False
    try:
        return per_sample.shape == torch.broadcast_shapes(outputs.shape, targets.shape)
    except RuntimeError:  # a loss over classes, whose shapes cannot be spread
        return False


class Metrics:
    """Running (sum, weight) totals of the loss and of the configured metrics."""

    def __init__(self, spec: Any, config: Config, task: Callable[..., Pair]) -> None:
        self._spec, self._task = spec, task
        self._by_name = ByName(config) if spec.task is None else None
        ignored = None if self._by_name is None else self._by_name.ignored
        names = config.metrics if spec.task is None else []
        self._named = {name: _metric(name, config.loss.name, ignored) for name in names}
        self._totals = Totals()

    def add(self, model: torch.nn.Module, batch: Tensors) -> None:
        """Add one batch; the model runs once, or again for a model file that defines ``metrics``."""
        if self._by_name is None:
            self._totals.add(of_model_file(self._task, self._spec.metrics, model, batch))
            return
        x, targets, extra = _parts(batch)
        outputs = precision.widened(model(x))
        pairs = {"loss": self._by_name.pair(outputs, targets, extra)}
        for name, metric in self._named.items():
            pairs[name] = checked_pair(metric(outputs, targets), f"metric {name!r}", "(sum, weight)")
        self._totals.add(pairs)

    def take(self) -> dict[str, np.ndarray]:
        return self._totals.take()


def _metric(name: str, loss: str, ignored: int | None) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """Return ``accuracy``, an unreduced torch.nn.functional loss, or a user's ``module:callable``.

    ``ignored``: the label that the run's ``loss`` and so built-in metrics do not count.
    """
    if name == "accuracy":
        return partial(_accuracy, loss=loss.lower(), ignored=ignored)
    if ":" in name:
        return load_callable(name, "metrics")
    by_name = getattr(functional, name, None)
    if callable(by_name) and "reduction" in inspect.signature(by_name).parameters:
        refuse_other_inputs(by_name, Named(name))
        of_labels = name in ("cross_entropy", "nll_loss") and ignored is not None
        named = Named(name, {"ignore_index": ignored} if of_labels else {})
        measured = Loss(named)
        return lambda o, t: (loss_sum(measured, o, t, (), named), measured.weight(t))
    raise UserError(f"metric {name!r} is unknown to the PyTorch backend",
                    nearest(name, ["accuracy", "mse_loss", "l1_loss", "cross_entropy"]) + " or module:callable",
                    "correct metrics")


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor, loss: str, ignored: int | None = None) -> Pair:
    """Return (right answers, answers): arg-max over dimension 1 (of targets too where they are shares of classes).

    Labels ``ignored`` are no answers. Yes-or-no targets, known by a single output or by a ``loss`` of that kind, are
    right on their side of the threshold: 0 for logits, 0.5 for probabilities.
    """
    if targets.is_floating_point() and outputs.shape == targets.shape:
        yes_or_no = any(word in loss for word in ("binary", "bce", "multilabel"))
        if outputs.dim() == 1 or outputs.shape[-1] == 1 or yes_or_no:
            threshold = 0.5 if loss in ("binary_cross_entropy", "bceloss") else 0.0
            right = (outputs > threshold) == (targets > 0.5)
            return right.sum(), right.numel()
        targets, ignored = targets.argmax(dim=1), None
    else:
        targets = squeezed(targets, outputs)
    answers = outputs.argmax(dim=1)
    if answers.shape != targets.shape:
        raise UserError(f"accuracy has answers of shape {tuple(answers.shape)} and targets {tuple(targets.shape)}",
                        "equal shapes", "reshape the targets, or take accuracy out of metrics")
    right = answers == targets
    if ignored is None:
        return right.sum(), right.numel()
    counts = targets.long() != ignored
    return (right & counts).sum(), counts.sum()


class TorchEvaluator:
    """Implements `hvdtrain.core.protocols.Evaluator`; ``metrics``: a `hvdtrain.backends.torch.task.Metrics`."""

    def __init__(self, model: torch.nn.Module, metrics: Any, placement: Placement, precision: MixedPrecision) -> None:
        self._model, self._metrics, self._placement, self._precision = model, metrics, placement, precision

    def add(self, batch: Batch) -> None:
        with self.evaluating():
            self.measure(self._placement.tensors(batch))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute as an evaluation does within the body; modes are restored."""
        modes = {m: m.training for m in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad(), self._precision.computing():
                yield
        finally:
            set_modes(self._model, modes)

    def measure(self, batch: tuple[torch.Tensor, ...]) -> None:
        """Add one batch of tensors in the modes of an evaluation."""
        self._metrics.add(self._model, batch)

    def totals(self) -> dict[str, np.ndarray]:
        return dict(self._metrics.take())

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        return means(totals)
