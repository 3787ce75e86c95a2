"""The part of each parameter that this rank updates under ZeRO, as a parameter of its own.

Owns the way between the two: a slice is a view of the parameter's memory, so that no second copy of the model exists
and an optimizer over slices updates the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Slices:
    """Row-major elements [begin, end) of each of ``wholes``; (0, 0): none of it.

    ``tensors``: one parameter (end - begin,) for each, empty ones too. ``owned``: those that are not empty, which an
    optimizer is made over. Of a whole that is not contiguous (channels_last) the slice is a copy instead, made before
    each update and written back after it.
    """

    def __init__(self, wholes: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> None:
        self.spans = list(spans)
        self._wholes = list(wholes)
        self.tensors = [torch.nn.Parameter(self._slice(i), requires_grad=p.requires_grad)
                        for i, p in enumerate(self._wholes)]
        self.owned = [t for t in self.tensors if t.numel()]

    def _slice(self, i: int) -> torch.Tensor:
        begin, end = self.spans[i]
        return self._wholes[i].detach().reshape(-1)[begin:end]

    def extend(self, wholes: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Add slices ``spans`` of ``wholes``; return their parameters, empty ones too."""
        first = len(self._wholes)
        self._wholes += wholes
        self.spans += spans
        new = [torch.nn.Parameter(self._slice(i)) for i in range(first, len(self._wholes))]
        self.tensors += new
        self.owned += [t for t in new if t.numel()]
        return list(new)

    def link(self) -> None:
        """Point each slice at its whole's memory of now, which a model that was moved or cast has elsewhere."""
        for i, tensor in enumerate(self.tensors):
            whole = self._wholes[i]
            where = whole.data_ptr() + self.spans[i][0] * whole.element_size()
            if tensor.numel() and (tensor.data_ptr() != where or not whole.is_contiguous()):
                tensor.data = self._slice(i)

    @torch.no_grad()
    def written(self) -> None:
        """Bring what was updated into the wholes, and forget the gradients that it was updated from."""
        for i, (tensor, whole) in enumerate(zip(self.tensors, self._wholes)):
            tensor.grad = None
            if tensor.numel() and not whole.is_contiguous():
                row_major = whole.detach().reshape(-1)
                row_major[self.spans[i][0]:self.spans[i][1]] = tensor
                whole.copy_(row_major.view(whole.shape))


@torch.no_grad()
def take_over(slices: Slices, state: dict[torch.Tensor, dict[str, Any]], wholes: Sequence[torch.Tensor],
              whole_state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Copy into ``state`` of the slices what an optimizer over ``wholes`` holds of them, then empty ``whole_state``."""
    for tensor, whole, (begin, end) in zip(slices.tensors, wholes, slices.spans):
        if not tensor.numel():
            continue
        for key, value in whole_state.get(whole, {}).items():
            own = state[tensor].get(key)
            if isinstance(value, torch.Tensor):
                each = own.shape == tensor.shape if isinstance(own, torch.Tensor) else value.shape == whole.shape
                value = value.reshape(-1)[begin:end] if each else value  # a count of a 0-d parameter has its shape too
                if isinstance(own, torch.Tensor):  # which its owner may hold elsewhere too
                    own.copy_(value)
                    continue
                value = value.clone()
            state[tensor][key] = value
    whole_state.clear()
