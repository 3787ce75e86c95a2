"""What a probe finds out about one rank."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.planning.batch.line import Line


@dataclass(frozen=True)
class Speed:
    """What one rank found.

    ``line``: seconds of a micro-batch by its samples. ``ceiling``: largest micro-batch, 0 for no limit. ``sizes``,
    ``seconds``: what the line was fitted to. ``remembered``: it comes from an earlier run, confirmed in this one.
    """

    line: Line
    ceiling: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    remembered: bool = False


def least(*limits: int) -> int:
    """The smallest of limits of which 0 is none."""
    return min((limit for limit in limits if limit > 0), default=0)
