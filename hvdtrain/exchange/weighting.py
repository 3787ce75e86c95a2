"""Law 1: gradients are summed, never averaged; the loss is divided once by the global weight.

For global batch t with samples (or valid tokens) of total weight W, cut over ranks r and micro-batches m::

    loss_t = (1 / W) * sum_r sum_m loss_sum[r, m]        grad_t = sum_r sum_m grad(loss_sum[r, m] / W)

The second sum over r is the collective. Nothing depends on how the batch was cut: unequal ranks, a short last
batch, different micro-batch counts and a rank with nothing are the same formula. Source: the global-token
normalisation of torchtitan's train step; for unequal ranks, PyTorch issue 67253.
"""

from __future__ import annotations

import math

from hvdtrain.errors import UserError


def loss_scale(weight: float) -> float:
    """Return 1 / W, or 0 for a global batch of weight 0 (every token masked): its gradient is zero."""
    if not (math.isfinite(weight) and weight >= 0):
        raise UserError(f"the global weight of a batch is {weight}", "a finite number of 0 or more",
                        "check the model file's weight(batch)")
    return 1.0 / weight if weight > 0 else 0.0


def check_weight(counted: float, weight: float) -> None:
    """Raise `UserError` where the tasks of all ranks counted another weight than the W the loss was divided by.

    Law 1 holds only if both speak of the same thing: a task that counts tokens needs a ``weight(batch)`` that does.
    """
    if abs(counted - weight) > 1e-3 * max(abs(counted), abs(weight)):
        raise UserError(f"task counted a weight of {counted:g} where the loss was divided by {weight:g}",
                        "the same from task(model, batch) and weight(batch)",
                        "define weight(batch) in the model file; without it the weight is the number of samples")
