"""The callbacks of a run, in the order in which they see an event.

Each line says why its callbacks come before those of the lines below.

- AutoCompile: what follows measures a model that is compiled.
- Supervised, Preempt: signals and the supervisor are heard before anything at FIT_START takes long.
- NanGuard: a step that ends the run is not reported as one that trained.
- Throughput, Ledger: speed and samples of a step are counted before anybody reports or saves them.
- MemoryReport, OutOfMemory, MemoryFit: MemoryReport starts the findings that MemoryFit adds to, which reads what
  OutOfMemory has heard. All precede Balance, which probes with micro-batches that fit.
- Meter, StageMeter: the window that ends with a step is closed before Balance decides by it and Recorder writes it.
- Ema: the average follows the update before anybody evaluates or saves.
- Balance: shares are planned at FIT_START before the transports are measured; it waits for these in later steps.
- EvalSteps: no callback below raises before it knows of an evaluation.
- EarlyStop: a stop is asked for before EVAL_END is reported; best weights are back before Keras' on_train_end.
- Plateau: the rate has followed the evaluation before it is reported and saved.
- AutoWire: opens the transports over which AutoCompression compares compressors.
- Freeze: what it unfreezes at an epoch is trained before callbacks of the user's see the model.
- UnusedReport, then those of the key `callbacks`: they may change the model, which reports are to show.
- Trace, System, WhatIf: their records precede the "end" that Recorder writes.
- Recorder: has recorded the event before the caller's callbacks, such as History and Keras' own, print or raise.
- Those of the caller (``more``): the last that may change weights.
- KeepBest: what callbacks above evaluate or announce is known.
- Divergence, Audit: weights that differ or were computed wrongly are not saved.
- Checkpoint: holds the state of all callbacks above.
- RunForecast: shares, transports and the cost of saves are known.
- Seconds: what the others do at the end of a fit is counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.core import protocols
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import completed, give, load_callable
from hvdtrain.engine.callbacks.audit import Audit
from hvdtrain.engine.callbacks.auto_compile import AutoCompile
from hvdtrain.engine.callbacks.auto_compression import AutoCompression
from hvdtrain.engine.callbacks.auto_wire import AutoWire
from hvdtrain.engine.callbacks.balance import Balance
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.checkpoint import Checkpoint
from hvdtrain.engine.callbacks.divergence import Divergence
from hvdtrain.engine.callbacks.early_stop import EarlyStop, KeepBest
from hvdtrain.engine.callbacks.ema import Ema
from hvdtrain.engine.callbacks.eval_steps import EvalSteps
from hvdtrain.engine.callbacks.forecast import RunForecast
from hvdtrain.engine.callbacks.freeze import Freeze
from hvdtrain.engine.callbacks.ledger import Ledger
from hvdtrain.engine.callbacks.memory_fit import MemoryFit, MemoryReport
from hvdtrain.engine.callbacks.meter import Meter
from hvdtrain.engine.callbacks.nan_guard import NanGuard
from hvdtrain.engine.callbacks.out_of_memory import OutOfMemory
from hvdtrain.engine.callbacks.plateau import Plateau
from hvdtrain.engine.callbacks.preempt import Preempt, Supervised
from hvdtrain.engine.callbacks.recorder import Recorder
from hvdtrain.engine.callbacks.seconds import Seconds, Throughput
from hvdtrain.engine.callbacks.stages import StageMeter
from hvdtrain.engine.callbacks.system import System
from hvdtrain.engine.callbacks.trace import Trace
from hvdtrain.engine.callbacks.unused_parameters import UnusedReport
from hvdtrain.engine.callbacks.whatif import WhatIf
from hvdtrain.engine.run import Run

FIRST: tuple[type[Callback], ...] = (
    AutoCompile, Supervised, Preempt, NanGuard, Throughput, Ledger, MemoryReport, OutOfMemory, MemoryFit, Meter,
    StageMeter, Ema, Balance, EvalSteps, EarlyStop, Plateau, AutoWire, AutoCompression, Freeze, UnusedReport)
"""Built-in callbacks that decide and measure; those of the key ``callbacks`` follow."""
REPORTS: tuple[type[Callback], ...] = (Trace, System, WhatIf, Recorder)
"""Built-in callbacks that report; those of the caller follow."""
LAST: tuple[type[Callback], ...] = (KeepBest, Divergence, Audit, Checkpoint, RunForecast, Seconds)
"""Built-in callbacks that compare and save what all others have made."""
# Each class says by `before` and `after` what its place has to keep; `tests/unit/engine/test_callback_order.py` checks.


def in_order(run: Run, more: Callable[[Run], Sequence[protocols.RunCallback]] | None) -> list[protocols.RunCallback]:
    """Return the callbacks of ``run`` in the order in which they see an event; ``more`` makes the caller's."""
    made: dict[str, Callback] = {}

    def wanted(classes: Sequence[type[Callback]]) -> list[Callback]:
        return [made.setdefault(cls.__name__, cls.make(run, made)) for cls in classes if cls.wanted(run)]

    first, own = wanted(FIRST), [_own_callback(text) for text in run.config.callbacks]
    return [*first, *own, *wanted(REPORTS), *(more(run) if more else ()), *wanted(LAST)]


def _own_callback(text: str) -> protocols.RunCallback:
    made: Any = load_callable(text, "callbacks")()
    if not (callable(getattr(made, "on", None)) and getattr(made, "where", None) in ("root", "all")):
        raise UserError(f"callbacks: {text} gave a {type(made).__name__}", "a callback of hvdtrain, whose where is "
                        "'root' or 'all'", "make it a subclass of hvdtrain.Callback")
    if not hasattr(made, "state_key"):  # not that of `Callback`, which all such classes would share
        give(made, "state_key", type(made).__name__)
    return completed(made, Callback)  # type: ignore[no-any-return]
