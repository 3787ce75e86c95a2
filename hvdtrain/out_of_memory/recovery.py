"""What a rank does about its memory from step to step: its limit, and whether the step at hand is to be repeated.

Owns the rule: the first time at a size memory is cleaned up and the same size is tried again, since fragments may have
been in the way; then the micro-batch is halved, on this rank alone. It never grows again within a run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdtrain.errors import UserError
from hvdtrain.out_of_memory.recut import largest, recut

if TYPE_CHECKING:
    from hvdtrain.data.feed import StepBatch
    from hvdtrain.run import Run

TOPIC = "out of memory"
"""What a rank tells the others under that ran out and wants the step repeated (`hvdtrain.run.Word`)."""

NO_WAY_ON = "no way on from out of memory"
"""And that has no smaller size to try."""


class Recovery:
    """``limit``: samples of this rank's largest micro-batch, 0 while it never ran out. ``topic``: what the latest time
    that it ran out is told under.

    ``out_of_memory``: whether an exception says so; it frees what a framework has cached, too.
    """

    def __init__(self, out_of_memory: Callable[[BaseException], bool]) -> None:
        self.out_of_memory = out_of_memory
        self.limit = 0
        self.topic = TOPIC
        self._retried = 0

    def cut(self, batch: StepBatch) -> StepBatch:
        """Return ``batch`` as this rank can hold it."""
        return recut(batch, self.limit)

    def ran_out(self, batch: StepBatch) -> str:
        """Decide how ``batch`` is tried again; return that in words for the other ranks, which wait."""
        gc.collect()
        size = largest(batch)
        if size != self._retried:
            self._retried = size
            return f"with a micro-batch of {size}; the step is tried again at that size"
        if size <= 1:
            self.topic = NO_WAY_ON
            return "with a micro-batch of one sample"
        self.limit = -(-size // 2)
        return f"with a micro-batch of {size}; it goes on with {self.limit}"


def repeats(run: Run) -> bool:
    """Return whether a rank has just told that it ran out of memory: then every rank repeats the step.

    Errors: `UserError`, the same on every rank, where one of them has no smaller size to try.
    """
    lost = next((word for word in run.state.told if word.topic == NO_WAY_ON), None)
    if lost is not None:
        raise UserError(f"rank {lost.rank} is out of memory {lost.text}", "memory for the model and one sample",
                        "use remat: auto, data_parallel: zero, or model_parallel")
    return any(word.topic == TOPIC for word in run.state.told)
