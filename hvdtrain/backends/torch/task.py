"""Loss and metrics of a PyTorch model as sums, by torch's own names.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` comes before everything here. Without one the loss is
evaluated per element, averaged over a sample's trailing dimensions, weighted by the batch's third array if there is
one, and summed over the samples; the weight is the number of samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.backends.torch.transforms import precision
from hvdtrain.config import Config, Named
from hvdtrain.errors import UserError, nearest
from hvdtrain.pairs import Pair, Totals, checked_pair, of_model_file
from hvdtrain.resolve import load_callable

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_task(spec: Any, config: Config) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], Pair]:
    """Return ``task(model, batch) -> (loss_sum, weight)``; `UserError` for an unknown loss."""
    if spec.task is not None:
        return _users(spec.task)
    named = config.loss
    fixed = None if named.name == "auto" else _loss(named)

    def task(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Pair:
        x, targets, extra = _parts(batch)
        outputs = precision.widened(model(x))
        loss = fixed or _auto(targets, named.args, config.mixes_classes)
        return loss_sum(loss, outputs, targets, extra, named), targets.shape[0]

    return task


def _users(task: Callable[..., Any]) -> Callable[..., Pair]:
    """A model file's task, whose result is looked at."""
    def checked(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Pair:
        return checked_pair(task(model, batch))
    return checked


def _parts(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(x, targets, sample weights or nothing) of a batch of two or three arrays."""
    if len(batch) not in (2, 3):
        raise UserError(f"a sample has {len(batch)} arrays", "(x, y) or (x, y, sample_weight)",
                        "define task(model, batch) and weight(batch) in the model file for others")
    return batch[0], batch[1], tuple(batch[2:])


def loss_sum(loss: Loss, outputs: torch.Tensor, targets: torch.Tensor, extra: tuple[torch.Tensor, ...],
             named: Named) -> torch.Tensor:
    """Sum over samples of the per-sample mean of an unreduced loss, times sample weights (B elements) if given.

    Errors: `UserError`, with the loss as ``named``, where it cannot be evaluated, has not one row per sample, or has
    spread outputs and targets of different shapes over each other, and for weights that are not one per sample.
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
        per_sample = per_sample.flatten(1).mean(1)
    if not extra:
        return per_sample.sum()
    if extra[0].numel() != n:
        raise UserError(f"the batch's third array has shape {tuple(extra[0].shape)}",
                        f"one weight for each of the {n} samples",
                        "give sample weights of shape (B,), or a task in the model file")
    return (per_sample * extra[0].reshape(n)).sum()


def _refused(error: Exception, outputs: torch.Tensor, targets: torch.Tensor, named: Named) -> UserError:
    """In words, that torch could not evaluate the loss ``named``: of class numbers out of range first."""
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
    """Whether a loss of single elements met shapes that differ, such as (B, 1) and (B,), which spread to (B, B)."""
    if outputs.shape == targets.shape:
        return False
    try:
        return per_sample.shape == torch.broadcast_shapes(outputs.shape, targets.shape)
    except RuntimeError:  # a loss over classes, whose shapes cannot be spread
        return False


def _auto(targets: torch.Tensor, args: dict[str, Any], mixes: bool) -> Loss:
    """Cross entropy for integer targets, and for shares of classes where the run ``mixes`` them; else squared error."""
    if targets.is_floating_point():
        if mixes:
            return lambda o, t: functional.cross_entropy(o, _same_shape(t, o, "cross entropy"), reduction="none",
                                                         **args)
        return lambda o, t: functional.mse_loss(o, _same_shape(t, o), reduction="none", **args)

    def loss(outputs: torch.Tensor, class_numbers: torch.Tensor) -> torch.Tensor:
        if outputs.dim() < 2 or outputs.shape[1] == 1:
            raise UserError(f"the targets are integers and the model's output has shape {tuple(outputs.shape)}",
                            "one output per class",
                            "set loss, for example to binary_cross_entropy_with_logits with floating-point targets")
        return functional.cross_entropy(outputs, _squeezed(class_numbers, outputs).long(), reduction="none", **args)
    return loss


def _squeezed(class_numbers: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Class numbers (B, 1, ...) for outputs (B, C, ...) as (B, ...)."""
    column = class_numbers.dim() == outputs.dim() and class_numbers.shape[1] == 1
    return class_numbers.squeeze(1) if column else class_numbers


def _same_shape(targets: torch.Tensor, outputs: torch.Tensor, loss: str = "squared error") -> torch.Tensor:
    """``targets``, unless torch would broadcast (B,) against (B, 1) to (B, B)."""
    if targets.shape != outputs.shape:
        raise UserError(f"the model's output has shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}",
                        f"equal shapes for {loss}", "reshape the targets, or the output in the model")
    return targets


def _loss(named: Named) -> Loss:
    """A loss of torch.nn.functional (``cross_entropy``) or torch.nn (``CrossEntropyLoss``), unreduced."""
    functions = {n: f for n, f in vars(functional).items()
                 if n.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")) and callable(f)}
    classes = {n: c for n, c in vars(torch.nn).items() if n.endswith("Loss") and isinstance(c, type)}
    found = next((f for n, f in {**functions, **classes}.items() if n.lower() == named.name.lower()), None)
    if found is None:
        raise UserError(
            f"loss {named.name!r} is not in torch.nn.functional or torch.nn",
            nearest(named.name, [*functions, *classes]),
            "correct loss.name",
        )
    _refuse_other_inputs(found, named)
    takes = inspect.signature(found).parameters
    if "reduction" not in takes or not set(named.args) <= set(takes):
        raise UserError(
            f"loss {named.name} refused its args {named.args}",
            nearest(next(iter(named.args), ""), takes),
            "correct loss.args",
        )
    if isinstance(found, type):
        try:
            return found(reduction="none", **named.args)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"loss {named.name} refused its args {named.args}: {error}",
                            "keyword arguments it takes", "correct loss.args") from None
    return lambda o, t: found(o, t, reduction="none", **named.args)


def _refuse_other_inputs(loss: Any, named: Named) -> None:
    """Raise `UserError` for a loss that wants more, or other things, than outputs and targets."""
    function = getattr(loss, "forward") if isinstance(loss, type) else loss  # noqa: B009
    wanted = [name for name, p in inspect.signature(function).parameters.items()
              if name != "self" and p.default is p.empty and name not in named.args]
    own = [name for name, p in inspect.signature(loss).parameters.items()
           if isinstance(loss, type) and p.default is p.empty]  # sizes of weights that nothing here would train
    if own or len(wanted) != 2 or not wanted[1].startswith("target"):
        weights = " with weights of its own" if own else ""
        raise UserError(f"{named.name} is a loss of ({', '.join(wanted)}){weights}",
                        "one of the model's output and the targets alone",
                        "name another, or give the model file a task(model, batch) -> (loss_sum, weight)")


class Metrics:
    """Running (sum, weight) totals of the loss and of the configured metrics."""

    def __init__(self, spec: Any, config: Config, task: Callable[..., Pair]) -> None:
        self._spec, self._task = spec, task
        self._loss = None if config.loss.name == "auto" else _loss(config.loss)
        self._loss_named, self._mixes = config.loss, config.mixes_classes
        names = config.metrics if spec.task is None else []
        self._named = {name: _metric(name, config.loss.name) for name in names}
        self._totals = Totals()

    def add(self, model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
        """Add one batch; the model runs once, or once more for a model file that defines ``metrics``."""
        if self._spec.task is not None:
            self._totals.add(of_model_file(self._task, self._spec.metrics, model, batch))
            return
        x, targets, extra = _parts(batch)
        outputs = precision.widened(model(x))
        loss = self._loss or _auto(targets, self._loss_named.args, self._mixes)
        pairs = {"loss": (loss_sum(loss, outputs, targets, extra, self._loss_named), targets.shape[0])}
        for name, metric in self._named.items():
            pairs[name] = checked_pair(metric(outputs, targets), f"metric {name!r}", "(sum, weight)")
        self._totals.add(pairs)

    def take(self) -> dict[str, np.ndarray]:
        """Return float64[2] by name; they start anew."""
        return self._totals.take()


def _metric(name: str, loss: str) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """``accuracy``, an unreduced torch.nn.functional loss, or a user's ``module:callable``."""
    if name == "accuracy":
        return partial(_accuracy, loss=loss.lower())
    if ":" in name:
        return load_callable(name, "metrics")
    by_name = getattr(functional, name, None)
    if callable(by_name) and "reduction" in inspect.signature(by_name).parameters:
        _refuse_other_inputs(by_name, Named(name))
        return lambda o, t: (loss_sum(lambda a, b: by_name(a, b, reduction="none"), o, t, (), Named(name)), t.shape[0])
    raise UserError(f"metric {name!r} is unknown to the PyTorch backend",
                    nearest(name, ["accuracy", "mse_loss", "l1_loss", "cross_entropy"]) + " or module:callable",
                    "correct metrics")


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor, loss: str) -> Pair:
    """Right answers and answers: arg-max over dimension 1 (of targets too where they are shares of classes).

    Yes-or-no targets, known by a single output or by a ``loss`` of that kind, are right on their side of the
    threshold: 0 for logits, 0.5 for probabilities.
    """
    if targets.is_floating_point() and outputs.shape == targets.shape:
        yes_or_no = any(word in loss for word in ("binary", "bce", "multilabel"))
        if outputs.dim() == 1 or outputs.shape[-1] == 1 or yes_or_no:
            threshold = 0.5 if loss in ("binary_cross_entropy", "bceloss") else 0.0
            right = (outputs > threshold) == (targets > 0.5)
            return right.sum(), right.numel()
        targets = targets.argmax(dim=1)
    else:
        targets = _squeezed(targets, outputs)
    answers = outputs.argmax(dim=1)
    if answers.shape != targets.shape:
        raise UserError(f"accuracy has answers of shape {tuple(answers.shape)} and targets {tuple(targets.shape)}",
                        "equal shapes", "reshape the targets, or take accuracy out of metrics")
    right = answers == targets
    return right.sum(), right.numel()
