"""Says and records where a rank ran out of memory, and what it did about it."""

from __future__ import annotations

from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.out_of_memory.advice import heard
from hvdtrain.engine.run import Run


class OutOfMemory(Callback):
    """Writes ``run.shortages``: a record for each time, the same on every rank, and into the log of those that keep
    one."""

    where = "all"

    def __init__(self) -> None:
        self._bends_told = False

    def told(self, run: Run) -> None:
        """Note what ranks have just told; the first time that one takes smaller micro-batches also what that bends."""
        for rank, shortage in heard(run):
            run.shortages.append({"rank": rank, **shortage._asdict()})
            run.note(f"step {shortage.step}: rank {rank} {shortage.words()}")
            fields = run.shortages[-1]
            run.record("out_of_memory", **{k: v for k, v in fields.items() if k != "step"}, at_step=fields["step"])
            smaller = shortage.phase == "training" and 0 <= shortage.then < shortage.size
            caveats = run.parts.caveats() if smaller and not self._bends_told else []
            if caveats:
                self._bends_told = True
                run.note(f"the gradient depends on how a batch is cut, which is another from step {shortage.step} on: "
                         + "; ".join(caveats))
