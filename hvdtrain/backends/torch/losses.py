"""Losses of PyTorch by name, unreduced, and the weight by which torch's own mean of each divides."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.config import Named
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.data.weighting import LabelWeight

IGNORED = -100
"""Default of torch's ``ignore_index``."""
FEW = 256
"""Labels that Python counts faster than three operations of torch."""
TENSORS = ("weight", "pos_weight")
"""Arguments that torch takes as tensors only."""
_TASK = "give the model file a task(model, batch) -> (loss_sum, weight)"


class Loss:
    """Evaluate a loss of torch.nn.functional or torch.nn by name; ``auto`` chooses by the type of the targets.

    ``ignored``: the label that does not count, None for a loss whose mean is over all samples and elements.
    ``batch_weight``: weighs a numpy batch as `weight` does its tensors; None where that is the number of samples.
    ``mixes``: targets are shares of classes (mixup). Errors: `UserError` for an unknown name or unusable arguments.
    """

    def __init__(self, named: Named, mixes: bool = False) -> None:
        self._mixes, self._made = mixes, dict[Any, Any]()
        self._args = _checked_args(named)
        self._found = None if named.name == "auto" else _found(Named(named.name, self._args), named)
        of_labels = self._found is None or _of_labels(self._found)
        self.ignored: int | None = int(self._args.get("ignore_index", IGNORED)) if of_labels else None
        self._class_weights: np.ndarray | None = self._args.get("weight") if of_labels else None
        if self._class_weights is not None and self._class_weights.ndim != 1:
            raise UserError(f"loss.args.weight is {named.args['weight']!r}", "a list with a number for each class",
                            "correct loss.args.weight")
        self.batch_weight: LabelWeight | None = None
        if self.ignored is not None:
            self.batch_weight = LabelWeight(lambda batch: batch[1], self.ignored, self._class_weights)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one value per element or per sample."""
        found = self._found
        if found is None:
            found, targets = self._by_type(outputs, targets)
        return self._ready(found, outputs)(outputs, targets)  # type: ignore[no-any-return]

    def weight(self, targets: torch.Tensor) -> float | torch.Tensor:
        """Return what torch's mean divides by, over the elements of a sample: all samples, where all labels count."""
        n = targets.shape[0]
        if self.ignored is None or targets.is_floating_point() or not targets.numel():
            return n
        if targets.is_cpu and targets.numel() <= FEW and self._class_weights is None and type(targets) is torch.Tensor:
            return (targets.numel() - targets.flatten().tolist().count(self.ignored)) / (targets.numel() // n)
        labels = targets.long()  # torch compares uint8 with -100 modulo 256
        counts = labels != self.ignored
        total = counts.sum()
        if self._class_weights is not None:
            if targets.device not in self._made:
                self._made[targets.device] = torch.from_numpy(self._class_weights).to(targets.device)
            total = (self._made[targets.device][torch.where(counts, labels, 0)] * counts).sum()
        return total.double() / (labels.numel() // n)

    def _by_type(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return the loss for the type of the targets, and the targets as it takes them.

        Cross entropy for integers, and for shares of classes where the run mixes them; else squared error.
        """
        if targets.is_floating_point():
            if self._mixes:
                return functional.cross_entropy, _same_shape(targets, outputs, "cross entropy")
            return functional.mse_loss, _same_shape(targets, outputs)
        if outputs.dim() < 2 or outputs.shape[1] == 1:
            raise UserError(f"the targets are integers and the model's output has shape {tuple(outputs.shape)}",
                            "one output per class",
                            "set loss, for example to binary_cross_entropy_with_logits with floating-point targets")
        return functional.cross_entropy, squeezed(targets, outputs).long()

    def _ready(self, found: Any, outputs: torch.Tensor) -> Any:
        """Return the loss with its arguments on the device and in the type of ``outputs``."""
        key = found, outputs.device, outputs.dtype
        if key not in self._made:
            _refuse_element_weights(found, self._args)
            dtype = outputs.dtype if outputs.is_floating_point() else torch.get_default_dtype()
            args = {name: torch.as_tensor(value, dtype=dtype, device=outputs.device) if name in TENSORS else value
                    for name, value in self._args.items()}
            args["reduction"] = "none"
            self._made[key] = found(**args) if isinstance(found, type) else partial(found, **args)
        for name in (name for name in TENSORS if name in self._args):
            shape = self._args[name].shape
            if len(shape) >= outputs.dim() and shape[:1] != (1,):
                raise UserError(f"loss.args.{name} has shape {shape} and the model's output {tuple(outputs.shape)}",
                                "weights within a sample, the same for all samples",
                                "give the data a third array (B,) of sample weights")
        return self._made[key]


def _checked_args(named: Named) -> dict[str, Any]:
    """Return the arguments without ``reduction``, weights as float64 arrays; `UserError` for a loss that is no mean."""
    args = {name: value for name, value in named.args.items() if value is not None}
    reduction = args.pop("reduction", "mean")
    batchmean = reduction == "batchmean" and named.name.lower() in ("kl_div", "kldivloss")
    old = next((name for name in ("size_average", "reduce") if name in args), None)
    if old or not (reduction == "mean" or batchmean):
        raise UserError(f"loss {named.name} with {old or f'reduction {reduction!r}'}", "reduction mean"
                        + (" or batchmean" if named.name.lower() in ("kl_div", "kldivloss") else ""),
                        f"leave {old or 'reduction'} out; for the steps of a sum, multiply lr by global_batch")
    for name in TENSORS:
        if name in args:
            try:
                args[name] = np.asarray(args[name], np.float64)
            except (TypeError, ValueError):
                args[name] = np.array(np.nan)
            if not (np.isfinite(args[name]) & (args[name] >= 0)).all():
                raise UserError(f"loss.args.{name} is {named.args[name]!r}", "a list of numbers of 0 or more",
                                f"correct loss.args.{name}")
    ignored = args.get("ignore_index", IGNORED)
    if isinstance(ignored, bool) or not isinstance(ignored, int):
        raise UserError(f"loss.args.ignore_index is {ignored!r}", "a whole number", "correct loss.args.ignore_index")
    return args


def _of_labels(found: Any) -> bool:
    """Return whether torch's mean of a loss is over the labels that it does not ignore, by the weights of classes."""
    if isinstance(found, type):
        return issubclass(found, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))
    return found in (functional.cross_entropy, functional.nll_loss)


def _refuse_element_weights(found: Any, args: dict[str, Any]) -> None:
    """Raise `UserError` for a ``weight`` that torch wants for each element of a whole batch."""
    if "weight" in args and found in (functional.mse_loss, functional.l1_loss, functional.huber_loss):
        raise UserError(f"loss {found.__name__} with loss.args.weight, one number for each element of a batch",
                        "weights of classes, of a loss that has classes",
                        "give the data a third array (B,) of sample weights")


def squeezed(class_numbers: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return class numbers (B, 1, ...) for outputs (B, C, ...) as (B, ...)."""
    column = class_numbers.dim() == outputs.dim() and class_numbers.shape[1] == 1
    return class_numbers.squeeze(1) if column else class_numbers


def _same_shape(targets: torch.Tensor, outputs: torch.Tensor, loss: str = "squared error") -> torch.Tensor:
    """Return ``targets``, unless torch would broadcast (B,) against (B, 1) to (B, B)."""
    if targets.shape != outputs.shape:
        raise UserError(f"the model's output has shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}",
                        f"equal shapes for {loss}", "reshape the targets, or the output in the model")
    return targets


def names() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return losses by name: functions of torch.nn.functional, and classes of torch.nn."""
    functions = {n: f for n, f in vars(functional).items()
                 if n.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")) and callable(f)}
    return functions, {n: c for n, c in vars(torch.nn).items() if n.endswith("Loss") and isinstance(c, type)}


def _found(named: Named, given: Named) -> Any:
    """Return a loss of torch.nn.functional or torch.nn; ``given``: ``named`` as configured, for messages."""
    functions, classes = names()
    found = next((f for n, f in {**functions, **classes}.items() if n.lower() == named.name.lower()), None)
    if found is None:
        raise UserError(
            f"loss {named.name!r} is not in torch.nn.functional or torch.nn",
            nearest(named.name, [*functions, *classes]),
            "correct loss.name",
        )
    refuse_other_inputs(found, named)
    takes = inspect.signature(found).parameters
    if "reduction" not in takes or not set(named.args) <= set(takes):
        raise UserError(f"loss {named.name} refused its args {given.args}", nearest(next(iter(named.args), ""), takes),
                        "correct loss.args")
    _refuse_element_weights(found, named.args)
    if isinstance(found, type):
        try:
            found(**{name: torch.as_tensor(v) if name in TENSORS else v for name, v in named.args.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"loss {named.name} refused its args {given.args}: {error}",
                            "keyword arguments it takes", "correct loss.args") from None
    return found


def refuse_other_inputs(loss: Any, named: Named) -> None:
    """Raise `UserError` for a loss that wants more, or other things, than outputs and targets."""
    function = getattr(loss, "forward") if isinstance(loss, type) else loss
    wanted = [name for name, p in inspect.signature(function).parameters.items()
              if name != "self" and p.default is p.empty and name not in named.args]
    own = [name for name, p in inspect.signature(loss).parameters.items()
           if isinstance(loss, type) and p.default is p.empty]  # sizes of weights that nothing here would train
    if own or len(wanted) != 2 or not wanted[1].startswith("target"):
        weights = " with weights of its own" if own else ""
        raise UserError(f"{named.name} is a loss of ({', '.join(wanted)}){weights}",
                        "a loss of only the model's output and the targets",
                        "choose another loss, or " + _TASK)
