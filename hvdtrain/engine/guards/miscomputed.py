"""What is said of a rank that computes otherwise than others, and how far apart results may be by rounding. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FARTHER = 8.0
"""Two ranks at this ratio of distances from a third are not both right."""


class Miscomputed(RuntimeError):
    """A device computes wrongly.

    ``ranks``: which one, or two where no third could decide; ``parameter``: whose gradient differs first; ``good``: the
    step of the last audit that they passed, -1: none in this run.
    """

    def __init__(self, text: str, ranks: tuple[int, ...], parameter: str, step: int, good: int) -> None:
        super().__init__(text)
        self.ranks, self.parameter, self.step, self.good = ranks, parameter, step, good

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.ranks, self.parameter, self.step, self.good)


def resolution(kind: str, precision: str) -> float:
    """Return the part of a gradient's element that rounding on such a device may make between unlike devices.

    Elements count as their tensor's root mean square at least. On GPUs float32 is multiplied in TF32 by default.
    """
    return {"bf16": 2.0**-2, "fp16": 2.0**-5}.get(precision, 2.0**-10 if kind == "cpu" else 2.0**-5)


def clearly_farther(first: float, second: float, rounding: float) -> int | None:
    """Return which of two distances from a third rank is beyond what ``rounding`` and the other one explain, or None.

    >>> clearly_farther(0.5, 0.0001, 0.001), clearly_farther(0.0, 0.9, 0.001), clearly_farther(0.5, 0.4, 0.001)
    (0, 1, None)
    """
    for which, (far, near) in enumerate(((first, second), (second, first))):
        if far > rounding and far > FARTHER * near:
            return which
    return None


def tell(accused: Sequence[str], against: Sequence[int], ranks: tuple[int, ...], parameter: str, step: int, far: float,
         good: int, unsteady: bool) -> Miscomputed:
    """Return the error for ``ranks``, spoken of as ``accused``, which differ from the ranks ``against``."""
    by = f" by {far:.1g} of its size" if 0 < far < float("inf") else ""
    how = "from the same weights, samples and random state"
    if unsteady:
        what = f"{accused[0]} does not come to the same gradient twice, {how}; it differs first in {parameter}"
    elif len(ranks) == 1:
        others = f"rank{'s' if len(against) > 1 else ''} {', '.join(map(str, against))}"
        what = f"{accused[0]} computes another gradient than {others}, {how}: in {parameter}{by}"
    else:
        decides = "no third rank agrees with one of them" if against else "two ranks cannot tell which is right"
        what = (f"{' and '.join(accused)} compute different gradients, {how}; they differ in {parameter}{by}; "
                f"{decides}")
    them = "it" if len(ranks) == 1 else "both"
    back = f"No audit of {them} has agreed in this run: no checkpoint of it can be relied on"
    if good >= 0:
        back = f"An audit agreed with {them} last at step {good}: resume from a checkpoint of step {good} or before"
    return Miscomputed(f"audit at step {step}: {what}. {back}, and leave that device out or have it tested.", ranks,
                       parameter, step, good)
