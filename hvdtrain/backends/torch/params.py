"""The trainable tensors of a PyTorch model: singly, as flat buckets, and under an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hvdtrain.backends.torch import audit
from hvdtrain.backends.torch.names import named_parameters
from hvdtrain.backends.torch.optimizer import ELEMENTWISE, TorchOptimizer
from hvdtrain.backends.torch.resuming import KERNELS
from hvdtrain.backends.torch.slices import Slices, take_over
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.planning.shards import in_bucket


class Make(Protocol):
    """Makes an optimizer of the run's kind over tensors, or over ``slices`` whose ``tensors`` they are.

    ``names``: of the parameters that they are, or are slices of; a model with parameter groups needs them.
    """

    def __call__(self, tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (),
                 slices: Slices | None = None) -> TorchOptimizer:
        """Return it, with state of its own."""
        ...


class TorchParams:
    """Implements `hvdtrain.core.protocols.Params`.

    ``names``, ``tensors``: in the model's own order, a shared tensor once. ``places``: the device of each, as an index.
    ``make``: returns an optimizer of the run's kind over tensors. ``whole``: whether the model is, and not one rank's
    part of it, which may have no parameters.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], places: Mapping[int, int],
                 make: Make, whole: bool = True) -> None:
        self._model, self._make = model, make
        self._run_optimizer: TorchOptimizer | None = None
        named = trainable(model) if whole else [(n, p) for n, p in named_parameters(model) if p.requires_grad]
        self.names, self.tensors = [n for n, _ in named], [p for _, p in named]
        self._places, self._blocks = places, blocks
        self.specs = self._specs(named)

    def _specs(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> list[ParamSpec]:
        block_of = _block_of(self._blocks)
        return [ParamSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch."), self._places.get(id(p), 0),
                          block_of.get(id(p), len(self._blocks))) for n, p in named]

    def extend(self, names: Sequence[str]) -> None:
        """Add parameters of the model, by name, behind all others."""
        live = dict(named_parameters(self._model))
        self.names += names
        self.tensors += [live[name] for name in names]
        self.specs += self._specs([(name, live[name]) for name in names])

    def made_of(self) -> list[str]:
        """Return a line for each parameter and buffer, those outside the state_dict too, and one for the optimizer."""
        return [*audit.made_of(self._model), *([self._run_optimizer.made_of()] if self._run_optimizer else [])]

    def views(self, bucket: Bucket, flat_N: torch.Tensor) -> list[torch.Tensor]:
        """Return ``flat_N`` (n,) cut into views of the shapes of the bucket's tensors."""
        return [flat_N[offset:offset + self.specs[i].n].view(shape)
                for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes)]

    def frozen(self) -> frozenset[int]:
        """Return the indices of the parameters without requires_grad."""
        return frozenset(i for i, tensor in enumerate(self.tensors) if not tensor.requires_grad)

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return a copy of the tensors of ``bucket`` as one vector (n,) on their device.

        Of elements [begin, end), where those are asked for, a view if they lie in one tensor.
        """
        inside = in_bucket(bucket, begin, bucket.n if end is None else end)
        if not inside:
            return self.tensors[bucket.params[0]].new_empty(0)
        if end is not None and len(inside) == 1:
            i, (a, b) = inside[0]
            return self.tensors[i].detach().reshape(-1)[a:b]
        return torch.cat([self.tensors[i].detach().reshape(-1)[a:b] for i, (a, b) in inside])

    @torch.no_grad()
    def write(self, bucket: Bucket, flat_N: torch.Tensor, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`, but for the elements ``known`` of tensors that lie row by row."""
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for i, offset, view in zip(bucket.params, bucket.offsets, self.views(bucket, flat_N)):
            tensor, n = self.tensors[i].detach(), self.specs[i].n
            begin, end = (min(max(edge - offset, 0), n) for edge in known)
            if begin == end or not tensor.is_contiguous():
                into.append(tensor)
                values.append(view)
                continue
            for part in (slice(0, begin), slice(end, n)):
                if part.start < part.stop:
                    into.append(tensor.view(-1)[part])
                    values.append(view.view(-1)[part])
        if into:
            torch._foreach_copy_(into, values)

    def optimizer(self, vectors: Sequence[torch.Tensor] | None = None) -> TorchOptimizer:
        """Return an optimizer of the run's kind over the tensors, or over ``vectors`` (n,), which it updates in place.

        Each call makes state anew.
        """
        if vectors is None:
            self._run_optimizer = self._make(self.tensors, names=self.names)
            return self._run_optimizer
        return self._make([torch.nn.Parameter(vector.detach()) for vector in vectors])

    def sliced(self, spans: Sequence[tuple[int, int]]) -> TorchOptimizer:
        """Return the run's optimizer over a slice of each tensor; the one over whole tensors gives its state back."""
        whole = self._run_optimizer
        assert whole is not None, "there is an optimizer to take over from"
        _refuse_slices(whole)
        slices = Slices(self.tensors, spans)
        made = self._run_optimizer = self._make(slices.tensors, names=self.names, slices=slices)
        for group, before in zip(made.optimizer.param_groups, whole.optimizer.param_groups):
            group.update({key: before[key] for key in KERNELS if key in before})  # other kernels round otherwise
        if whole.updates:
            made.load_scalars(whole.scalars())
        take_over(slices, made.optimizer.state, whole.tensors, whole.optimizer.state)
        return made


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of ``model`` that are trained, by name; `UserError` where there is none."""
    named = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
    if not named:
        raise UserError("the model has no trainable parameter", "at least one with requires_grad", "unfreeze one")
    if any(p.is_inference() for _, p in named):
        raise UserError("a model that was built within torch.inference_mode(), whose parameters take no gradient",
                        "parameters that can be trained", "build the model outside of `with torch.inference_mode():`")
    return named


def _refuse_slices(whole: TorchOptimizer) -> None:
    """Raise `UserError` unless an update of parts of tensors is the update of the tensors."""
    if whole.adopted is not None:
        raise UserError(f"data_parallel zero with the {whole.adopted.name} that a Keras model on PyTorch was compiled "
                        "with", "an optimizer of torch.optim, whose state is divided",
                        "set optimizer.name (for example adam), data_parallel: replicate, or KERAS_BACKEND=tensorflow")
    if not whole.elementwise:
        usual = ", ".join(sorted(c.__name__ for c in ELEMENTWISE))
        whose = "looks at whole tensors" if whole.given.kind is None else "may look at whole tensors"
        raise UserError(f"data_parallel zero with optimizer {whole.kind()}, which {whose}",
                        f"one that updates each element by itself: {usual}",
                        "take such a one, or data_parallel: replicate")


def _block_of(blocks: Sequence[Any]) -> dict[int, int]:
    """Return the index of the first block that holds a tensor, by the tensor's id."""
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for tensor in block.parameters():
            found.setdefault(id(tensor), number)
    return found
