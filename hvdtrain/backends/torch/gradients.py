"""Gradients in the flat memory of their buckets, each handed over as soon as backward has made all of it.

Owns that memory, the hooks on the parameters, and which gradients are still to come. The first micro-batch of a step
leaves its gradients where autograd puts them; when a bucket's are all there they are copied into its memory by one
call, and every ``param.grad`` points there from then on: later micro-batches add to it. A view that is there from the
start would cost a pass to clear it and one more to add to it.

The last bucket fills when backward ends, so it has no hooks: what is left is handed over after backward. A model whose
gradients fit one bucket, as those of most small ones do, so runs without a line of Python between its layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.protocols import GradientSink


class _Filling:
    """A bucket, its memory, and what of the backward at hand it still waits for.

    ``taken``: the parameters' gradients are ``views`` of ``flat_N`` in this step.
    """

    def __init__(self, bucket: Bucket, flat_N: torch.Tensor, params: TorchParams) -> None:
        self.bucket, self.flat_N = bucket, flat_N
        self.views = params.views(bucket, flat_N)
        self.tensors = [params.tensors[i] for i in bucket.params]
        self.missing: set[int] = set()
        self.taken = self.handed_over = False

    def take_in(self) -> None:
        """Copy each param.grad into its slice of the bucket and point param.grad there; zeros where there is none.

        A gradient that a task replaced (``model.zero_grad()``) comes in the same way.
        """
        copied: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        for param, view in zip(self.tensors, self.views):
            grad = param.grad
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:
                copied.append(grad)
                into.append(view)
            param.grad = view
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(into, copied)
        self.taken = True


class Gradients:
    """The gradients of ``params``, summed over the micro-batches of a step and handed to a sink.

    ``place``: puts zeros that a sink has made on the device of their bucket. Without buckets gradients stay where
    autograd puts them.
    """

    def __init__(self, params: TorchParams, place: Callable[[torch.Tensor, Bucket], torch.Tensor]) -> None:
        self._params, self._place = params, place
        self._fillings: list[_Filling] = []
        self._hooks: list[Any] = []
        self._sink: GradientSink | None = None
        self._open = self._final = False
        self._factor = 1.0
        self._lock = threading.Lock()

    def connect(self, sink: GradientSink) -> None:
        """Allocate the buckets of ``sink`` and hook the parameters; memory of equal buckets is kept."""
        self.disconnect()
        kept = {f.bucket: f.flat_N for f in self._fillings}
        self._sink = sink
        self._fillings = []
        for bucket in sink.buckets:
            flat_N = kept[bucket] if bucket in kept else self._place(sink.buffer(bucket), bucket)
            self._fillings.append(_Filling(bucket, flat_N, self._params))
        for filling in self._fillings[:-1]:
            for index, param in zip(filling.bucket.params, filling.tensors):
                self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(filling, index)))

    def disconnect(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forget(self) -> None:
        """Drop every gradient."""
        for param in self._params.tensors:
            param.grad = None
        for filling in self._fillings:
            filling.taken = filling.handed_over = False

    def backward(self, loss: torch.Tensor, factor: float, final: bool) -> None:
        """Add the gradient of ``loss``, and if ``final`` hand over the gradient of ``loss / factor``."""
        self._factor, self._final = factor, final
        for filling in self._fillings:
            filling.missing = set() if filling.taken and not final else set(filling.bucket.params)
        self._open = True
        try:
            loss.backward()
        finally:
            self._open = False
        if not self._fillings and final:
            self._hand_over_singly()
        for filling in self._fillings:  # what no hook has seen full: unused parameters, the last bucket
            if final and not filling.handed_over:
                self._hand_over(filling)
            elif not filling.taken:
                filling.take_in()

    def nothing(self, poison: bool = False) -> None:
        """Hand over zeros, or NaN where ``poison`` is set, so that no rank updates."""
        value = math.nan if poison else 0.0
        assert self._sink is not None
        self._factor = 1.0
        if not self._fillings:
            for param in self._params.tensors:
                param.grad = torch.full_like(param, value)
            self._hand_over_singly()
        for filling in self._fillings:
            if filling.handed_over:
                continue
            filling.flat_N.fill_(value)
            for param, view in zip(filling.tensors, filling.views):
                param.grad = view
            self._hand_over(filling)

    def _hook(self, filling: _Filling, index: int) -> Callable[[torch.Tensor], None]:
        def made(param: torch.Tensor) -> None:
            if not self._open:
                return
            if index not in filling.missing:
                if self._final:  # the bucket may be on the wire with half of this gradient
                    name = self._params.names[index]
                    raise UserError(f"parameter {name} received its gradient twice in one backward",
                                    "one gradient for each parameter and backward",
                                    "give torch.utils.checkpoint use_reentrant=False")
                return
            filling.missing.remove(index)
            if not filling.missing:
                if self._final:
                    self._hand_over(filling)
                else:
                    filling.take_in()
        return made

    def _hand_over(self, filling: _Filling) -> None:
        """Give a full bucket to the sink, in it the gradient of the loss as it is."""
        assert self._sink is not None
        filling.take_in()
        filling.handed_over = True
        if self._factor != 1.0:
            filling.flat_N.mul_(1.0 / self._factor)
        with self._lock:  # of a split model each device has a thread in backward
            self._sink.put(filling.bucket.index, filling.flat_N)

    def _hand_over_singly(self) -> None:
        """Give each gradient to the sink; a parameter without one has a zero one, as it has with several ranks."""
        assert self._sink is not None
        for index, param in enumerate(self._params.tensors):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif self._factor != 1.0:
                param.grad.mul_(1.0 / self._factor)
            self._sink.put(index, param.grad)
