"""Loss and metrics of a PyTorch model as sums, by torch's own names, in training and evaluation.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` replaces the loss by name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.backends.pairs import Pair, Totals, checked_pair, means, of_model_file
from hvdtrain.backends.torch.losses import Loss, refuse_other_inputs, squeezed
from hvdtrain.backends.torch.modules import set_modes
from hvdtrain.backends.torch.state_metrics import StateMetric, is_state_metric, members, merged
from hvdtrain.backends.torch.transforms import precision
from hvdtrain.backends.torch.transforms.placement import Placement
from hvdtrain.backends.torch.transforms.precision import MixedPrecision
from hvdtrain.config import Config, Named
from hvdtrain.core import metric_entries
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols import Batch
from hvdtrain.data.layout import named_outputs

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
        x, targets, extra = _parts(batch)
        return self.pair(precision.widened(model(x)), targets, extra)

    def pair(self, outputs: torch.Tensor, targets: torch.Tensor, extra: Tensors) -> Pair:
        """Return (loss_sum, weight) of what the model gave."""
        return loss_sum(self._loss, outputs, targets, extra, self._named), self._loss.weight(targets)


def _users(task: Callable[..., Any]) -> Callable[..., Pair]:
    """Return a model file's task with its result checked."""
    def checked(model: torch.nn.Module, batch: Tensors) -> Pair:
        found = task(model, batch)
        if hasattr(found, "logits"):  # a ModelOutput, whose loss is a mean over this micro-batch
            raise UserError(f"task returned a {type(found).__name__}", "(loss_sum, weight)",
                            "leave task out, which uses the loss of the class of a model of transformers, or sum a "
                            "loss over the logits")
        return checked_pair(found)
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
        raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, for a loss by name",
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
    if outputs.shape == targets.shape or per_sample.dim() != max(outputs.dim(), targets.dim()):
        return False  # a loss over classes among others
    try:  # NumPy's rule is PyTorch's, whose function imports SymPy
        return tuple(per_sample.shape) == np.broadcast_shapes(outputs.shape, targets.shape)
    except ValueError:  # a loss over classes of targets (B, 1), whose shapes cannot be spread
        return False


