"""The update from summed gradients: clipping, and whether there is one at all where they are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvdtrain.backends.torch.optim import Optimization
from hvdtrain.backends.torch.split import check_slots


class Update:
    """Updates by an optimizer; ``device``: where norms come together; ``asynchronous``: it is better not waited for.

    Such a device looks at the gradients by itself, where the optimizer lets it (`Optimization.gate`), and `skipped`
    tells one step later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left_out: torch.Tensor | None = None

    def skipped(self) -> bool:
        """Return whether the device left the last update out; by the next step it has decided."""
        found, self._left_out = self._left_out, None
        return found is not None and bool(found)

    def __call__(self, opt: Optimization, parts: Sequence[torch.Tensor], clip_norm: float, look: bool,
                 asynchronous: bool) -> tuple[bool, float]:
        """Clip ``parts`` to ``clip_norm`` (0: not) and update; return (finite, norm) as `Step.apply` does.

        ``look``: the norm is wanted, and there is no update where it is not finite.
        """
        norm = math.nan
        if clip_norm > 0 or look:
            norms = [torch.linalg.vector_norm(p).float().to(self._device) for p in parts]
            norm = float(torch.linalg.vector_norm(torch.stack(norms)))
            if not math.isfinite(norm):
                return False, norm
            if 0 < clip_norm < norm:
                for part in parts:
                    part.mul_(clip_norm / norm)
        elif asynchronous:
            self._left_out = any_not_finite(parts, self._device)
            if not opt.gate(self._left_out) and self.skipped():
                return False, norm
        opt.step()
        if opt.updates == 1:
            check_slots(opt.optimizer)
        return True, norm


def any_not_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a boolean scalar on ``device``: whether any element of ``tensors`` is NaN or infinite.

    A largest magnitude is NaN or infinite exactly where an element is; unlike a sum of squares it never overflows.
    """
    largest = (torch.linalg.vector_norm(x, ord=torch.inf) for x in tensors if x.numel())
    return ~torch.stack([one.isfinite().to(device) for one in largest]).all()
