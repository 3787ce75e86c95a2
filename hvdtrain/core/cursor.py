"""Where a run stands in its data: one small value that a checkpoint stores and a feed starts from.

Owns the position and its arithmetic. Does not know the data, the batch size or the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.errors import UserError


@dataclass(frozen=True)
class Cursor:
    """A position between two steps, the same on every rank.

    ``epoch``: passes completed. ``step``: global steps completed in the run. ``epoch_step``: steps
    completed in this epoch. ``samples``: samples of this epoch consumed by all ranks together; this is what
    a resumed run skips, so that it is exact at another global batch too.
    """

    epoch: int = 0
    step: int = 0
    epoch_step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Cursor:
        """Return the position after one more step that consumed ``samples`` samples over all ranks."""
        return Cursor(self.epoch, self.step + 1, self.epoch_step + 1, self.samples + int(samples))

    def next_epoch(self) -> Cursor:
        """Return the position at the start of the next epoch."""
        return Cursor(self.epoch + 1, self.step, 0, 0)

    def to_dict(self) -> dict[str, int]:
        """Return plain integers by name, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Undo `to_dict`; `UserError` for missing or unknown names and for values that cannot be a
        position."""
        names = [field.name for field in dataclasses.fields(cls)]
        fit = isinstance(values, Mapping) and sorted(values) == sorted(names) and all(
            type(values[name]) is int and values[name] >= 0 for name in names)
        if not fit or values["epoch_step"] > values["step"]:
            raise UserError(f"the data position is {values!r}",
                            f"whole numbers >= 0 named {', '.join(names)}, epoch_step not above step",
                            "resume from another checkpoint: this one is damaged or not hvdtrain's")
        return cls(**values)
