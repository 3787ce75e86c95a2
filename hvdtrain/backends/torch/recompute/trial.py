"""Whether blocks compute the same again: a batch with and without recomputing, compared to the bit.

Owns the comparison: gradients, buffers, parameters that a forward pass writes to, attributes, random generators, and
the tensors that a block saves for backward, which tell of a mask even where its gradient is zero so far. Where a device
gives other gradients each time, gradients do not count.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch.recompute.frame import Check, flat_bytes, same_bits
from hvdtrain.backends.torch.recompute.memory import Modules, attributes, attributes_kept
from hvdtrain.core.errors import UserError

Recomputing = Callable[[Sequence[str], Check], contextlib.AbstractContextManager[None]]
Computing = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Found:
    """What one pass left behind, by what it is, and what was noticed while blocks were computed again."""

    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    error: str = ""

    def differs(self, other: Found) -> list[str]:
        """Return in words what of it is not in ``other`` to the bit."""
        return [f"{kind} {name}".rstrip() for kind, values in self.left.items() for name, value in values.items()
                if not equal(value, other.left[kind].get(name))]


class Trial:
    """Tries the blocks ``names`` of ``model``.

    ``computing``: a context that computes a batch's gradients, there within it, and puts buffers and generators back.
    ``recomputing``: a context within which some blocks are recomputed. ``states``: the random generators' by name.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], computing: Computing, recomputing: Recomputing,
                 states: Callable[[], dict[str, np.ndarray]]) -> None:
        self._model, self._names, self._states = model, names, states
        self._computing, self._recomputing = computing, recomputing
        self._modules = Modules(model)

    def refusals(self) -> dict[str, str]:
        """Return why, by name, for those that cannot be recomputed exactly."""
        with self._parameters_kept():
            plain, twice = self._pass(()), self._pass(())
            noise = set(twice.differs(plain))
            every = self._pass(self._names)
            found = {name: "its forward pass is not called when the model computes a batch"
                     for name in self._names if name not in every.check.called and not every.error}
            if not self._why(every, plain, noise) and not every.check.differ:
                return found
            for name in self._names:
                if name not in found and (why := self._why(self._pass([name]), plain, noise, name)):
                    found[name] = why
            return found

    @contextlib.contextmanager
    def _parameters_kept(self) -> Iterator[None]:
        """After it, parameters are what they were before it: some forward passes write to them."""
        before = [(p, p.detach().clone()) for p in self._model.parameters()]
        try:
            yield
        finally:
            for param, copy in before:
                if not same_bits(param, copy):
                    param.data.copy_(copy)

    def _why(self, one: Found, plain: Found, noise: set[str], name: str = "") -> str:
        """What is wrong with a pass, or ""."""
        if one.error:
            return one.error
        wrong = [words for words in one.differs(plain) if words not in noise]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            return f"with it other values come out: {', '.join(wrong[:3])}{more}"
        if name in one.check.differ:
            return "it saves other values for backward when it is computed again"
        return ""

    def _pass(self, names: Sequence[str]) -> Found:
        found = Found()
        try:
            with attributes_kept(self._modules), self._recomputing(names, found.check), self._computing():
                found.left = self._left()
        except UserError as error:
            if not names:
                raise
            found.error = str(error)
        except Exception as error:  # noqa: BLE001 a user's code, which ran without remat
            if not names:
                raise
            found.error = f"computing it again raises {type(error).__name__}: {error}"
        return found

    def _left(self) -> dict[str, dict[str, Any]]:
        """What a pass has left, while it is there; of tensors of the model a digest, since three passes are compared.
        """
        model = self._model
        return {
            "the gradient of": {n: p.grad if p.grad is None else digest(p.grad) for n, p in model.named_parameters()},
            "parameter": {n: digest(p) for n, p in model.named_parameters()},
            "buffer": {n: digest(b) for n, b in model.named_buffers()},
            "attribute": attributes(self._modules),
            "random generator": self._states(),
        }


def digest(tensor: torch.Tensor) -> bytes:
    """Return a number for the bits of a tensor."""
    own = tensor.detach()
    own = (own if own.layout == torch.strided else own.to_dense()).cpu()
    return hashlib.blake2b(flat_bytes(own).numpy().data, digest_size=16).digest()


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same: tensors and arrays to the bit, numbers, words and containers of such.

    Anything else counts as the same where it is of one type.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (int, float, complex, str, bytes, set, frozenset)):
        return bool(one == other) or one != one
    return True
