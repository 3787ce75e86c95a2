"""The callbacks of a run, in the order in which they see an event.

Each line says why its callbacks come before those of the lines below.

- AutoCompile: what follows measures a model that is compiled.
- Supervised, Preempt: signals and the supervisor are heard before anything at FIT_START takes long.
- NanGuard: a step that ends the run is not reported as one that trained.
- Throughput, Ledger: speed and samples of a step are counted before anybody reports or saves them.
- Memory, OutOfMemory, MemoryFit: Memory starts the findings that MemoryFit adds to, which reads what OutOfMemory has
  heard. All precede Balance, which probes with micro-batches that fit.
- Meter, Stages: the window that ends with a step is closed before Balance decides by it and Recorder writes it.
- Ema: the average follows the update before anybody evaluates or saves.
- Balance: shares are planned at FIT_START before the transports are measured; it waits for these in later steps.
- EarlyStop: a stop is asked for before EVAL_END is reported.
- AutoWire: opens the transports over which AutoCompression compares compressors.
- UnusedReport, then those of the key `callbacks`: they may change the model, which reports are to show.
- Trace, System, WhatIf: their records precede the "end" that Recorder writes.
- Recorder: has recorded the event before the caller's callbacks, such as History and Keras' own, print or raise.
- Those of the caller (``more``): the last that may change weights.
- Divergence, Audit: weights that differ or were computed wrongly are not saved.
- Checkpoint: holds the state of all callbacks above.
- Seconds: what the others do at the end of a fit is counted too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdtrain import backends
from hvdtrain.cluster.liveness import causes
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Callback
from hvdtrain.core.resolve import load_callable
from hvdtrain.engine.callbacks.audit import Audit
from hvdtrain.engine.callbacks.auto_compile import AutoCompile
from hvdtrain.engine.callbacks.auto_compression import AutoCompression
from hvdtrain.engine.callbacks.auto_wire import AutoWire
from hvdtrain.engine.callbacks.balance import Balance
from hvdtrain.engine.callbacks.checkpoint import Checkpoint
from hvdtrain.engine.callbacks.divergence import Divergence
from hvdtrain.engine.callbacks.early_stop import EarlyStop
from hvdtrain.engine.callbacks.ema import Ema
from hvdtrain.engine.callbacks.ledger import Ledger
from hvdtrain.engine.callbacks.memory import Memory
from hvdtrain.engine.callbacks.memory_fit import MemoryFit
from hvdtrain.engine.callbacks.meter import Meter
from hvdtrain.engine.callbacks.nan_guard import NanGuard
from hvdtrain.engine.callbacks.out_of_memory import OutOfMemory
from hvdtrain.engine.callbacks.preempt import Preempt
from hvdtrain.engine.callbacks.recorder import Recorder
from hvdtrain.engine.callbacks.seconds import Seconds
from hvdtrain.engine.callbacks.stages import Stages
from hvdtrain.engine.callbacks.supervised import Supervised
from hvdtrain.engine.callbacks.system import System
from hvdtrain.engine.callbacks.throughput import Throughput
from hvdtrain.engine.callbacks.trace import Trace
from hvdtrain.engine.callbacks.unused_parameters import UnusedReport
from hvdtrain.engine.callbacks.whatif import WhatIf

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run


def in_order(run: Run, more: Callable[[Run], list[Callback[Run]]] | None) -> list[Callback[Run]]:
    """Those that decide and measure before those that report; checkpoints last, so that they hold the others' state.

    The ranks' weights are compared after all that may change them, and before they are saved.
    """
    config = run.config
    own: list[Any] = [*([Supervised()] if causes.folder() else []), Preempt(config.time_limit_s()),
                      NanGuard(config.nan_guard, config.max_skipped), Throughput(), Ledger(), Memory(), OutOfMemory(),
                      MemoryFit()]
    if config.compile == "auto":
        own.insert(0, AutoCompile())
    meter = Meter(config.rebalance.every_steps)
    own += [meter] if run.control.size > 1 else []
    own += [Stages()] if run.parts.layout is not None else []
    own += [Ema(run, backends.load(run.spec.framework).Ops())] if config.ema else []
    compression = AutoCompression() if config.compression == "auto" else None
    wire = AutoWire(compression) if run.wires is not None and run.wires.names else None
    choosing: list[Any] = [one for one in (wire, compression) if one is not None]
    if config.balance != "off":
        own.append(Balance(meter, lambda: not all(one.settled for one in choosing)))
    if config.early_stop.metric:
        own.append(EarlyStop(config.early_stop))
    own += choosing
    own.append(UnusedReport())
    own += [_own_callback(text) for text in config.callbacks]
    if config.trace.steps:
        own.append(Trace(config.trace))
    copies = len(run.mesh.copies) > 1 and run.collectives.name != "null"  # null: every rank trains its own
    one_model = copies and run.parts.layout is None
    own += [System(), *([WhatIf()] if one_model else []), Recorder(meter)]
    own += more(run) if more else ()
    if config.check_every and copies:
        own.append(Divergence(config.check_every))
    if config.audit and one_model:
        own.append(Audit(config.audit))
    return [*own, Checkpoint(config.checkpoint), Seconds()]


def _own_callback(text: str) -> Callback[Run]:
    """Make the callback that ``text`` names."""
    made: Any = load_callable(text, "callbacks")()
    if not (callable(getattr(made, "on", None)) and getattr(made, "where", None) in ("root", "all")):
        raise UserError(f"callbacks: {text} gave a {type(made).__name__}", "a callback of hvdtrain, whose where is "
                        "'root' or 'all'", "make it a subclass of hvdtrain.Callback")
    return made  # type: ignore[no-any-return]
