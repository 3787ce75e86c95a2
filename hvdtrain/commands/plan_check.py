"""Trains a few steps and sets what they took beside the plan."""

from __future__ import annotations

from typing import Any

from hvdtrain.cluster.machine import memory
from hvdtrain.core import table
from hvdtrain.core.errors import count
from hvdtrain.core.units import shown
from hvdtrain.engine.memory import watch
from hvdtrain.engine.memory.plan import Plan


def checked(run: Any, plan: Plan, steps: int) -> None:
    """Train ``steps`` of an assembled run, which is over then, and print the peaks of all ranks; collective."""
    feed, control = run.feed, run.control
    from hvdtrain.engine import loop

    run.callbacks.clear()  # they count on a fit's begin and end, and this is none
    run.join()
    memory.host_peak_bytes(lambda: None)  # what was measured before does not count
    cursor = run.state.cursor
    batches = feed.epoch(cursor)
    for _, batch in zip(range(steps), batches):
        loop.train_step(run, batch)
    batches.close()
    peaks = control.gather(watch.peak_bytes(run))
    if control.rank == 0:
        rows = [[str(r), shown(need.total), shown(peak), f"{100 * (need.total / peak - 1):+.1f} %" if peak else "N/A"]
                for r, (need, peak) in enumerate(zip(plan.needs_P, peaks))]
        table.show(f"measured in {count(steps, 'step')}", ("rank", "predicted", "measured", "off by"), rows,
                   launched=control.size > 1)
