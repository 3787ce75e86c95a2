"""Whether gradients on a device are finite, decided there, so that the host need not wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def any_not_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a boolean scalar on ``device``: whether any element of ``tensors`` is NaN or infinite.

    A largest magnitude is NaN or infinite exactly where an element is; unlike a sum of squares it never overflows.
    """
    largest = (torch.linalg.vector_norm(x, ord=torch.inf) for x in tensors if x.numel())
    return ~torch.stack([one.isfinite().to(device) for one in largest]).all()
