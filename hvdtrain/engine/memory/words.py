"""What ranks have settled on for their memory, in words and as a table; pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.errors import count
from hvdtrain.core.units import shown
from hvdtrain.engine.memory.settle import Own

COLUMNS = ("block", "saves", "costs", "recomputed")
"""Headings of `table`."""

MOST_NAMED = 6


def note(rank: int, own: Own, micro: bool, remat: bool) -> str:
    """Return what a rank does and why, in one sentence."""
    fit, free = own.fit, own.free
    if not own.samples:
        return f"rank {rank} has no samples"
    room = "unknown room" if free is None else f"{shown(free)} that it may take"
    words = []
    if micro:
        words.append(f"{count(fit.parts, 'micro-batch', 'micro-batches')} of {fit.micro_batch}")
    if remat:
        names = fit.choice.names
        some = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        words.append(f"recomputes {len(names)} of {len(own.costs)} blocks ({some}) for {1e3 * fit.choice.seconds:.3g} "
                     "ms a micro-batch" if names else "recomputes nothing")
    then = f"{shown(fit.choice.peak)} in place of {shown(fit.need)}" if fit.choice.names else shown(fit.need)
    fits = "" if fit.choice.fits else ", which does not fit: nothing that is left to choose would"
    tried = (f"; in a trial of {count(own.tried, 'sample')} that saved {shown(max(0, own.measured))}, predicted "
             f"{shown(own.predicted)}") if own.tried else ""
    return f"rank {rank}: {', '.join(words)}; needs {then} of {room}{fits}{tried}"


def table(own: Own) -> list[list[str]]:
    """Return rows under `COLUMNS`: bytes and milliseconds of each block for this rank's micro-batch."""
    rows = [[cost.name, shown(max(0, cost.saved_bytes)), f"{1e3 * cost.forward_s:.3g} ms",
             "yes" if cost.name in own.fit.choice.names else "no"] for cost in own.costs]
    chosen = [cost for cost in own.costs if cost.name in own.fit.choice.names]
    if chosen:
        rows.append(["together", shown(own.fit.need - own.fit.choice.peak), f"{1e3 * own.fit.choice.seconds:.3g} ms",
                     f"{len(chosen)} of {len(own.costs)}"])
    return rows


def alike(owns_P: Sequence[Own]) -> bool:
    """Return whether all ranks have settled on the same."""
    found = [(own.samples, own.fit.micro_batch, own.fit.choice.names) for own in owns_P]
    return all(one == found[0] for one in found)
