"""Moves the average of the weights on after each update that was made (`hvdtrain.engine.average`)."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain import backends
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Ops
from hvdtrain.engine.average import Average
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class Ema(Callback):
    """Runs on all ranks: each averages what it holds, and all make the same updates."""

    where = "all"
    setting = "ema"

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(run, backends.load(run.spec.framework).Ops())

    def __init__(self, run: Run, ops: Ops) -> None:
        copies = run.parts.replicas[0].group.size if run.parts.replicas else run.control.size
        if copies > 1 and not run.dp.copies_equal:
            raise UserError("ema with a custom data_parallel, whose replicas may differ",
                            "replicate or zero", "set ema: 0, or average in that data_parallel")
        compiled = getattr(run.spec.model, "optimizer", None) if run.config.optimizer.name == "auto" else None
        if run.config.optimizer.args.get("use_ema") or getattr(compiled, "use_ema", False):
            raise UserError("ema, and use_ema of Keras' optimizer", "one of the two averages", "leave out one of them")
        run.average = Average(run.parts, ops, run.config.ema, run.control.rank)

    def fit_start(self, run: Run) -> None:
        if run.average is not None:
            run.average.start()

    def step_end(self, run: Run) -> None:
        if run.updated and run.average is not None:
            run.average.update()
