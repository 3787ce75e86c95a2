"""`OneCycle`: the one-cycle schedule, which keras.optimizers.schedules lacks; with keras.ops only.

Owns its formula, that of ``torch.optim.lr_scheduler.OneCycleLR`` with cosines in two phases, so that twins follow one
rate. The momentum stays: Keras compiles it into an update.
"""

from __future__ import annotations

import math
from typing import Any

import keras


@keras.saving.register_keras_serializable(package="hvdtrain")
class OneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that climbs to ``max_learning_rate`` and falls to nearly 0 over ``total_steps`` updates.

    L. Smith, N. Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019. It
    begins at max / ``div_factor``, is largest after the share ``pct_start`` of the steps, and ends at the beginning's
    rate / ``final_div_factor``, which later updates keep. Between them it goes by half cosines.
    Errors: `ValueError` for a total below 2 and a share that is not in [0, 1].
    """

    def __init__(self, max_learning_rate: float, total_steps: int, pct_start: float = 0.3, div_factor: float = 25.0,
                 final_div_factor: float = 1e4) -> None:
        super().__init__()
        if total_steps < 2 or not 0 <= pct_start <= 1:
            raise ValueError(f"total_steps is {total_steps} and pct_start {pct_start}; wanted: 2 or more, and 0 to 1")
        self.max_learning_rate, self.total_steps = float(max_learning_rate), int(total_steps)
        self.pct_start, self.div_factor, self.final_div_factor = pct_start, div_factor, final_div_factor

    def __call__(self, step: Any) -> Any:
        """Return the rate of update ``step``, counted from 0."""
        ops = keras.ops
        step = ops.minimum(ops.cast(step, "float32"), float(self.total_steps - 1))
        low = self.max_learning_rate / self.div_factor
        peak = self.pct_start * self.total_steps - 1
        up = _between(low, self.max_learning_rate, step / max(peak, 1e-9))
        down = _between(self.max_learning_rate, low / self.final_div_factor,
                        (step - peak) / max(self.total_steps - 1 - peak, 1e-9))
        return ops.where(step <= peak, up, down)

    def get_config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (
            "max_learning_rate", "total_steps", "pct_start", "div_factor", "final_div_factor")}


def _between(first: float, last: float, share: Any) -> Any:
    """Return half a cosine from ``first`` at ``share`` 0 to ``last`` at 1."""
    return last + (first - last) / 2 * (1 + keras.ops.cos(math.pi * share))