class Metrics:
    """Running (sum, weight) totals of the loss and of the configured metrics, and the states of those with some."""

    def __init__(self, spec: Any, config: Config, task: Callable[..., Pair]) -> None:
        self._spec, self._task = spec, task
        self._by_name = ByName(config) if spec.task is None else None
        ignored = None if self._by_name is None else self._by_name.ignored
        self._named: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]] = {}
        self._states: dict[str, StateMetric] = {}
        for name in config.metrics if spec.task is None else []:
            found = _metric(name, config.loss.name, ignored)
            if is_state_metric(found):
                self._keep(metric_entries.short_name(name), found)
            else:
                self._named[name if ":" in name else metric_entries.short_name(name)] = found
        self._files: dict[str, list[StateMetric]] = {}
        self._totals, self._batches = Totals(), 0

    def undirected(self, name: str) -> bool:
        """Return whether ``name`` may be any object's, so that its name alone tells if larger values are better."""
        return bool(self._states) and name not in {"loss", *self._named}

    def _keep(self, name: str, metric: Any) -> list[StateMetric]:
        """Return the metrics of an object by their names, which no other entry may have."""
        found = members(name, metric)
        for member, one in found.items():
            if member in self._states or member in self._named:
                raise UserError(f"two metrics are named {member}", "a name for each", "put them into a "
                                "torchmetrics.MetricCollection, a dict of names and metrics, that a callable returns")
            self._states[member] = StateMetric(member, one)
        return [self._states[member] for member in found]

    def add(self, model: torch.nn.Module, batch: Tensors) -> None:
        """Add one batch; the model runs once, or again for a model file that defines ``metrics``."""
        updates: list[tuple[StateMetric, Sequence[Any]]] = []
        if self._by_name is None:
            pairs = of_model_file(self._task, self._spec.metrics and partial(self._of_file, updates), model, batch)
        else:
            x, targets, extra = _parts(batch)
            outputs = precision.widened(model(x))
            pairs = {"loss": self._by_name.pair(outputs, targets, extra)}
            for name, metric in self._named.items():
                pairs[name] = checked_pair(metric(outputs, targets), f"metric {name!r}", "(sum, weight)")
            updates += [(state, (outputs, targets)) for state in self._states.values()]
        with contextlib.ExitStack() as stack:
            for state, inputs in updates:
                stack.enter_context(state.all_or_nothing())
                state.update(self._batches, len(batch[0]), inputs)
            self._totals.add(pairs)
        self._batches += 1

    def _of_file(self, updates: list[tuple[StateMetric, Sequence[Any]]], model: torch.nn.Module, batch: Any) -> Any:
        """Return a model file's pairs, and put those that are (object, inputs) of a metric with states aside."""
        found = self._spec.metrics(model, batch)
        if not isinstance(found, Mapping):
            return found
        own = {name: value for name, value in found.items()
               if isinstance(value, (tuple, list)) and value and is_state_metric(value[0])}
        for name, (metric, *inputs) in own.items():
            if name not in self._files:
                self._files[name] = self._keep(name, metric)
            updates += [(state, inputs) for state in self._files[name]]
        return {name: pair for name, pair in found.items() if name not in own}

    def outputs(self, model: torch.nn.Module, batch: Tensors) -> Any:
        """Return the model's outputs for a batch, whose targets may be absent."""
        return model(batch[0]) if self._spec.predict is None else self._spec.predict(model, batch)

    def take(self) -> dict[str, Any]:
        """Return what was measured since the last call: sums, and the states of each object."""
        self._batches = 0
        states = {name: state.take() for name, state in self._states.items()}
        return {**self._totals.take(), **{name: found for name, found in states.items() if found is not None}}

    def results(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return each metric, from sums over ranks and from lists of the ranks' states; without those unknown here."""
        sums = {name: total for name, total in totals.items() if isinstance(total, np.ndarray)}
        states = [(name, self._states[name].result(total)) for name, total in totals.items()
                  if name not in sums and name in self._states and self._states[name].known]
        return merged(states, means(sums))


def _metric(name: str, loss: str, ignored: int | None) -> Any:
    """Return ``accuracy``, an unreduced torch.nn.functional loss, or a user's callable(outputs, targets) or object.

    ``ignored``: the label that the run's ``loss`` and so built-in metrics do not count.
    """
    if name == "accuracy":
        return partial(_accuracy, loss=loss.lower(), ignored=ignored)
    if ":" in name or "." in name or "(" in name or name.startswith("<"):
        found = metric_entries.loaded(name)
        if metric_entries.is_object(found) and not is_state_metric(found):
            raise UserError(f"metric {name} is a {type(found).__name__}, and the model is PyTorch's",
                            "an object of torchmetrics", "correct metrics")
        return found
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
        raise UserError(f"accuracy has predictions of shape {tuple(answers.shape)} and targets {tuple(targets.shape)}",
                        "equal shapes", "reshape the targets, or remove accuracy from metrics")
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

    def totals(self) -> dict[str, Any]:
        return dict(self._metrics.take())

    def results(self, totals: dict[str, Any]) -> dict[str, float]:
        return dict(self._metrics.results(totals))

    def undirected(self, name: str) -> bool:
        return bool(self._metrics.undirected(name))

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        with self.evaluating():
            return named_outputs(self.computed(self._placement.tensors(batch)), to_host)

    def computed(self, batch: Tensors) -> Any:
        """Return the model's outputs in the modes of an evaluation."""
        return self._metrics.outputs(self._model, batch)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)  # numpy lacks bfloat16
    return (tensor.float() if narrow else tensor).detach().cpu().numpy()
