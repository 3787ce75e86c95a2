"""Gradients in the flat memory of their buckets, each handed over as soon as backward has made all of it.

Owns that memory and the hooks on the parameters; the exchange is the sink's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import GradientSink
from hvdtrain.core.protocols.types import Bucket


class _BucketFill:
    """A bucket, its memory, and the parameters of this backward that it still waits for.

    ``taken``: the parameters' gradients are ``views`` of ``flat_N`` in this step. ``full``: they are all there. Where a
    sink keeps no gradients ``flat_N`` is None: the bucket's memory is the sink's then, and asked for by `moved`.
    ``unused``: indices of the parameters that had no gradient when the bucket was last filled.
    """

    def __init__(self, bucket: Bucket, flat_N: torch.Tensor | None, params: TorchParams) -> None:
        self.bucket, self.flat_N, self._params = bucket, flat_N, params
        self.views = [] if flat_N is None else params.views(bucket, flat_N)
        self.tensors = [params.tensors[i] for i in bucket.params]
        self.missing: set[int] = set()
        self.unused: list[int] = []
        self.taken = self.full = self.handed_over = False

    def take_in(self) -> None:
        """Copy each param.grad into its slice of the bucket and point param.grad there; zeros where there is none.

        A gradient that a task replaced (``model.zero_grad()``) comes in the same way. A parameter without a gradient
        keeps none: a later micro-batch of the step may give it one.
        """
        self._copy(self.views)
        for param, view in zip(self.tensors, self.views):
            if param.grad is not None:
                param.grad = view
        self.taken = True

    def moved(self, flat_N: torch.Tensor) -> None:
        """Copy each param.grad into its slice of ``flat_N`` (n,), zeros where there is none, and drop it."""
        self._copy(self._params.views(self.bucket, flat_N))
        self.drop()

    def lying_flat(self) -> torch.Tensor | None:
        """Return the gradient of the only parameter as (n,) where it lies, or None where it is to be copied."""
        grad, dtype = self.tensors[0].grad, self.tensors[0].dtype
        self.unused = []
        if len(self.tensors) > 1 or grad is None or grad.is_sparse or grad.dtype != dtype or not grad.is_contiguous():
            return None
        return grad.view(-1)

    def drop(self) -> None:
        for param in self.tensors:
            param.grad = None

    def _copy(self, views: Sequence[torch.Tensor]) -> None:
        copied: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        self.unused = []
        for index, param, view in zip(self.bucket.params, self.tensors, views):
            grad = param.grad
            if grad is None:
                self.unused.append(index)
                view.zero_()
            elif grad is not view:
                copied.append(grad)
                into.append(view)
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(into, copied)


class Gradients:
    """The gradients of ``params``, summed over the micro-batches of a step and handed to a sink.

    ``place``: puts memory of a sink on the device of its bucket. ``early``: buckets are handed over while backward
    runs, where False after it. Without buckets gradients stay where autograd puts them.

    The first micro-batch leaves its gradients where autograd puts them. When a bucket's are all there, one call copies
    them into the bucket's memory and every ``param.grad`` points there: views from the start would cost a pass to clear
    and one more to add. The last bucket fills when backward ends, so it has no hooks, and a small model no Python
    between its layers.

    A sink that does not retain gradients takes the buckets in their order, from memory that may be the same for all. A
    bucket that is full before its turn keeps its gradients where autograd has put them, and a large tensor, which has a
    bucket of its own, is handed over as it lies. All ranks have the same order, so waits do not deadlock.
    """

    def __init__(self, params: TorchParams, place: Callable[[torch.Tensor, Bucket], torch.Tensor],
                 early: bool = True) -> None:
        self._params, self._place, self._early = params, place, early
        self._fillings: list[_BucketFill] = []
        self._hooks: list[Any] = []
        self._sink: GradientSink | None = None
        self._open = self._final = False
        self._retains = True
        self._factor = 1.0
        self._lock = threading.Lock()
        self._void: list[int] = []
        self._alone_unused: list[int] = []

    @property
    def unused(self) -> frozenset[int]:
        found = [i for filling in self._fillings for i in filling.unused] if self._fillings else self._alone_unused
        return frozenset((*found, *self._void))

    def connect(self, sink: GradientSink) -> None:
        """Register the hooks, and allocate the buckets of ``sink`` where they stay; equal ones keep their memory."""
        self.disconnect()
        kept = {f.bucket: f.flat_N for f in self._fillings if f.flat_N is not None}
        self._sink, self._retains = sink, sink.retains
        self._fillings = []
        for bucket in sink.buckets:
            flat_N = None
            if sink.retains:
                flat_N = kept[bucket] if bucket in kept else self._place(sink.buffer(bucket), bucket)
            self._fillings.append(_BucketFill(bucket, flat_N, self._params))
        for filling in self._fillings[:-1] if self._retains or self._early else []:
            for index, param in zip(filling.bucket.params, filling.tensors):
                self._hooks.append(hooked(param, self._hook(filling, index)))

    def disconnect(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forget(self) -> None:
        for param in self._params.tensors:
            param.grad = None
        self._void = []
        for filling in self._fillings:
            filling.taken = filling.full = filling.handed_over = False

    def backward(self, loss: torch.Tensor, factor: float, final: bool, empty: bool = False) -> None:
        """Add the gradient of ``loss``, and if ``final`` hand over the gradient of ``loss / factor``.

        ``empty``: the loss is of placeholder samples of weight 0, which use no parameter.
        """
        void = [i for i, param in enumerate(self._params.tensors) if param.grad is None] if empty else []
        self.add([loss], None, factor, final)
        if final:
            self._void = void
        else:
            for i in void:
                self._params.tensors[i].grad = None

    def add(self, ends: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, factor: float = 1.0,
            final: bool = False) -> None:
        """Go back from ``ends``, of which a loss has the gradients ``grads`` (None: they are losses); as `backward`."""
        self._factor, self._final = factor, final
        for filling in self._fillings:
            watched = final or self._retains and not filling.taken
            filling.missing = {i for i, param in zip(filling.bucket.params, filling.tensors)
                               if param.requires_grad} if watched else set()
        self._open = True
        try:
            if grads is not None or ends[0].requires_grad:  # a rank's own samples may use no parameter
                torch.autograd.backward(list(ends), grads)
        finally:
            self._open = False
        if not self._fillings and final:
            self._hand_over_singly()
        for filling in self._fillings:  # what no hook has seen full: unused parameters, the last bucket
            if final and not filling.full:
                self._filled(filling)
            elif self._retains and not filling.taken:
                filling.take_in()

    def hand_over(self, factor: float) -> None:
        """Hand over all that was added, divided by ``factor``."""
        self._factor, self._final = factor, True
        if not self._fillings:
            self._hand_over_singly()
        for filling in self._fillings:
            self._filled(filling)

    def nothing(self) -> None:
        """Hand over zeros."""
        assert self._sink is not None
        self._factor = 1.0
        if not self._fillings:
            self._hand_over_singly()
        self._void = list(range(len(self._params.tensors)))
        for filling in self._fillings:
            self._fill(filling, 0.0)
            for param, view in zip(filling.tensors, filling.views):
                param.grad = view

    def poison(self) -> None:
        """Hand over NaN for each bucket that the sink has not begun to exchange, so that no rank updates.

        After an error in the middle of a backward, of which a thread of another device may still be at work here.
        """
        assert self._sink is not None
        with self._lock:
            self._factor, self._final = 1.0, False
            owed = self._sink.owed() or ()
            for param in self._params.tensors:  # memory is what lacks
                param.grad = None
            for index in owed:
                self._fill(self._fillings[index], math.nan)

    def _fill(self, filling: _BucketFill, value: float) -> None:
        """Hand over a bucket that is full of ``value``."""
        filling.drop()
        flat_N = self._memory(filling) if filling.flat_N is None else filling.flat_N
        self._put(filling, flat_N.fill_(value))

    def _hook(self, filling: _BucketFill, index: int) -> Callable[[torch.Tensor], None]:
        def made(param: torch.Tensor) -> None:
            if not self._open:
                return
            if index not in filling.missing:
                if self._final:  # the bucket may be on the transport with half of this gradient
                    name = self._params.names[index]
                    raise UserError(f"parameter {name} received its gradient twice in one backward",
                                    "one gradient for each parameter and backward",
                                    "give torch.utils.checkpoint use_reentrant=False")
                return
            filling.missing.remove(index)
            if not filling.missing:
                if self._final:
                    self._filled(filling)
                else:
                    filling.take_in()
        return made

    def _filled(self, filling: _BucketFill) -> None:
        """Give a full bucket to the sink, with the gradient of the loss as it is, or mark it for its turn."""
        assert self._sink is not None
        filling.full = True
        if filling.flat_N is not None:
            filling.take_in()
            with self._lock:  # of a split model each device has a thread in backward
                if self._final:
                    self._put(filling, filling.flat_N)
            return
        with self._lock:
            while self._final and (due := self._due()) is not None:
                flat_N = due.lying_flat() if self._factor == 1.0 else None  # a hook of the user's may keep gradients
                if flat_N is None:
                    flat_N = self._memory(due)
                    due.moved(flat_N)
                due.drop()
                self._put(due, flat_N)

    def _due(self) -> _BucketFill | None:
        """Return the next bucket in order, once it is full."""
        due = next((f for f in self._fillings if not f.handed_over), None)
        return due if due is not None and due.full else None

    def _memory(self, filling: _BucketFill) -> torch.Tensor:
        """Return the sink's memory (n,) for a bucket; of a bucket of one parameter its own."""
        assert self._sink is not None
        if len(filling.tensors) == 1:
            return torch.empty_like(filling.tensors[0], memory_format=torch.contiguous_format).detach().view(-1)
        return self._place(self._sink.buffer(filling.bucket), filling.bucket)

    def _put(self, filling: _BucketFill, flat_N: torch.Tensor) -> None:
        """Give the sink a bucket's gradient ``flat_N`` (n,), of the scaled loss so far."""
        assert self._sink is not None
        filling.handed_over = True
        if self._factor != 1.0:
            flat_N.mul_(1.0 / self._factor)
        self._sink.put(filling.bucket.index, flat_N)

    def _hand_over_singly(self) -> None:
        """Give each gradient to the sink, zeros for a parameter without one."""
        assert self._sink is not None
        self._alone_unused = [i for i, param in enumerate(self._params.tensors) if param.grad is None]
        for index, param in enumerate(self._params.tensors):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if self._factor != 1.0:
                grad.mul_(1.0 / self._factor)
            self._sink.put(index, grad)


def hooked(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register ``hook`` on a parameter, also on one that is frozen for now, which PyTorch refuses."""
    trained = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trained)
