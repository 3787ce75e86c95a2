"""Compute a forward or backward that may run out of memory: every one of a rank goes through `attempt`.

Owns catching the error and giving memory back. Each caller decides what a shortage means there:

=============================================  =======================================================================
caller                                         on a shortage
=============================================  =======================================================================
`schedule.Recovering`, `pipeline.over_ranks`   all ranks repeat the step, this rank with smaller micro-batches
`evaluating.Evaluating`                        the rank adds the same samples in halves
`callbacks.audit`                              the pair is not audited in this step, and with half the samples later
`balance.probe`, `balance.copies`              a smaller micro-batch is timed, and no larger one planned
blocks of a partitioned model                  half the samples are measured, and scaled to a micro-batch
`memory_plan.survey`                           half the samples are measured
`callbacks.memory_fit`                         the run is refused with one sample, else the first step finds a size
`first_sample`, `pipeline.first_sample`        the first step decides: the step may have more memory
`loss_coupling`                                the loss is not judged on so many samples
`faults.finite.blame`                          the step's number that is not finite keeps no name
=============================================  =======================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.cluster.machine import memory
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.types import first_line

T = TypeVar("T")


def attempt(compute: Callable[[], T], out_of_memory: Callable[[BaseException], bool], free: Callable[[], None],
            caught: Callable[[Exception], None] | None = None) -> tuple[T | None, str]:
    """Return (what ``compute`` returns, ""), or (None, why) where memory did not suffice; not collective.

    ``out_of_memory``: whether an error, or what a `UserError` was made of, says that memory lacked; other errors pass
    through. ``free``: gives back what a framework keeps for itself. ``caught``: called with the error, in place of
    which it may raise another one.
    """
    try:
        return compute(), ""
    except Exception as error:
        causes = (error, error.__cause__) if isinstance(error, UserError) and error.__cause__ else (error,)
        short = next(filter(out_of_memory, causes), None)
        if short is None:
            raise
        if caught is not None:
            caught(error)
        why = first_line(short)
        del causes, short
    # Out of the handler: the error's frames, which hold the tensors of the pass, are gone by now.
    clean_up(free)
    return None, why


def attempt_halving(compute: Callable[[int], T], samples: int, out_of_memory: Callable[[BaseException], bool],
                    free: Callable[[], None], least: int = 1) -> tuple[T, int, str]:
    """Return (what ``compute(n)`` returns, n, why n is not ``samples``) for the first n of ``samples``, a half, a
    quarter, ... and ``least`` that memory suffices for; not collective.

    Errors: `UserError` where memory does not suffice for ``least``.
    """
    n, first = samples, ""
    while True:
        value, why = attempt(lambda: (compute(n),), out_of_memory, free)  # noqa: B023  (called at once)
        if value is not None:
            return value[0], n, first and f"out of memory with {samples} samples ({first})"
        first = first or why
        if n <= least:
            raise UserError(f"out of memory with {count(n, 'sample')} while the model is measured ({why})",
                            "memory for the model and one sample", "use a smaller model, precision bf16, or a device "
                            "with more memory")
        n = max(least, n // 2)


def clean_up(free: Callable[[], None]) -> None:
    """Give memory back that nothing needs. The error that told of its lack must be forgotten by now."""
    gc.collect()
    free()
    memory.give_back()
